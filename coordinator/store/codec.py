# SPDX-License-Identifier: Apache-2.0
"""Protobuf records as JSON that a person can read with ``etcdctl get --prefix``.

One line, fields by their names in ``protos/``, enums by name, fields at their default left out.
Whole numbers of 64 bits are JSON strings, as protobuf's JSON mapping has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from coordinator.model.convert import from_record
from coordinator.model.plain import Unusual, from_fields
from coordinator.store.errors import RecordError
from coordinator.store.values import KeyValue

_M = TypeVar("_M", bound=Message)
_V = TypeVar("_V")


def encode(message: Message) -> bytes:
    """Return ``message`` as one line of JSON.

    Raises :class:`RecordError` for what JSON cannot carry (text that is not valid Unicode).
    """
    try:
        fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
        return json.dumps(fields, ensure_ascii=False).encode()
    except (json_format.Error, ValueError, TypeError) as error:
        raise RecordError(f"cannot write {message.DESCRIPTOR.name}: {error}") from error


def decode(cls: type[_M], source: KeyValue | bytes) -> _M:
    """Return the ``cls`` that ``source`` holds.

    Fields and enum names that this version does not know are left out, so that a newer version's
    records can be read during a rolling upgrade. Raises :class:`RecordError`, which names the key.
    """
    value = source.value if isinstance(source, KeyValue) else source
    message = cls()
    try:
        text = value.decode()
        if not text.lstrip().startswith("{"):
            raise ValueError("it is no JSON object")  # protobuf takes an empty list, too
        json_format.Parse(text, message, ignore_unknown_fields=True)
    except (json_format.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
        where = f"key {source.key!r}" if isinstance(source, KeyValue) else "value"
        raise RecordError(
            f"{where} is no {cls.DESCRIPTOR.name}: {error}; it starts {value[:80]!r}"
        ) from error
    return message


def decode_value(value_cls: Callable[..., _V], cls: type[Message], source: KeyValue) -> _V:
    """Return the frozen value of the ``cls`` that ``source`` holds.

    The same as ``from_record(value_cls, decode(cls, source))``, and much faster for what
    :func:`encode` has written. Raises :class:`RecordError`, which names the key, also for an
    enum's number that this version doesn't know.
    """
    try:
        text = source.value.decode()
        if "\\u" in text:
            raise Unusual  # it may be half a character, which JSON takes and protobuf doesn't
        data = json.loads(text, object_pairs_hook=_each_once)
        return from_fields(value_cls, cast(Descriptor, cls.DESCRIPTOR), data)
    except (Unusual, ValueError, RecursionError):
        record = decode(cls, source)
    try:
        return from_record(value_cls, record)
    except ValueError as error:
        raise RecordError(f"key {source.key!r} is no {cls.DESCRIPTOR.name}: {error}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise Unusual
    return data
