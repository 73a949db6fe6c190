# SPDX-License-Identifier: Apache-2.0
"""A nested value as named tensors and a JSON skeleton around them, and back.

In the skeleton None, bool, str, finite floats and ints of at most 64 bits stand for themselves;
everything else is a list that begins with its kind. Nothing is pickled, and what is not listed here
is refused.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from workerd.shards.errors import InvalidManifest, UnsupportedState

Json = None | bool | int | float | str | list["Json"]
Key = int | str

_INTEGER: Final = re.compile(r"-?[0-9]+")
_DICTS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_DEEPEST: Final = 64


def segment(key: Key) -> str:
    """A key as one part of a name: different keys never give the same part, and none holds a /."""
    if isinstance(key, int):
        return str(key)
    escaped = key.replace("~", "~0").replace("/", "~1").replace('"', "~2")
    return f'"{escaped}"' if _INTEGER.fullmatch(key) else escaped


def flatten(value: Any, path: str, leaf: Callable[[str, torch.Tensor], str]) -> Json:
    """The skeleton of `value`. `leaf` is given each tensor with its path and answers its name.

    Raises UnsupportedState, which names the path and the type.
    """
    return _flatten(value, path, leaf, _DEEPEST)


def _flatten(value: Any, path: str, leaf: Callable[[str, torch.Tensor], str], depth: int) -> Json:
    if not depth:
        raise UnsupportedState(f"{path}: nested more than {_DEEPEST} deep")
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind is str:
        _check_text(value, path)
        return value  # type: ignore[no-any-return]
    if kind is int:
        return value if value.bit_length() <= 64 else ["int", hex(value)]
    if kind is float:
        # repr and back is exact, except that it would lose a NaN's sign and payload.
        return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
    if isinstance(value, torch.Tensor):
        return ["tensor", leaf(path, value)]
    if kind is list or kind is tuple:
        items: list[Json] = ["list" if kind is list else "tuple"]
        for index, item in enumerate(value):
            items.append(_flatten(item, f"{path}/{index}", leaf, depth - 1))
        return items
    if kind in _DICTS:
        pairs: list[Json] = [_DICTS[kind]]
        for key, item in value.items():
            if type(key) is not int and type(key) is not str:
                raise UnsupportedState(f"{path}: a key of type {_name(key)}; only int and str")
            if type(key) is str:
                _check_text(key, path)
            below = f"{path}/{segment(key)}"
            pairs.append(_flatten(key, below, leaf, depth - 1))
            pairs.append(_flatten(item, below, leaf, depth - 1))
        return pairs
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode("ascii")]
    if kind is complex:
        return ["complex", struct.pack(">dd", value.real, value.imag).hex()]
    if kind is torch.Size:
        return ["size", *value]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    raise UnsupportedState(f"{path}: cannot serve a value of type {_name(value)}")


def unflatten(node: Any, tensors: Mapping[str, Any]) -> Any:
    """The value of a skeleton, with `tensors` by their names in it.

    Raises InvalidManifest for anything that `flatten` does not make.
    """
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise InvalidManifest(f"not a part of a skeleton: {str(node)[:80]}")
    kind, rest = node[0], node[1:]
    try:
        if kind == "list":
            return [unflatten(item, tensors) for item in rest]
        if kind == "tuple":
            return tuple(unflatten(item, tensors) for item in rest)
        if kind == "size":
            return torch.Size(rest)
        for made, name in _DICTS.items():
            if kind == name:
                items = [unflatten(item, tensors) for item in rest]
                return made(dict(zip(items[::2], items[1::2], strict=True)))
        (only,) = rest
        if kind == "tensor":
            return tensors[only]
        if kind == "int":
            return int(only, 16)
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(only))[0]
        if kind == "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(only)))
        if kind == "bytes":
            return base64.b64decode(only, validate=True)
        if kind == "dtype":
            return parse_dtype(only)
    except (KeyError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise InvalidManifest(f"not a part of a skeleton: {str(node)[:80]}") from error
    raise InvalidManifest(f"unknown kind in a skeleton: {kind[:80]}")


def dtype_name(dtype: torch.dtype) -> str:
    """As in str(torch.float32), without the "torch."."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a name that this torch has no dtype for."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype: {name[:80]}")
    return dtype


def _check_text(text: str, path: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedState(f"{path}: a str that is no Unicode text") from error


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
