# SPDX-License-Identifier: Apache-2.0
"""Records: readable by a person, exact, and readable across versions."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.store.codec import decode, encode
from coordinator.store.errors import RecordError
from coordinator.store.values import KeyValue
from protos import membership_pb2, node_pb2

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
DEVICES = st.builds(
    node_pb2.Device,
    kind=st.sampled_from(node_pb2.Device.Kind.values()),
    index=INT32,
    name=TEXT,
    memory_bytes=st.integers(0, 2**64 - 1),
)
TRAINERS = st.builds(
    node_pb2.Trainer,
    instance=TEXT,
    local_rank=INT32,
    state=st.sampled_from(node_pb2.Trainer.State.values()),
    spec_revision=INT64,
    exit=st.none() | st.builds(node_pb2.TrainerExit, code=INT32, message=TEXT),
)
NODES = st.builds(
    node_pb2.Node,
    node=TEXT,
    incarnation=TEXT,
    devices=st.lists(DEVICES, max_size=3),
    labels=st.dictionaries(TEXT, TEXT, max_size=3),
    trainers=st.lists(TRAINERS, max_size=3),
    warm=st.none() | st.builds(node_pb2.Warm, job=TEXT, spec_revision=INT64),
)


def test_a_person_can_read_it() -> None:
    node = node_pb2.Node(
        node="n1",
        control_address="10.0.0.1:7000",
        devices=[node_pb2.Device(kind=node_pb2.Device.CUDA, index=1)],
        labels={"rack": "Zürich"},
    )
    assert encode(node).decode() == (
        '{"node": "n1", "control_address": "10.0.0.1:7000", '
        '"devices": [{"kind": "CUDA", "index": 1}], "labels": {"rack": "Zürich"}}'
    )


@settings(deadline=None)
@given(NODES)
def test_what_is_written_is_read(node: node_pb2.Node) -> None:
    text = encode(node)
    assert b"\n" not in text
    assert decode(node_pb2.Node, text) == node


def test_fields_and_enum_names_of_a_newer_version_are_left_out() -> None:
    text = json.dumps(
        {
            "node": "n1",
            "colour": {"of": ["a", "newer", "version"]},
            "devices": [{"kind": "TPU", "index": 3, "sockets": 2}],
        }
    ).encode()
    assert decode(node_pb2.Node, text) == node_pb2.Node(
        node="n1", devices=[node_pb2.Device(index=3)]
    )


@pytest.mark.parametrize(
    "value",
    [b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"node": 3}', b'{"devices": {"a": 1}}',
     b'{"node": "a", "node": "b"}', b"[" * 100_000, b'{"node": "\\ud800"}'],
)  # fmt: skip
def test_what_is_no_record_is_refused_with_its_key(value: bytes) -> None:
    with pytest.raises(RecordError, match=r"^key 'nodes/n1' is no Node: ") as caught:
        decode(node_pb2.Node, KeyValue("nodes/n1", value, 1, 1, 0))
    assert len(str(caught.value)) < 700


@settings(deadline=None)
@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["job", "generation", "phase", "x"]), inner, max_size=3),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_give_a_record_or_a_record_error(value: bytes) -> None:
    with contextlib.suppress(RecordError):
        decode(membership_pb2.Generation, value)
