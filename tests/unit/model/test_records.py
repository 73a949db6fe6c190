# SPDX-License-Identifier: Apache-2.0
"""Every record of protos/ has a frozen value of the same name and fields, and the other way."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import IntEnum
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from coordinator import model
from coordinator.model import (
    Ack,
    Answer,
    ClusterView,
    Contact,
    Generation,
    JobState,
    JobView,
    Line,
    LiveNode,
    Node,
    NodeFlags,
    Phase,
    RankAck,
    Rendezvous,
    Settings,
    Statement,
    Suspect,
    Verdict,
    from_record,
    to_record,
)
from coordinator.model.node import DeadIncarnation
from protos import incident_pb2, job_pb2, membership_pb2, node_pb2

MODULES = (incident_pb2, job_pb2, membership_pb2, node_pb2)
CALLS = {"ProbeRequest", "ProbeReply", "ReachRequest", "ReachReply"}
"""Messages of services: they are no records."""
OWN = {ClusterView, Contact, JobView, LiveNode, Settings, Statement, Suspect}
"""Values that no record stands for."""
OWN_ENUMS = {Answer, Line, Verdict}
ENUM_NAMES = {"Device.Kind": "DeviceKind", "Trainer.State": "TrainerState"}
ENUM_NAMES |= {"TrainerExit.FailureClass": "FailureClass"}
ENUM_NAMES |= {"JobStatus.State": "JobState", "Incident.Cause": "Cause"}

RECORDS: dict[str, Descriptor] = {
    name: one
    for module in MODULES
    for name, one in module.DESCRIPTOR.message_types_by_name.items()
    if name not in CALLS
}
ENUMS: dict[str, EnumDescriptor] = {
    one.full_name.removeprefix("hotspare.v1."): one
    for module in MODULES
    for one in (
        *module.DESCRIPTOR.enum_types_by_name.values(),
        *(
            inner
            for message in module.DESCRIPTOR.message_types_by_name.values()
            if message.name not in CALLS
            for inner in message.enum_types
        ),
    )
}
VALUES = {
    one.__name__: one
    for one in vars(model).values()
    if isinstance(one, type) and dataclasses.is_dataclass(one) and one not in OWN
}
_PYTHON: dict[Any, type] = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_UINT64: int,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_BOOL: bool,
}


def test_the_same_names() -> None:
    assert set(VALUES) == set(RECORDS)
    enums = {
        one.__name__
        for one in vars(model).values()
        if isinstance(one, type) and issubclass(one, IntEnum) and one not in OWN_ENUMS
    }
    assert enums == {ENUM_NAMES.get(name, name) for name in ENUMS}


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_same_fields_of_the_same_types(name: str) -> None:
    hints = typing.get_type_hints(VALUES[name])
    assert set(hints) == set(RECORDS[name].fields_by_name)
    for field in RECORDS[name].fields:
        hint = hints[field.name]
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            assert hint == tuple[tuple[str, str], ...]
            continue
        if field.is_repeated:
            assert typing.get_origin(hint) is tuple
            hint, rest = typing.get_args(hint)
            assert rest is Ellipsis
        elif field.message_type is not None and isinstance(hint, types.UnionType):
            (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
        if field.message_type is not None:
            assert hint.__name__ == field.message_type.name
        elif field.enum_type is not None:
            full = field.enum_type.full_name.removeprefix("hotspare.v1.")
            assert hint.__name__ == ENUM_NAMES.get(full, full)
        else:
            assert hint is _PYTHON[field.type], field.name


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_the_same_numbers(name: str) -> None:
    cls = getattr(model, ENUM_NAMES.get(name, name))
    assert {one.name: one.value for one in cls} == {
        value.name: value.number for value in ENUMS[name].values
    }


@pytest.mark.parametrize("name", sorted(VALUES))
def test_values_are_frozen_hashable_and_have_defaults(name: str) -> None:
    value = VALUES[name]()
    assert hash(value) == hash(VALUES[name]())
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


def test_an_unset_message_stays_unset() -> None:
    assert not to_record(RankAck(), membership_pb2.RankAck()).HasField("offer")
    set_but_empty = to_record(RankAck(offer=Rendezvous()), membership_pb2.RankAck())
    assert set_but_empty.HasField("offer")
    assert from_record(RankAck, set_but_empty).offer == Rendezvous()
    assert from_record(RankAck, membership_pb2.RankAck()).offer is None


def test_maps_come_in_key_order() -> None:
    record = node_pb2.Node(labels={"switch": "s1", "rack": "r1"})
    assert from_record(Node, record).labels == (("rack", "r1"), ("switch", "s1"))


def test_an_enum_value_of_a_newer_version_is_an_error() -> None:
    record = membership_pb2.Generation(phase=99)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="99"):
        from_record(Generation, record)


def test_an_empty_rank_keeps_its_step() -> None:
    ack = Ack(3, "x-0", (RankAck(rank=1, instance="i"),))
    assert from_record(Ack, to_record(ack, membership_pb2.Ack())).ranks[0].step == -1


class TestMeaning:
    """What the values say of themselves."""

    def test_ranks_stand_by_slot(self) -> None:
        spec = model.JobSpec(replicas=2, shard_positions=4, ranks_per_node=2)
        assert (spec.ranks, spec.slots) == (8, 4)
        ranks = [spec.rank(slot, local) for slot in range(4) for local in range(2)]
        assert ranks == list(range(8))
        assert [spec.shard_position(rank) for rank in ranks] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert [spec.replica(rank) for rank in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]

    def test_phases_and_states_that_end_a_job(self) -> None:
        assert [one.name for one in Phase if one.ended] == ["FINISHED", "STOPPED", "FAILED", "LOST"]
        assert [one.name for one in JobState if one.ended] == [
            "FINISHED",
            "STOPPED",
            "FAILED",
            "LOST",
        ]

    def test_a_job_without_a_generation(self) -> None:
        with pytest.raises(LookupError, match="no generation"):
            _ = JobView(job=model.Job()).current

    def test_who_is_alive(self) -> None:
        live = LiveNode(Node(node="a", incarnation="a-1"))
        view = ClusterView(nodes={"a": live})
        assert view.alive("a", "a-1")
        assert not view.alive("a", "a-0")
        assert not view.alive("b", "b-0")
        dead = NodeFlags(dead=(DeadIncarnation("a-1"),))
        assert not ClusterView(nodes={"a": live}, flags={"a": dead}).alive("a", "a-1")
        assert view.flags_of("b") == NodeFlags()
