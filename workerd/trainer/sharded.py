# SPDX-License-Identifier: Apache-2.0
"""A module that FSDP2 has sharded inside the replica: its gradients meet over the replicas too.

FSDP2 reduces a gradient over the job's mesh, of which each rank keeps its part; then a hook takes
the mean of that part over the ranks of the same position, over whatever group stands at the moment.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workerd.trainer.errors import MisuseError
from workerd.trainer.group import Group


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has been applied to it, or to a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as heavy as all of the rest
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(one, kind) for one in module.modules())


class Sharded:
    """One such module. `current` and `may_reduce` as for the Replicator."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        current: Callable[[], Group | None],
        may_reduce: Callable[[], None],
    ) -> None:
        """Raises MisuseError for a module of which a part would not be reduced."""
        root: Any = module
        if not hasattr(root, "reset_iter_state"):
            raise MisuseError("replicate() needs fully_shard() of the module itself, by torch 2.13")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "to_local"):
                raise MisuseError(f"replicate(): nobody reduces the gradient of {name}")
        self._root = root
        self._begun = False  # torch resets nothing that has never run
        self._first = module.register_forward_pre_hook(lambda *_: self._begin())
        parts: list[Any] = [one for one in module.modules() if hasattr(one, "set_all_reduce_hook")]
        for index, part in enumerate(parts):
            part.set_all_reduce_hook(_hook(number, index, current, may_reduce))
        held: list[Any] = list(module.parameters())
        shapes = [(tuple(one.to_local().shape), str(one.dtype)) for one in held]
        said = repr((len(parts), shapes)).encode()
        self.layout = hashlib.blake2b(said, digest_size=8).hexdigest()

    def reset(self) -> None:
        """The attempt is dropped, perhaps in mid-pass: nothing that it gathered is used again."""
        if self._begun:
            self._root.reset_iter_state()

    def _begin(self) -> None:
        self._begun = True
        self._first.remove()


def _hook(
    number: int,
    index: int,
    current: Callable[[], Group | None],
    may_reduce: Callable[[], None],
) -> Callable[[torch.Tensor], None]:
    def hook(reduced: torch.Tensor) -> None:
        may_reduce()
        group = current()
        if group is not None:
            mean = group.mean(number, index, reduced).wait()
            if mean.data_ptr() != reduced.data_ptr():
                reduced.copy_(mean)

    return hook
