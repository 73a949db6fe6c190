# SPDX-License-Identifier: Apache-2.0
"""Turn a record of ``protos/`` into the frozen value of the same name, and back.

The two agree field by field (a test holds them to it), so one walk over the fields serves all.
Maps become tuples of pairs in key order, repeated fields tuples, enums the value's own IntEnum.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

V = TypeVar("V")
M = TypeVar("M", bound=Message)


@cache
def _shape(cls: Callable[..., Any]) -> tuple[tuple[str, str, Any], ...]:
    """(field, kind, inner type) of each field; kind is one of value, one, many, map."""
    of: Any = cls
    hints = typing.get_type_hints(of)
    shape = []
    for field in fields(of):
        hint = hints[field.name]
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) is tuple:
            inner = arguments[0]
            if typing.get_origin(inner) is tuple:
                shape.append((field.name, "map", None))
            else:
                shape.append((field.name, "many", inner))
        elif isinstance(hint, types.UnionType):
            inner = next(one for one in arguments if one is not type(None))
            shape.append((field.name, "optional", inner))
        else:
            shape.append((field.name, "value", hint))
    return tuple(shape)


def _inward(kind: Any, raw: Any) -> Any:
    if isinstance(raw, Message):
        return from_record(kind, raw)
    return kind(raw) if isinstance(kind, type) and issubclass(kind, IntEnum) else raw


def from_record(cls: Callable[..., V], record: Message) -> V:
    """The frozen value of a record.

    Raises ValueError when the record has an enum value that this version doesn't know.
    """
    values: dict[str, Any] = {}
    for name, kind, inner in _shape(cls):
        raw = getattr(record, name)
        if kind == "map":
            values[name] = tuple(sorted(raw.items()))
        elif kind == "many":
            values[name] = tuple(_inward(inner, one) for one in raw)
        elif kind == "optional":
            values[name] = from_record(inner, raw) if record.HasField(name) else None
        else:
            values[name] = _inward(inner, raw)
    return cls(**values)


def to_record(value: Any, record: M) -> M:
    """Fill an empty record with a frozen value's fields, and return it."""
    cls: Callable[..., Any] = type(value)
    for name, kind, _ in _shape(cls):
        raw = getattr(value, name)
        if kind == "map":
            getattr(record, name).update(raw)
        elif kind == "many":
            into = getattr(record, name)
            for one in raw:
                if is_dataclass(one):
                    to_record(one, into.add())
                else:
                    into.append(one)
        elif raw is None:
            continue
        elif is_dataclass(raw):
            into = getattr(record, name)
            into.SetInParent()
            to_record(raw, into)
        else:
            setattr(record, name, raw)
    return record
