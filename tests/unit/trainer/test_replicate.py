# SPDX-License-Identifier: Apache-2.0
"""The wrapper's layout of buckets, and the buffers that replicas share."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from workerd.trainer.buffers import SharedBuffers
from workerd.trainer.group import Group
from workerd.trainer.replicate import Replicator


class Shuffled(nn.Module):
    """Uses its layers in another order than it names them."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in order)
        self.order = order

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            inputs = self.layers[index](inputs).relu()
        return inputs


class Recorder:
    """Stands for a group: keeps what is reduced."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def mean(self, module: int, index: int, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        self.seen.append((index, buffer.numel()))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(buffer)
        return done


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_the_layout_is_final_and_does_not_depend_on_the_order_of_use(
    options: dict[str, bool],
) -> None:
    layouts, seen = set(), set()
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        group = Recorder()
        replicator = Replicator("127.0.0.1", lambda g=group: cast(Group, g), lambda: None)  # type: ignore[misc]
        model = replicator.replicate(Shuffled(order), bucket_cap_mb=0.01, **options)
        assert all(p.grad is None for p in model.parameters())
        assert not group.seen
        passes = []
        for _ in range(3):
            group.seen = []
            model(torch.randn(2, 32)).sum().backward()
            passes.append(tuple(group.seen))
        assert len(set(passes)) == 1
        assert len(passes[0]) > 1
        layouts.update(replicator.layouts)
        seen.update(passes)
    assert len(layouts) == 1
    assert len(seen) == 1


def test_other_shapes_have_another_layout() -> None:
    replicator = Replicator("127.0.0.1", lambda: None, lambda: None)
    replicator.replicate(nn.Linear(4, 4))
    replicator.replicate(nn.Linear(4, 5))
    assert len(set(replicator.layouts)) == 2


class Pair:
    """Stands for a group of two: the other replica's say is fixed."""

    size = 2

    def __init__(self, other: list[int], first: bytes = b"") -> None:
        self.other, self.first = other, first
        self.shared = 0

    def maximum(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.maximum(tensor, torch.tensor(self.other, dtype=torch.uint8)))

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.shared = tensor.numel()
        if self.first:
            tensor.copy_(torch.frombuffer(bytearray(self.first), dtype=torch.uint8))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(8), persistent=False)
        self.norm = nn.BatchNorm1d(3)


def test_only_what_changes_is_shared() -> None:
    model = Masked()
    buffers = SharedBuffers([model])
    norm = 3 * 4 * 2 + 8
    idle = Pair([0] * 5)
    buffers.agree(cast(Group, idle))
    assert idle.shared == norm  # the statistics of a normalisation always count as changed
    model.norm(torch.randn(4, 3))
    model.get_buffer("count").add_(1)
    changed = Pair([0] * 5)
    buffers.agree(cast(Group, changed))
    assert changed.shared == norm + 8
    elsewhere = Pair([1, 0, 0, 0, 0])
    buffers.agree(cast(Group, elsewhere))
    assert elsewhere.shared == norm + 8 + 64 * 64 * 4


def test_a_reload_is_no_change_of_a_forward_pass() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(4))
    buffers = SharedBuffers([model])
    model.get_buffer("mask").copy_(torch.zeros(4))
    buffers.rebase()
    quiet = Pair([0])
    buffers.agree(cast(Group, quiet))
    assert quiet.shared == 0


def test_replica_0_counts_and_only_from_the_update_on() -> None:
    model = nn.Module()
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("mean", torch.tensor([1.0, 2.0]))
    buffers = SharedBuffers([model])
    model.get_buffer("mean").mul_(3)
    model.get_buffer("flags").logical_not_()
    theirs = bytes([1, 1, 0]) + bytes(torch.tensor([8.0, 9.0]).view(torch.uint8).tolist())
    buffers.agree(cast(Group, Pair([0, 0], theirs)))
    assert model.get_buffer("mean").tolist() == [3.0, 6.0]
    buffers.apply()
    assert model.get_buffer("mean").tolist() == [8.0, 9.0]
    assert model.get_buffer("flags").tolist() == [True, True, False]
