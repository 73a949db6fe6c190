# SPDX-License-Identifier: Apache-2.0
"""The tracked state: what a replica serves and a rank without state receives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from protos import shards_pb2
from workerd.shards.errors import InvalidManifest, UnsupportedState
from workerd.shards.manifest import Served
from workerd.shards.snapshot import Snapshot, Volatile
from workerd.shards.tree import Json, flatten, segment

EXTRA: Final = "_extra_state"


class Collected:
    """The state as it lies: every tensor once, under the first of its names."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Plain tensors that share the live memory."""
        self.originals: dict[str, torch.Tensor] = {}
        """The objects that the owners hold: parameters, distributed tensors."""
        self.nodes: dict[str, Json] = {}
        """The skeleton of each tracked object."""
        self._names: dict[tuple[object, ...], str] = {}

    def leaf(self, path: str, tensor: torch.Tensor) -> str:
        """Takes one tensor in; answers the name under which its memory is known."""
        local = local_tensor(path, tensor)
        key = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())
        if local.numel():
            name = self._names.setdefault(key, path)
            if name != path:
                return name
        self.tensors[path] = local
        self.originals[path] = tensor
        return path

    def skeleton(self) -> str:
        """The skeletons of all objects as one JSON text."""
        pairs = [[name, node] for name, node in self.nodes.items()]
        return json.dumps(pairs, separators=(",", ":"), allow_nan=False)


def parse_skeleton(skeleton: str) -> dict[str, Json]:
    """The skeletons by object. Raises InvalidManifest."""
    try:
        return {str(name): node for name, node in json.loads(skeleton)}
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidManifest("the skeleton is no list of objects") from error


class TrackedState:
    """Modules, optimizers, schedulers and whatever else has `state_dict` and `load_state_dict`.

    Everything named here is looked up anew at each call, so state that comes into being later
    (an optimizer's, at its first step) belongs to it; only the parameters of a module that FSDP2
    has sharded have to be there. Of a distributed tensor it is this rank's part. One thread at a
    time.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raises UnsupportedState for an object without the two methods."""
        for name, value in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(value, method, None)):
                    raise UnsupportedState(
                        f"{name}: a {type(value).__qualname__} has no {method}()"
                    )
        self.objects: Mapping[str, Any] = dict(objects)
        self._sharded: dict[str, dict[str, torch.Tensor]] = {
            name: dict(value.named_parameters(remove_duplicate=False))
            for name, value in objects.items()
            if isinstance(value, nn.Module) and _is_sharded(value)
        }
        """The parameters of each module that FSDP2 has sharded."""
        self._volatile = Volatile(self.objects)

    def snapshot(self) -> Snapshot:
        """A copy of what a forward pass changes although the weights don't.

        That is every buffer and extra state of the modules, and the whole of each object that is
        neither a module nor an optimizer, scheduler or gradient scaler. It costs nothing where
        there is none. The copy holds until the next snapshot, which uses its memory again.
        """
        return self._volatile.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Put a snapshot back, as often as needed."""
        self._volatile.restore(snapshot)

    def serve(self, step: int, overrides: Snapshot | None = None) -> Served:
        """The state to offer as state `step`: the live memory, but what `overrides` has copied.

        Raises UnsupportedState, which names the path and the type.
        """
        collected = self.collect(overrides)
        return Served(step, collected.tensors, collected.skeleton())

    def manifest(self, step: int, overrides: Snapshot | None = None) -> shards_pb2.Manifest:
        """What `serve` would announce. Reads every tensor once."""
        return self.serve(step, overrides).manifest()

    def digest(self, overrides: Snapshot | None = None) -> str:
        """Equal for two states exactly when every name, value and byte is."""
        return self.manifest(0, overrides).digest

    def collect(self, overrides: Snapshot | None = None) -> Collected:
        """Every tensor and the skeletons, now. Raises UnsupportedState."""
        collected = Collected()
        for name, value in self.objects.items():
            path = segment(name)
            if overrides is not None and name in overrides.objects:
                state: Any = overrides.objects[name].borrowed()
            elif name in self._sharded:
                state = _state_as_sharded(value, self._sharded[name])
            else:
                state = value.state_dict()
            if overrides is not None and isinstance(value, nn.Module):
                for key in state:
                    state[key] = overrides.values.get((name, key), state[key])
            collected.nodes[name] = flatten(state, path, collected.leaf)
        return collected


def _is_sharded(module: nn.Module) -> bool:
    return any(callable(getattr(one, "reshard", None)) for one in module.modules())


def _state_as_sharded(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What state_dict() would tell if the module were not in the middle of a pass.

    FSDP2 frees what it has gathered when state_dict() is called, and another thread may be
    computing with it. The parameters that it shards stay the same objects, and whole, all the time.
    """
    state: dict[str, Any] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        for key, parameter in part._parameters.items():
            if parameter is not None:
                state[dotted + key] = parameters[dotted + key]
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                state[dotted + key] = buffer
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            state[dotted + EXTRA] = part.get_extra_state()
    return state


def local_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of what this rank holds. Raises UnsupportedState."""
    kind = type(tensor)
    if hasattr(tensor, "to_local"):  # a distributed tensor
        tensor = tensor.to_local()
    elif kind is not torch.Tensor and kind is not nn.Parameter:
        raise UnsupportedState(f"{path}: cannot serve a tensor of type {kind.__qualname__}")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedState(f"{path}: cannot serve a tensor that is sparse, quantized or nested")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedState(f"{path}: cannot serve a tensor on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedState(f"{path}: cannot serve a lazily conjugated or negated tensor")
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise UnsupportedState(f"{path}: cannot serve a tensor whose elements share memory")
    return tensor


def live_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a module, as `collect` names them."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield local_tensor(name, tensor)
