# SPDX-License-Identifier: Apache-2.0
"""Makes what a forward pass changes in the modules' buffers equal on all replicas.

As DistributedDataParallel does it, replica 0's buffers count. But here they are agreed on before
PREPARED and written in UPDATING, so that a step is repeated or applied whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from workerd.trainer.group import Group

_INSPECTED: Final = 2  # commits after which bytes are no longer compared


class SharedBuffers:
    """The persistent buffers of the tracked modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._changing: set[int] = set()  # places; once found, for good
        seen: set[int] = set()
        for tracked in modules:
            for module in tracked.modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen:
                        continue
                    if name in module._non_persistent_buffers_set:
                        continue
                    seen.add(id(buffer))
                    # Normalisation kernels change their statistics behind autograd's back: the
                    # version of these tensors does not count it.
                    if isinstance(module, _NormBase) and module.track_running_stats:
                        self._changing.add(len(self._places))
                    self._places.append((module._buffers, name))
        self._inspections = _INSPECTED
        self._agreed: tuple[list[torch.Tensor], torch.Tensor] | None = None
        self._marks: list[tuple[int, int]] = []
        self._first: list[torch.Tensor] = []
        self.rebase()

    @property
    def any(self) -> bool:
        """Whether there are such buffers."""
        return bool(self._places)

    def rebase(self) -> None:
        """The buffers hold a whole state now: later changes are a forward pass's."""
        if not self._places:
            return
        self._marks = [(id(b), b._version) for b in self._buffers()]
        self._first = [b.detach().clone() for b in self._buffers()] if self._inspections > 0 else []

    def agree(self, group: Group) -> None:
        """Fetches replica 0's values of all buffers that any replica has changed.

        Raises GroupBroken.
        """
        self._agreed = None
        if not self._places or group.size == 1:
            return
        buffers = self._buffers()
        self._find_changing(buffers)
        changing = torch.zeros(len(buffers), dtype=torch.uint8)
        changing[sorted(self._changing)] = 1
        group.maximum(changing)
        self._changing.update(changing.nonzero().flatten().tolist())
        shared = [buffers[i] for i in sorted(self._changing)]
        if shared:
            packed = torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in shared])
            group.broadcast(packed)
            self._agreed = (shared, packed)

    def apply(self) -> None:
        """Writes what `agree` has fetched. Part of the update."""
        if self._agreed is None:
            return
        start = 0
        shared, packed = self._agreed
        self._agreed = None
        for buffer in shared:
            size = buffer.numel() * buffer.element_size()
            # Copied first: a piece of the packed bytes may not be aligned for the type.
            piece = packed[start : start + size].clone().view(buffer.dtype)
            buffer.detach().copy_(piece.view(buffer.shape))
            start += size

    def _buffers(self) -> list[torch.Tensor]:
        found = []
        for holder, name in self._places:
            buffer = holder[name]
            if buffer is None:
                raise RuntimeError(f"the buffer {name} of a tracked module has been removed")
            found.append(buffer)
        return found

    def _find_changing(self, buffers: list[torch.Tensor]) -> None:
        for index, (buffer, mark) in enumerate(zip(buffers, self._marks, strict=True)):
            if (id(buffer), buffer._version) != mark:
                self._changing.add(index)
        if self._inspections > 0:
            self._inspections -= 1
            for index, (buffer, first) in enumerate(zip(buffers, self._first, strict=True)):
                if index not in self._changing and not torch.equal(buffer, first):
                    self._changing.add(index)
        elif self._first:
            self._first = []
