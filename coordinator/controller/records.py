# SPDX-License-Identifier: Apache-2.0
"""Which record each kind of key holds, and how it becomes a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from coordinator import model
from coordinator.store import KeyKind, KeyValue, decode, decode_value, encode
from protos import incident_pb2, job_pb2, membership_pb2, node_pb2

_KINDS: Mapping[KeyKind, tuple[type[Message], type[Any]]] = {
    KeyKind.NODE: (node_pb2.Node, model.Node),
    KeyKind.FLAGS: (node_pb2.NodeFlags, model.NodeFlags),
    KeyKind.ASSIGNMENT: (node_pb2.Assignment, model.Assignment),
    KeyKind.SPARE: (node_pb2.SpareAssignment, model.SpareAssignment),
    KeyKind.JOB_SPEC: (job_pb2.Job, model.Job),
    KeyKind.JOB_STATUS: (job_pb2.JobStatus, model.JobStatus),
    KeyKind.GENERATION: (membership_pb2.Generation, model.Generation),
    KeyKind.SLOT: (membership_pb2.Slot, model.Slot),
    KeyKind.ACK: (membership_pb2.Ack, model.Ack),
    KeyKind.PROGRESS: (membership_pb2.Progress, model.Progress),
    KeyKind.INCIDENT: (incident_pb2.Incident, model.Incident),
}
_RECORDS = {value: record for record, value in _KINDS.values()}


def message(kind: KeyKind, source: KeyValue) -> Message | None:
    """The protobuf record that a key holds; None for a kind that holds none.

    Raises :class:`coordinator.store.RecordError`, which names the key.
    """
    known = _KINDS.get(kind)
    return None if known is None else decode(known[0], source)


def load(kind: KeyKind, source: KeyValue) -> Any:
    """The frozen value that a key holds; None for a kind that holds no record.

    Raises :class:`coordinator.store.RecordError`, which names the key.
    """
    known = _KINDS.get(kind)
    return None if known is None else decode_value(known[1], known[0], source)


def dump(value: Any) -> bytes:
    """A frozen value as its key holds it."""
    return encode(model.to_record(value, _RECORDS[type(value)]()))
