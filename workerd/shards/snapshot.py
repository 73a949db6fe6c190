# SPDX-License-Identifier: Apache-2.0
"""What a forward pass changes although the weights don't: copied at every step, put back before a
repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from workerd.shards.tree import Json, flatten, segment, unflatten


@dataclasses.dataclass(frozen=True)
class Tree:
    """A copied value: its skeleton, and its tensors by their paths."""

    node: Json
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def copy_of(cls, value: Any, path: str) -> Tree:
        """Raises UnsupportedState."""
        tensors: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}

        def leaf(below: str, tensor: torch.Tensor) -> str:
            # What is one tensor in the value stays one in the copy.
            name = names.setdefault(id(tensor), below)
            if name == below:
                tensors[below] = tensor.detach().clone()
            return name

        return cls(flatten(value, path, leaf), tensors)

    def borrowed(self) -> Any:
        """The value with the very tensors of this copy, to read."""
        return unflatten(self.node, self.tensors)

    def value(self) -> Any:
        """A copy that the caller may change."""
        return unflatten(self.node, {name: t.clone() for name, t in self.tensors.items()})


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of the volatile part of a TrackedState."""

    objects: Mapping[str, Tree]
    """Whole objects, by the name under which they are tracked."""
    values: Mapping[tuple[str, str], Any]
    """Values of a module's state_dict, by the module's name and their key: buffers, extra state."""
    buffers: tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]
    """Of each buffer the tensor that the module held, and its copy."""
    extras: tuple[Tree, ...]


EMPTY = Snapshot({}, {}, (), ())


class Volatile:
    """Finds the volatile part of the tracked objects once; copies and restores it."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = {
            name: value
            for name, value in objects.items()
            if not isinstance(value, nn.Module) and not changes_by_update(value)
        }
        # Where each buffer is held, so that one which a forward pass replaces is found too.
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, tuple[str, str]]] = []
        self._extras: list[tuple[nn.Module, tuple[str, str]]] = []
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                for prefix, module in value.named_modules(remove_duplicate=False):
                    dotted = f"{prefix}." if prefix else ""
                    for key in module._buffers:
                        self._buffers.append((module._buffers, key, (name, dotted + key)))
                    if type(module).get_extra_state is not nn.Module.get_extra_state:
                        self._extras.append((module, (name, f"{dotted}_extra_state")))
        self._idle = not self._objects and not self._buffers and not self._extras
        self._copies: dict[int, torch.Tensor] = {}

    def snapshot(self) -> Snapshot:
        """See TrackedState.snapshot."""
        if self._idle:
            return EMPTY
        values: dict[tuple[str, str], Any] = {}
        held, copies = self._copy_buffers()
        for (_, _, place), copy in zip(self._buffers, copies, strict=True):
            if copy is not None:
                values[place] = copy
        extras = tuple(
            Tree.copy_of(module.get_extra_state(), f"{segment(name)}/{segment(key)}")
            for module, (name, key) in self._extras
        )
        for (_, place), tree in zip(self._extras, extras, strict=True):
            values[place] = tree.borrowed()
        trees = {
            name: Tree.copy_of(value.state_dict(), segment(name))
            for name, value in self._objects.items()
        }
        return Snapshot(trees, values, tuple(zip(held, copies, strict=True)), extras)

    def _copy_buffers(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        held = [holder.get(key) for holder, key, _ in self._buffers]
        used: dict[int, torch.Tensor] = {}
        copies: list[torch.Tensor | None] = []
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Any], list[Any]]] = {}
        for index, buffer in enumerate(held):
            if buffer is None:
                copies.append(None)
                continue
            copy = used.get(id(buffer))
            if copy is None:
                copy = self._copies.get(index)
                if (
                    copy is None
                    or copy.shape != buffer.shape
                    or copy.dtype != buffer.dtype
                    or (copy.device != buffer.device)
                ):
                    copy = self._copies[index] = torch.empty_like(buffer, requires_grad=False)
                used[id(buffer)] = copy
                into, source = groups.setdefault((buffer.device, buffer.dtype), ([], []))
                into.append(copy)
                source.append(buffer)
            copies.append(copy)
        with torch.no_grad():
            for into, source in groups.values():
                torch._foreach_copy_(into, source)
        return held, copies

    def restore(self, snapshot: Snapshot) -> None:
        """See TrackedState.restore."""
        into, source = [], []
        for (holder, key, _), (buffer, copy) in zip(self._buffers, snapshot.buffers, strict=True):
            holder[key] = buffer
            if buffer is not None and copy is not None:
                into.append(buffer)
                source.append(copy)
        with torch.no_grad():
            for buffer, copy in zip(into, source, strict=True):
                buffer.copy_(copy)
        for (module, _), tree in zip(self._extras, snapshot.extras, strict=True):
            module.set_extra_state(tree.value())
        for name, tree in snapshot.objects.items():
            self._objects[name].load_state_dict(tree.value())


def changes_by_update(value: object) -> bool:
    """Whether an object changes only when the weights do (a wrapped optimizer has groups too)."""
    return isinstance(value, (Optimizer, LRScheduler, torch.amp.GradScaler)) or hasattr(
        value, "param_groups"
    )
