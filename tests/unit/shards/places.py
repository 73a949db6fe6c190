# SPDX-License-Identifier: Apache-2.0
"""A model that FSDP2 has sharded over two ranks, in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from workerd.shards.state import TrackedState
from workerd.trainer.inner import Inner

Built = tuple[Any, torch.optim.Optimizer, TrackedState]


class Places:
    """Builds as one of the two ranks of a replica, whose collectives hear nobody else."""

    def __init__(self) -> None:
        self._inner: Inner | None = None

    def at(self, position: int, rows: int = 9) -> Built:
        self.leave()
        self._inner = Inner(2, torch.device("cpu"), lambda: position, lambda: None, lambda: None)
        mesh = self._inner.mesh
        torch.manual_seed(0)
        # Of an odd number of rows the positions hold unequal parts; of one, the second has none.
        model = nn.Sequential(nn.Linear(6, rows), nn.BatchNorm1d(rows), nn.Linear(rows, 1))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, TrackedState({"model": model, "optimizer": optimizer})

    @property
    def mesh(self) -> Any:
        assert self._inner is not None
        return self._inner.mesh

    def leave(self) -> None:
        if self._inner is not None:
            self._inner.close()


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
