# SPDX-License-Identifier: Apache-2.0
"""Objects to track, and a pull without a network between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from workerd.shards.manifest import Served
from workerd.shards.memory import PIECE, Writer, host_runs
from workerd.shards.receive import Destination
from workerd.shards.state import TrackedState


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embedding(tokens)))
        return out


class Position:
    """Where a reader of data stands."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *later: Any) -> None:
    """Some steps of made-up work; `later` are schedulers."""
    for _ in range(steps):
        loss = model(torch.randint(0, 17, (6,))).logsumexp(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in later:
            scheduler.step()


def transfer(source: Served, state: TrackedState) -> Destination:
    """What a pull does, with the wire left out."""
    manifest = source.manifest()
    destination = Destination(state, manifest)
    for entry in manifest.tensors:
        writer = Writer(destination.tensors[entry.name])
        for run in host_runs(source.tensors[entry.name], PIECE):
            put(writer, run)
        assert writer.finish() == entry.checksum
    destination.load()
    return destination


def put(writer: Writer, data: bytes | memoryview) -> None:
    """All of `data`, which the tensor still lacks."""
    while data:
        size = min(len(data), len(space := writer.space()))
        space[:size] = data[:size]
        writer.taken(size)
        data = data[size:]
