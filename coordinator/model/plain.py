# SPDX-License-Identifier: Apache-2.0
"""The frozen value of a record from its JSON fields, without the record in between.

With many nodes nearly all that a leader does is reading what they write. Only what
``coordinator.store.encode`` writes is taken here, exactly: for anything else, be it a newer
version's field or a number as text, :class:`Unusual` says that protobuf's own reader must decide.
So there is one meaning of a record, and this is a shorter way to the same value.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor

V = TypeVar("V")

_Reader = Callable[[Any], Any]


class Unusual(Exception):
    """It isn't what ``encode`` writes; it may be a record all the same."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a dataclass is made of JSON fields."""

    readers: Mapping[str, _Reader]
    empty: Mapping[str, Any]
    """What stands for a field that isn't there: protobuf's default, not the dataclass's."""


def from_fields(cls: Callable[..., V], descriptor: Descriptor, data: Any) -> V:
    """The value of a record's JSON object. Raises :class:`Unusual`."""
    if type(data) is not dict:
        raise Unusual
    plan = _plan(cls, descriptor)
    values = dict(plan.empty)
    try:
        for name, raw in data.items():
            values[name] = plan.readers[name](raw)
    except KeyError:
        raise Unusual from None  # a field, or the name of an enum, that isn't known here
    return cls(**values)


@cache
def _plan(cls: Callable[..., Any], descriptor: Descriptor) -> _Plan:
    of: Any = cls
    hints = typing.get_type_hints(of)
    readers: dict[str, _Reader] = {}
    empty: dict[str, Any] = {}
    for field in fields(of):
        name = field.name
        described = descriptor.fields_by_name[name]
        readers[name], empty[name] = _field(described, hints[name])
    return _Plan(readers, empty)


def _field(described: FieldDescriptor, hint: Any) -> tuple[_Reader, Any]:
    arguments = typing.get_args(hint)
    inner = next((one for one in arguments if one not in (type(None), Ellipsis)), hint)
    message = described.message_type
    if message is not None and message.GetOptions().map_entry:
        return _map, ()
    if message is not None:
        one: _Reader = partial(from_fields, inner, message)
        if typing.get_origin(hint) is tuple:
            return partial(_many, one), ()
        return one, None if arguments else one({})
    one, default = _scalar(described, inner)
    return (partial(_many, one), ()) if typing.get_origin(hint) is tuple else (one, default)


def _scalar(described: FieldDescriptor, hint: Any) -> tuple[_Reader, Any]:
    if described.enum_type is not None:
        return partial(_enum, dict(hint.__members__)), hint(0)
    match described.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32:
            return _int32, 0
        case FieldDescriptor.CPPTYPE_INT64:
            return partial(_int64, -(2**63), 2**63), 0
        case FieldDescriptor.CPPTYPE_UINT64:
            return partial(_int64, 0, 2**64), 0
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return _double, 0.0
        case FieldDescriptor.CPPTYPE_BOOL:
            return partial(_exactly, bool), False
        case FieldDescriptor.CPPTYPE_STRING:
            return partial(_exactly, str), ""
    raise TypeError(f"{described.full_name}: no value of the model has such a field")


def _exactly(kind: type[Any], raw: Any) -> Any:
    if type(raw) is not kind:
        raise Unusual
    return raw


def _enum(members: Mapping[str, Any], raw: Any) -> Any:
    return members[_exactly(str, raw)]


def _int32(raw: Any) -> int:
    if type(raw) is not int or not -(2**31) <= raw < 2**31:
        raise Unusual
    return raw


def _int64(least: int, above: int, raw: Any) -> int:
    """JSON's numbers don't hold 64 bits: protobuf writes them as text."""
    if type(raw) is not str or not raw.removeprefix("-").isdecimal():
        raise Unusual
    value = int(raw)
    if not least <= value < above or str(value) != raw:
        raise Unusual
    return value


def _double(raw: Any) -> float:
    if not math.isfinite(_exactly(float, raw)):
        raise Unusual
    return float(raw)


def _many(one: _Reader, raw: Any) -> tuple[Any, ...]:
    return tuple([one(each) for each in _exactly(list, raw)])


def _map(raw: Any) -> tuple[tuple[str, str], ...]:
    for value in _exactly(dict, raw).values():
        _exactly(str, value)
    return tuple(sorted(raw.items()))
