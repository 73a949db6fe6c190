# SPDX-License-Identifier: Apache-2.0
"""Wraps a module so that its gradients meet over whatever group stands at the moment.

The wrapper is torch's DistributedDataParallel over a group of one rank, made once; a communication
hook carries every bucket over the current group. So the wrapper never sees a group break or change.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workerd.trainer.errors import MisuseError
from workerd.trainer.group import Group
from workerd.trainer.sharded import Sharded, is_sharded

dist: Any = torch.distributed  # its stubs leave most of this out

_REFUSED = {
    "process_group": "the group belongs to the job and changes with its generations",
    "static_graph": "its first iteration is used up to fix the layout of the buckets",
    "init_sync": "replicas begin equal by the job's seed, or pull",
    "device_ids": "put the module on job.device",
}

# What DistributedDataParallel calls the equalising of buffers; torch 2.13 has renamed it.
_BUFFERS = [
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
]


class _Parameters(nn.Module):
    """Uses every parameter once, in order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._of = [module]  # in a list, so that it is no submodule

    def forward(self) -> torch.Tensor:
        zeros = [(p * 0).sum().float() for p in self._of[0].parameters() if p.requires_grad]
        device = zeros[0].device
        return torch.stack([zero.to(device) for zero in zeros]).sum()


class _Partial:
    """A wrapped module whose replicas may each use a part of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.means: dict[int, tuple[list[torch.Tensor], torch.futures.Future[Any]]] = {}

    def share(self, group: Group) -> None:
        here = [p.grad is not None for p in self._parameters]
        used = torch.tensor(here, dtype=torch.uint8)
        group.maximum(used)
        missing = {
            id(p)
            for p, mine, any_of_all in zip(self._parameters, here, used.tolist(), strict=True)
            if any_of_all and not mine
        }
        for parameters, mean in self.means.values():
            start = 0
            for parameter in parameters:
                end = start + parameter.numel()
                if id(parameter) in missing:
                    parameter.grad = mean.value()[start:end].clone().view_as(parameter)
                start = end
        self.means = {}


class Replicator:
    """Wraps the modules of one job. `current` answers the group of the moment, or None.

    `may_reduce` raises where a collective is not allowed.
    """

    def __init__(
        self,
        address: str,
        current: Callable[[], Group | None],
        may_reduce: Callable[[], None],
    ) -> None:
        self._address = address
        self._current = current
        self._may_reduce = may_reduce
        self._alone: Any = None
        self.wrapped: list[nn.Module] = []
        self.layouts: list[str] = []
        self._partial: list[_Partial] = []
        self._sharded: list[Sharded] = []

    def replicate(self, module: nn.Module, **ddp: Any) -> nn.Module:
        """See Job.replicate."""
        if is_sharded(module):
            if ddp:
                raise MisuseError(f"replicate() of a sharded module takes no {', '.join(ddp)}")
            number = len(self.wrapped)
            sharded = Sharded(module, number, self._current, self._may_reduce)
            self._sharded.append(sharded)
            self.layouts.append(sharded.layout)
            self.wrapped.append(module)
            return module
        return self._wrap(module, **ddp)

    def reset(self) -> None:
        """The attempt is dropped: whatever a wrapper has kept from it is, too."""
        for sharded in self._sharded:
            sharded.reset()

    def _wrap(self, module: nn.Module, **ddp: Any) -> DistributedDataParallel:
        for name, why in _REFUSED.items():
            if ddp.get(name):
                raise MisuseError(f"replicate() takes no {name}: {why}")
        if any(hasattr(p, "to_local") for p in module.parameters()):
            raise MisuseError(
                "replicate() of distributed tensors needs fully_shard() of the module: over a mesh "
                "dimension of one rank where nothing more is to be sharded"
            )
        # Done at every commit instead, as a part of the step that is repeated or applied whole.
        for name in _BUFFERS:
            ddp.pop(name, None)
        ddp[_BUFFERS[0]] = False
        wrapper = DistributedDataParallel(
            module, process_group=self._group_of_one(), init_sync=False, **ddp
        )
        number = len(self.wrapped)
        layout: dict[int, list[int]] = {}
        positions = {id(p): i for i, p in enumerate(module.parameters())}
        priming = True
        partial = _Partial(module) if ddp.get("find_unused_parameters") else None
        if partial is not None:
            self._partial.append(partial)

        def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            if priming:
                layout[bucket.index()] = [positions[id(p)] for p in bucket.parameters()]
                return _at_once(bucket.buffer())
            self._may_reduce()
            group = self._current()
            if group is None:
                return _at_once(bucket.buffer())
            mean = group.mean(number, bucket.index(), bucket.buffer())
            if partial is not None:
                partial.means[bucket.index()] = (bucket.parameters(), mean)
            return mean

        # torch refuses annotations that are strings, as they all are in this file.
        hook.__annotations__ = {}
        wrapper.register_comm_hook(None, hook)
        # DDP lays its buckets out anew after the first backward pass, in the order in which the
        # gradients came. Survivors have done so, a fresh spare has not; and the order may differ.
        # Two passes over the parameters in order make the layout final, the same everywhere.
        real = wrapper.module
        wrapper.module = _Parameters(module)
        try:
            for _ in range(2):
                layout.clear()
                wrapper().backward()
        finally:
            wrapper.module = real
        priming = False
        wrapper.zero_grad(set_to_none=True)
        shapes = [(tuple(p.shape), str(p.dtype)) for p in module.parameters()]
        said = repr((sorted(layout.items()), shapes)).encode()
        self.layouts.append(hashlib.blake2b(said, digest_size=8).hexdigest())
        self.wrapped.append(wrapper)
        return wrapper

    @property
    def partial(self) -> bool:
        """Whether a module may leave out parameters."""
        return bool(self._partial)

    def share_unused(self, group: Group) -> None:
        """Gives a parameter that only other replicas have used its mean gradient here too.

        The wrapper's own group has one rank: it leaves out what this replica has not used.
        Raises GroupBroken.
        """
        if group.size > 1:
            for partial in self._partial:
                partial.share(group)

    def _group_of_one(self) -> Any:
        if self._alone is None:
            store = dist.HashStore()
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
            options._threads = 1
            options._timeout = timedelta(minutes=30)
            backend = dist.ProcessGroupGloo(store, 0, 1, options)
            group = dist.ProcessGroup(store, 0, 1)
            kind = dist.ProcessGroup.BackendType.GLOO
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind, backend)
            group._set_default_backend(kind)
            self._alone = group
        return self._alone


def _at_once(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices = [buffer.device] if buffer.device.type == "cuda" else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(buffer)
    return future
