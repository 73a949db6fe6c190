# SPDX-License-Identifier: Apache-2.0
"""The SDK in a process of its own, without workerd: what a script sees, and what it may not do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from workerd.protocol.page import ProgressPage
from workerd.trainer import Job, LinkLost, MisuseError, join
from workerd.trainer.streams import derive


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HOTSPARE_SOCKET", raising=False)
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def built(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = job.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)
    return model, optimizer


def test_a_script_runs_as_it_is() -> None:
    with join() as job:
        model, optimizer = built(job)
        assert (job.replica, job.replicas, job.rank) == (0, 1, 0)
        before = [p.detach().clone() for p in model.parameters()]
        while job.step < 3:
            with job.attempt():
                model(torch.randn(8, 4)).square().mean().backward()
                job.commit(optimizer)
        assert job.step == 3
        assert job.overhead.steps == 3
        assert not torch.equal(before[0], next(model.parameters()))


def test_the_whole_batch_is_its_share() -> None:
    with join() as job:
        built(job)
        assert job.share(7) == range(7)
        assert job.weight(7) == 1.0
        with pytest.raises(MisuseError, match="has none for some"):
            job.share(0)
        with job.attempt():
            job.replicator.wrapped[0](torch.ones(1, 4)).sum().backward()
            job.commit(*job.optimizers)


def test_the_streams_depend_on_the_step_alone() -> None:
    def drawn() -> list[tuple[float, float, float]]:
        numbers = []
        with join() as job:
            model, optimizer = built(job)
            for _ in range(2):
                with job.attempt():
                    own = torch.rand((), generator=job.generator).item()
                    numbers.append((torch.rand(()).item(), random.random(), own))
                    model(torch.ones(1, 4)).sum().backward()
                    job.commit(optimizer)
                torch.rand(random.randrange(10))
        return numbers

    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]
    assert len({derive(1, 2, 3), derive(1, 3, 2), derive(2, 2, 3), derive(1, 2, 4)}) == 4
    assert 0 <= derive(-1, 1 << 40, 8192) < 1 << 63


def test_models_begin_equal() -> None:
    weights = []
    for _ in range(2):
        torch.rand(3)
        with join() as job:
            model, optimizer = built(job)
            weights.append(next(model.parameters()).detach().clone())
            with job.attempt():
                model(torch.ones(1, 4)).sum().backward()
                job.commit(optimizer)
    assert torch.equal(*weights)


def test_gradients_are_dropped_when_an_attempt_begins() -> None:
    with join() as job:
        model, optimizer = built(job)
        model(torch.ones(1, 4)).sum().backward()
        with job.attempt():
            assert all(p.grad is None for p in model.parameters())
            model(torch.ones(1, 4)).sum().backward()
            job.commit(optimizer)


def test_what_follows_the_commit_may_not_reduce() -> None:
    job = join()
    model, optimizer = built(job)
    with job.attempt():
        model(torch.ones(1, 4)).sum().backward()
        job.commit(optimizer)
        loss = model(torch.ones(1, 4)).sum()
        with pytest.raises(MisuseError, match="after commit"):
            loss.backward()


def test_misuse_is_named() -> None:
    job = join()
    with pytest.raises(MisuseError, match=r"needs track\(model"), job.attempt():
        pass
    with pytest.raises(MisuseError, match="by name"):
        job.track()
    with pytest.raises(MisuseError, match=r"number.*int.*state_dict"):
        job.track(number=3)
    with pytest.raises(MisuseError, match="process_group"):
        job.replicate(nn.Linear(2, 2), process_group=object())
    with pytest.raises(MisuseError, match="static_graph"):
        job.replicate(nn.Linear(2, 2), static_graph=True)
    model, optimizer = built(job)
    with pytest.raises(MisuseError, match="called before"):
        job.track(model=model)
    with pytest.raises(MisuseError, match="outside an attempt"):
        job.commit(optimizer)
    with pytest.raises(MisuseError, match="without commit"), job.attempt():
        pass
    with job.attempt():
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(MisuseError, match="not tracked"):
            job.commit(torch.optim.SGD(model.parameters(), lr=1.0))
        job.commit(optimizer)
        with pytest.raises(MisuseError, match="called twice"):
            job.commit(optimizer)
    with pytest.raises(MisuseError, match="comes before"):
        job.replicate(nn.Linear(2, 2))
    with pytest.raises(MisuseError, match="inside an attempt"), job.attempt(), job.attempt():
        pass


def test_a_replicated_module_must_be_tracked() -> None:
    job = join()
    forgotten = job.replicate(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    job.track(model=model, optimizer=torch.optim.SGD(forgotten.parameters(), lr=1.0))
    with pytest.raises(MisuseError, match="not tracked"), job.attempt():
        pass


def test_rehearsing_is_for_spares() -> None:
    job = join()
    built(job)
    job.rehearse(lambda: pytest.fail("only a spare rehearses"))


def test_an_exception_leaves_the_job() -> None:
    def script() -> None:
        with join() as job:
            built(job)
            with job.attempt():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()


def test_a_workerd_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ProgressPage.create(tmp_path / "page").close()
    monkeypatch.setenv("HOTSPARE_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("HOTSPARE_INSTANCE", "i")
    monkeypatch.setenv("HOTSPARE_PAGE", str(tmp_path / "page"))
    with pytest.raises(LinkLost, match="cannot reach workerd"):
        join()


def test_a_sharded_model_runs_as_it_is() -> None:
    with join() as job:
        mesh = job.mesh
        assert (mesh.size(), mesh.get_local_rank(), mesh.mesh_dim_names) == (1, 0, ("shard",))
        assert job.mesh is mesh
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        fully_shard(net, mesh=mesh)
        model = job.replicate(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        job.track(model=model, optimizer=optimizer)
        weight: Any = net[0].weight
        before = weight.full_tensor().tolist()
        while job.step < 2:
            with job.attempt():
                model(torch.randn(8, 4)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                job.commit(optimizer)
        assert weight.full_tensor().tolist() != before
    assert not torch.distributed.is_initialized()


def test_the_mesh_comes_before_the_first_step() -> None:
    job = join()
    model, optimizer = built(job)
    with job.attempt():
        model(torch.ones(1, 4)).sum().backward()
        job.commit(optimizer)
    with pytest.raises(MisuseError, match=r"job\.mesh comes before"):
        _ = job.mesh


def test_what_is_expected_to_take_long_is_said_once() -> None:
    with join() as job:
        built(job)
        with job.expect(seconds=60), pytest.raises(MisuseError, match="inside an expect"):
            job.expect(seconds=60).__enter__()
        for seconds in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(MisuseError, match="positive number"):
                job.expect(seconds).__enter__()
