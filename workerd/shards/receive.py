# SPDX-License-Identifier: Apache-2.0
"""Where a manifest's tensors go here, and how the rest of the state is loaded around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from protos import shards_pb2
from workerd.shards.errors import InvalidManifest, Mismatch
from workerd.shards.memory import checksum
from workerd.shards.state import Collected, TrackedState, live_tensors, local_tensor, parse_skeleton
from workerd.shards.tree import Json, dtype_name, parse_dtype, segment, unflatten

_EXTRA: Final = "_extra_state"


class Destination:
    """The memory here for every tensor of one manifest. Made before the first byte is asked for."""

    def __init__(self, state: TrackedState, manifest: shards_pb2.Manifest) -> None:
        """Checks the manifest against what is tracked and allocates what doesn't exist here yet.

        Raises Mismatch, InvalidManifest and UnsupportedState; nothing has been changed then.
        """
        self._state = state
        self._nodes = parse_skeleton(manifest.skeleton)
        if list(self._nodes) != list(state.objects):
            raise Mismatch(
                f"the source tracks {list(self._nodes)}, here are tracked {list(state.objects)}"
            )
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._local = state.collect()
        self._owners = {segment(name): name for name in state.objects}
        self.tensors: dict[str, torch.Tensor] = {}
        """Plain tensors to write each entry's bytes into."""
        self._values: dict[str, torch.Tensor] = {}
        for entry in manifest.tensors:
            self._place(entry)
        for name, tensor in self._local.tensors.items():
            if name not in self._entries and self._is_module(name):
                raise Mismatch(f"{name}: the source has no such tensor, here it is {_say(tensor)}")
        # Before anything is written, so that a skeleton which cannot be loaded changes nothing.
        self._loaded = {name: unflatten(node, self._values) for name, node in self._nodes.items()}
        for name, value in state.objects.items():
            if isinstance(value, nn.Module):
                _check_module(name, value, self._loaded[name])
            elif is_plain_optimizer(value):
                _check_optimizer(name, value, self._loaded[name])

    def _is_module(self, name: str) -> bool:
        return isinstance(self._state.objects[self._owner(name)], nn.Module)

    def _owner(self, name: str) -> str:
        try:
            return self._owners[name.split("/", 1)[0]]
        except KeyError:
            raise InvalidManifest(f"{name}: belongs to no tracked object") from None

    def _place(self, entry: shards_pb2.TensorEntry) -> None:
        name, shape, dtype = entry.name, tuple(entry.shape), parse_dtype(entry.dtype)
        owner = self._state.objects[self._owner(name)]
        here = self._local.tensors.get(name)
        fits = here is not None and tuple(here.shape) == shape and here.dtype == dtype
        if here is not None and fits:
            self.tensors[name] = here
            self._values[name] = self._local.originals[name]
            return
        there = f"{entry.dtype} {list(shape)}"
        optimizer = is_plain_optimizer(owner)
        if here is not None and (optimizer or isinstance(owner, nn.Module)):
            raise Mismatch(f"{name}: the source has {there}, here it is {_say(here)}")
        if isinstance(owner, nn.Module) and not name.endswith(_EXTRA) and f"{_EXTRA}/" not in name:
            raise Mismatch(f"{name}: the source has {there}, here is no such tensor")
        if optimizer:
            made = _optimizer_tensor(owner, name, shape, dtype)
        else:
            made = torch.empty(shape, dtype=dtype, device="cpu" if here is None else here.device)
        self._values[name] = made
        self.tensors[name] = local_tensor(name, made)

    def load(self) -> None:
        """Load everything that isn't in place once every tensor has arrived, and look that it is.

        Raises Mismatch when an object does not hold afterwards what it was given.
        """
        with torch.no_grad():
            for name, value in self._state.objects.items():
                loaded = self._loaded[name]
                if isinstance(value, nn.Module):
                    self._load_module(value, loaded)
                elif is_plain_optimizer(value):
                    _load_optimizer(value, loaded)
                else:
                    value.load_state_dict(loaded)
        self._verify(self._state.collect())

    def _load_module(self, module: nn.Module, loaded: Mapping[str, Any]) -> None:
        live = {tensor.data_ptr() for tensor in live_tensors(module)}
        rest = {
            key: value
            for key, value in loaded.items()
            if not isinstance(value, torch.Tensor)
            or (value.numel() and local_tensor(key, value).data_ptr() not in live)
        }
        if rest:
            module.load_state_dict(rest, strict=False)

    def _verify(self, now: Collected) -> None:
        for name, value in self._state.objects.items():
            # Of other objects nobody knows whether they answer what they were given.
            exact = is_plain_optimizer(value) or isinstance(value, LRScheduler)
            if exact and _text(now.nodes[name]) != _text(self._nodes[name]):
                raise Mismatch(f"{name}: does not hold what was loaded into it")
        for name, tensor in now.tensors.items():
            owner = self._state.objects[self._owner(name)]
            if not isinstance(owner, (nn.Module, Optimizer, LRScheduler)) or _EXTRA in name:
                continue
            arrived = self.tensors.get(name)
            if arrived is not None and arrived.data_ptr() == tensor.data_ptr():
                continue
            if arrived is None or checksum(tensor) != self._entries[name].checksum:
                raise Mismatch(f"{name}: does not hold what was loaded into it")


def is_plain_optimizer(value: object) -> bool:
    """Whether an optimizer's state is where torch keeps it and nothing else acts at its loading."""
    return (
        isinstance(value, Optimizer)
        and type(value).state_dict is Optimizer.state_dict
        and type(value).load_state_dict is Optimizer.load_state_dict
        and not value._optimizer_state_dict_post_hooks
        and not value._optimizer_load_state_dict_pre_hooks
        and not value._optimizer_load_state_dict_post_hooks
    )


def _parameters(optimizer: Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    return [(group, p) for group in optimizer.param_groups for p in group["params"]]


def _optimizer_tensor(
    optimizer: Optimizer, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Memory where the optimizer itself would have put it."""
    parts = name.split("/")
    parameters = _parameters(optimizer)
    if len(parts) < 4 or parts[1] != "state" or not parts[2].isdigit():
        return torch.empty(shape, dtype=dtype, device="cpu")
    if int(parts[2]) >= len(parameters):
        raise Mismatch(f"{name}: here are only {len(parameters)} parameters")
    group, parameter = parameters[int(parts[2])]
    local = local_tensor(name, parameter)
    if tuple(local.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    on_host = parts[3] == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else local.device)


def _check_module(name: str, module: nn.Module, loaded: Any) -> None:
    here = list(module.state_dict())
    if not isinstance(loaded, dict) or set(loaded) != set(here):
        there = set(loaded) if isinstance(loaded, dict) else set()
        raise Mismatch(
            f"{name}: only at the source: {sorted(there - set(here))[:5]}, "
            f"only here: {sorted(set(here) - there)[:5]}"
        )


def _check_optimizer(name: str, optimizer: Optimizer, loaded: Any) -> None:
    here = [len(group["params"]) for group in optimizer.param_groups]
    try:
        there = [len(group["params"]) for group in loaded["param_groups"]]
        indices = [key for key in loaded["state"] if isinstance(key, int)]
        shaped = all(isinstance(entry, dict) for entry in loaded["state"].values())
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidManifest(f"{name}: not the state of an optimizer") from error
    if there != here:
        raise Mismatch(f"{name}: parameters by group at the source {there}, here {here}")
    if not shaped or any(not 0 <= index < sum(here) for index in indices):
        raise InvalidManifest(f"{name}: not the state of an optimizer")


def _load_optimizer(optimizer: Optimizer, loaded: Mapping[str, Any]) -> None:
    # torch's own load_state_dict casts what has another dtype than its parameter, and with that
    # changes the bits; it has no other effect on an optimizer of the same class.
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for key, entry in loaded["state"].items():
        optimizer.state[parameters[key][1] if isinstance(key, int) else key] = entry
    for group, values in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        for key in set(group) - set(values):
            del group[key]
        group.update({key: value for key, value in values.items() if key != "params"})


def _text(node: Json) -> str:
    return repr(node)


def _say(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
