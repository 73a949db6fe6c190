# SPDX-License-Identifier: Apache-2.0
"""What needs a device. One GPU is enough."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from protos.membership_pb2 import Source
from workerd.shards.state import TrackedState
from workerd.trainer.build import build
from workerd.trainer.group import Group, GroupPlan

dist: Any = torch.distributed


@pytest.fixture
def store() -> Any:
    """A rendezvous store."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def group_of_one(port: int, generation: int) -> Group:
    plan = GroupPlan(
        job="job",
        generation=generation,
        store_host="127.0.0.1",
        store_port=port,
        nonce="n",
        replica=0,
        replicas=1,
        position=0,
        positions=1,
        data_address="127.0.0.1",
        device=torch.device("cuda", 0),
        inner={},
        facts={},
    )
    return build(plan, lambda generation, error: pytest.fail(error))


def test_a_group_is_aborted_and_rebuilt(store: Any) -> None:
    for generation in range(1, 6):
        group = group_of_one(store.port, generation)
        buffer = torch.full((1 << 20,), float(generation), device="cuda")
        reduced = group.mean(0, 0, buffer).wait()
        torch.cuda.synchronize()
        assert reduced.eq(generation).all()
        group.agree()
        dropping = group.abandon()
        assert dropping is not None
        dropping.join(60)
        assert not dropping.is_alive()
        # After its end it answers with what it was given.
        late = group.mean(0, 0, buffer).wait()
        assert late.eq(generation).all()


def state_on_device(seed: int) -> tuple[nn.Module, TrackedState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(seed):
        model(torch.randn(16, 256, device="cuda")).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return model, TrackedState({"model": model, "optimizer": optimizer})


def test_a_pull_lands_in_device_memory() -> None:
    from workerd.shards.client import pull
    from workerd.shards.server import ShardServer
    from workerd.shards.wire import ShardIdentity

    _, theirs = state_on_device(3)
    model, ours = state_on_device(1)
    where = [p.data_ptr() for p in model.parameters()]
    assert theirs.digest() != ours.digest()
    server = ShardServer("127.0.0.1")
    try:
        server.offer(ShardIdentity("job", 2, 3, 0, "source", "nonce"), theirs.serve(3))
        result = pull(
            [Source(node="n", instance="source", address=server.address)],
            ours,
            host="127.0.0.1",
            job="job",
            generation=2,
            step=3,
            shard_position=0,
            nonce="nonce",
            timeout=60.0,
            stop=threading.Event(),
        )
    finally:
        server.close()
    assert result.bytes > 0
    assert ours.digest() == theirs.digest()
    assert [p.data_ptr() for p in model.parameters()] == where


def test_a_digest_is_the_same_on_every_device() -> None:
    model, state = state_on_device(2)
    there = TrackedState({"model": model}).digest()
    assert TrackedState({"model": model.cpu()}).digest() == there
    assert state.digest() != there
