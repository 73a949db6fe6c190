# SPDX-License-Identifier: Apache-2.0
"""A value that has become a record, and JSON in etcd, and a value again, is the same."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator import model
from coordinator.model.plain import from_fields
from coordinator.store import KeyValue, RecordError, decode, decode_value, encode
from protos import incident_pb2, job_pb2, membership_pb2, node_pb2

DESCRIPTORS: dict[str, Any] = {
    name: descriptor
    for module in (incident_pb2, job_pb2, membership_pb2, node_pb2)
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
    if hasattr(model, name)
}
RECORDS: dict[str, Any] = {
    name: getattr(module, name)
    for module in (incident_pb2, job_pb2, membership_pb2, node_pb2)
    for name in module.DESCRIPTOR.message_types_by_name
    if name in DESCRIPTORS
}
_FIELDS = [field for record in RECORDS for field in DESCRIPTORS[record].fields]
_INT32 = {field.name for field in _FIELDS if field.type == field.TYPE_INT32}
_UNSIGNED = {field.name for field in _FIELDS if field.type == field.TYPE_UINT64}
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)

_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    text = str(hint)
    if text == "tuple[tuple[str, str], ...]":
        pairs = st.dictionaries(_TEXT, _TEXT, max_size=3)
        return pairs.map(lambda one: tuple(sorted(one.items())))
    if text.startswith("tuple["):
        inner = hint.__args__[0]
        return st.lists(_values(inner, name), max_size=3).map(tuple)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return value_of(hint)
    if hasattr(hint, "__args__"):
        inner = next(one for one in hint.__args__ if one is not type(None))
        return st.none() | _values(inner, name)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return _TEXT
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is int:
        if name in _UNSIGNED:
            return st.integers(0, 2**64 - 1)
        bits = 31 if name in _INT32 else 63
        return st.integers(-(2**bits), 2**bits - 1)
    return st.sampled_from(hint)


def value_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass of the model."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: _values(hint, name) for name, hint in hints.items()})


@pytest.mark.parametrize("name", sorted(RECORDS))
@_PATIENT
@given(data=st.data())
def test_there_and_back(name: str, data: st.DataObject) -> None:
    cls = getattr(model, name)
    value = data.draw(value_of(cls))
    record = model.to_record(value, RECORDS[name]())
    assert model.from_record(cls, record) == value
    assert model.from_record(cls, decode(RECORDS[name], encode(record))) == value


@pytest.mark.parametrize("name", sorted(RECORDS))
@_PATIENT
@given(data=st.data())
def test_the_short_way_reads_what_is_written(name: str, data: st.DataObject) -> None:
    cls = getattr(model, name)
    value = data.draw(value_of(cls))
    text = encode(model.to_record(value, RECORDS[name]()))
    assert from_fields(cls, DESCRIPTORS[name], json.loads(text)) == value
    assert decode_value(cls, RECORDS[name], KeyValue("a", text, 1, 1, 0)) == value


_NAMES = sorted({field.name for field in _FIELDS})
_NUMBERS = st.integers(-(2**65), 2**65)
_WORDS = [
    "COMPUTING",
    "CUDA",
    "TPU",
    "-0",
    " 1",
    "1_0",
    "\u0664",
    "\ud800",
    "true",
    "Infinity",
    "1e3",
]
_LEAVES = (
    st.none()
    | st.booleans()
    | st.floats()
    | _NUMBERS
    | _NUMBERS.map(str)
    | _TEXT
    | st.sampled_from(_WORDS)
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_NAMES) | _TEXT, inner, max_size=4)
    ),
    max_leaves=12,
)


def _read(way: Any) -> Any:
    """What a way of reading gives; RecordError, whatever it says, is one result."""
    try:
        return way()
    except (RecordError, ValueError):
        return RecordError


@pytest.mark.parametrize("name", sorted(RECORDS))
@_PATIENT
@given(data=st.data())
def test_both_ways_read_the_same(name: str, data: st.DataObject) -> None:
    """A record of which some fields are something else: one value, or none, by both ways."""
    cls = getattr(model, name)
    fields = json.loads(encode(model.to_record(data.draw(value_of(cls)), RECORDS[name]())))
    names = [field.name for field in DESCRIPTORS[name].fields]
    fields.update(data.draw(st.dictionaries(st.sampled_from(names), _JSON, max_size=2)))
    text = json.dumps(fields, ensure_ascii=data.draw(st.booleans()))
    source = KeyValue("a", text.encode(errors="surrogatepass"), 1, 1, 0)
    short = _read(lambda: decode_value(cls, RECORDS[name], source))
    assert short == _read(lambda: model.from_record(cls, decode(RECORDS[name], source)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"step": "1", "step": "2"}',
        '{"step": null}',
        '{"step": 1e1}',
        '{"phase": 2}',
        '{"phase": 99}',
        '{"phase": "NEWER"}',
        '{"brokenGeneration": "3"}',
        '{"newer": 1}',
        '{"rank": 2147483648}',
        '{"pull": {"seconds": NaN}}',
        '{"pull": {"seconds": 1e999}}',
        '{"pull": {"seconds": 1}}',
        '{"instance": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_both_ways_read_what_is_odd(text: str) -> None:
    source = KeyValue("a", text.encode(), 1, 1, 0)
    cls, record = model.RankProgress, RECORDS["RankProgress"]
    short = _read(lambda: decode_value(cls, record, source))
    assert short == _read(lambda: model.from_record(cls, decode(record, source)))
