# SPDX-License-Identifier: Apache-2.0
"""What is done with a module that FSDP2 has sharded over the replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.unit.shards.places import Places, train
from workerd.trainer import MisuseError
from workerd.trainer.group import Group
from workerd.trainer.replicate import Replicator


class Halving:
    """Stands for a group of two replicas, of which the other one has no gradients."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def mean(self, module: int, index: int, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        self.seen.append((module, index))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(buffer / 2)
        return done


@pytest.fixture
def places() -> Iterator[Places]:
    one = Places()
    yield one
    one.leave()


def replicator(group: Halving | None = None) -> Replicator:
    return Replicator("127.0.0.1", lambda: cast(Group, group), lambda: None)


def test_a_dropped_pass_leaves_nothing_behind(places: Places) -> None:
    model, optimizer, _ = places.at(0)
    replicas = replicator()
    same: Any = replicas.replicate(model)
    assert same is model
    replicas.reset()  # before any pass
    train(model, optimizer)
    inputs = torch.randn(4, 6)
    model.eval()
    wanted = model(inputs).tolist()
    model(inputs)  # and no backward pass
    weight = model[2].weight
    assert not isinstance(weight, DTensor)
    with torch.no_grad():
        weight.zero_()  # as a broken collective may leave it
    replicas.reset()
    assert model(inputs).tolist() == wanted


def test_gradients_are_the_mean_over_the_replicas(places: Places) -> None:
    model, _, _ = places.at(0)
    group = Halving()
    replicas = replicator(group)
    model.eval()
    inputs = torch.randn(4, 6)
    model(inputs).square().mean().backward()
    alone = [one.grad.to_local().clone() for one in model.parameters()]
    model.zero_grad()
    replicas.replicate(model)
    model(inputs).square().mean().backward()
    halved = [one.grad.to_local() for one in model.parameters()]
    assert [one.tolist() for one in halved] == [(one / 2).tolist() for one in alone]
    assert sorted(group.seen) == [(0, 0), (0, 1)]


def test_a_part_that_nobody_reduces_is_refused(places: Places) -> None:
    model, _, _ = places.at(0)
    with pytest.raises(MisuseError, match="fully_shard"):
        replicator().replicate(nn.Sequential(model, nn.Linear(1, 1)))
    places.leave()
    places.at(0)
    outer: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(outer, mesh=places.mesh, ignored_params={outer[1].weight})
    with pytest.raises(MisuseError, match=r"gradient of 1\.weight"):
        replicator().replicate(outer)


def test_distributed_tensors_that_nobody_reduces_are_refused(places: Places) -> None:
    places.at(0)
    net = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(net, places.mesh, {"0": ColwiseParallel()}, src_data_rank=None)
    with pytest.raises(MisuseError, match="needs fully_shard"):
        replicator().replicate(net)


def test_it_takes_no_arguments_of_the_other_wrapper(places: Places) -> None:
    model, _, _ = places.at(0)
    with pytest.raises(MisuseError, match="bucket_cap_mb"):
        replicator().replicate(model, bucket_cap_mb=1)


def test_other_parts_have_another_layout(places: Places) -> None:
    layouts = []
    for position in (0, 0, 1):
        model, _, _ = places.at(position)
        replicas = replicator()
        replicas.replicate(model)
        layouts += replicas.layouts
    assert layouts[0] == layouts[1] != layouts[2]
