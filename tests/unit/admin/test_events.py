# SPDX-License-Identifier: Apache-2.0
"""What a record's change means to an operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.admin.events import Happening, describe
from coordinator.controller import records
from coordinator.model import (
    Ack,
    Assignment,
    Cause,
    DeadIncarnation,
    Device,
    DeviceKind,
    FailureClass,
    Generation,
    Incident,
    IncidentMark,
    Job,
    JobSpec,
    JobState,
    JobStatus,
    Node,
    NodeFlags,
    Phase,
    Progress,
    Slot,
    SpareAssignment,
    Trainer,
    TrainerExit,
    TrainerState,
)
from coordinator.store import KeyValue, keys

NODE = Node(node="n0", incarnation="a", version="1", devices=(Device(DeviceKind.CPU),))
JOB = Job(spec=JobSpec(name="demo", command=("x",), replicas=2, spares=1), submitted_ns=7)
PAUSE = Generation(job="demo", generation=2, phase=Phase.PAUSE, reason="n0 is dead")
SECOND = 1_000_000_000
INCIDENT = Incident(
    id="demo.2",
    job="demo",
    cause=Cause.NODE_LOST,
    nodes=("n0",),
    detail="n0 is dead",
    first_generation=2,
    last_generation=2,
    marks=(IncidentMark("detected", "n0 is dead", 100 * SECOND),),
)
OVER = replace(
    INCIDENT,
    closed=True,
    resume_step=8,
    lost_steps=1,
    bytes_moved=2_000_000,
    marks=(*INCIDENT.marks, IncidentMark("first_step", "", 101 * SECOND + SECOND // 2)),
)


def told(key: str, before: Any, after: Any) -> list[Happening]:
    def stored(value: Any) -> KeyValue | None:
        if value is None:
            return None
        raw = value if isinstance(value, bytes) else records.dump(value)
        return KeyValue(key, raw, 1, 1, 0)

    return list(describe(key, stored(before), stored(after)))


def kinds(key: str, before: Any, after: Any) -> list[str]:
    return [one.kind for one in told(key, before, after)]


def test_a_node_comes_and_goes() -> None:
    (joined,) = told("nodes/n0", None, NODE)
    assert (joined.kind, joined.node, joined.job) == ("node.joined", "n0", "")
    assert "incarnation a, 1 devices" in joined.message
    (again,) = told("nodes/n0", NODE, replace(NODE, incarnation="b"))
    assert again.kind == "node.joined"
    assert "incarnation b instead of a" in again.message
    (left,) = told("nodes/n0", NODE, None)
    assert (left.kind, left.message) == ("node.left", "incarnation a: its lease has ended")
    assert not told("nodes/n0", NODE, replace(NODE, labels=(("rack", "1"),)))


def test_a_node_s_health() -> None:
    sick = replace(NODE, unhealthy="no fan")
    assert kinds("nodes/n0", None, sick) == ["node.joined", "node.unhealthy"]
    assert told("nodes/n0", NODE, sick)[0].message == "no fan"
    assert told("nodes/n0", sick, NODE)[0].message == "no longer: no fan"


@pytest.mark.parametrize(
    ("exit_", "says"),
    [
        (
            TrainerExit(code=3, failure_class=FailureClass.SOFTWARE, cause="ValueError: x"),
            "exited with code 3: software: ValueError: x",
        ),
        (TrainerExit(signal=9), "ended by signal 9"),
        (TrainerExit(signal=15, cause="ended by workerd: why"), "signal 15: ended by workerd: why"),
        (TrainerExit(signal=11, core="/tmp/core.7"), "signal 11; core: /tmp/core.7"),
        (None, "nothing is known"),
    ],
)
def test_a_trainer_ends_once(exit_: TrainerExit | None, says: str) -> None:
    placed = Trainer("t", state=TrainerState.PLACED, job="demo", local_rank=1)
    over = replace(placed, state=TrainerState.ENDED, exit=exit_)
    with_placed, with_over = replace(NODE, trainers=(placed,)), replace(NODE, trainers=(over,))
    (ended,) = told("nodes/n0", with_placed, with_over)
    assert (ended.kind, ended.job, ended.node) == ("trainer.ended", "demo", "n0")
    assert says in ended.message
    assert "local rank 1" in ended.message
    assert not told("nodes/n0", with_over, with_over)


def test_flags() -> None:
    dead = NodeFlags(dead=(DeadIncarnation("a", "silent", 5),))
    (died,) = told("flags/n0", None, dead)
    assert (died.kind, died.node, died.time_ns) == ("node.dead", "n0", 5)
    assert "silent" in died.message
    more = replace(dead, dead=(*dead.dead, DeadIncarnation("b", "refused", 6)), cordoned="why")
    assert kinds("flags/n0", dead, more) == ["node.dead", "node.cordoned"]
    assert kinds("flags/n0", more, dead) == ["node.cordoned.cleared"]


def test_places() -> None:
    place = Assignment("n0", "a", "demo", 3, 1)
    assert told("assignments/n0", None, place) == [
        Happening("node.placed", "takes slot 3 in generation 1", "demo", "n0")
    ]
    assert not told("assignments/n0", place, replace(place, generation=2))
    assert told("assignments/n0", place, None) == [
        Happening("node.freed", "leaves slot 3", "demo", "n0")
    ]
    assert kinds("spares/n0", None, SpareAssignment("n0", "demo", 1)) == ["node.spare"]
    assert kinds("spares/n0", SpareAssignment("n0", "demo", 1), None) == []


def test_a_job() -> None:
    key = keys.job_spec("demo")
    (submitted,) = told(key, None, JOB)
    assert (submitted.kind, submitted.job, submitted.time_ns) == ("job.submitted", "demo", 7)
    assert "2 ranks on 2 nodes" in submitted.message
    assert told(key, JOB, replace(JOB, stop="enough")) == [
        Happening("job.stopping", "enough", "demo")
    ]
    assert not told(key, JOB, None)


def test_another_number_of_replicas() -> None:
    key, scaled = keys.job_spec("demo"), replace(JOB, wanted_replicas=1)
    assert told(key, JOB, scaled) == [
        Happening("job.scaled", "1 replicas are to run, not 2", "demo")
    ]
    assert kinds(key, scaled, JOB) == ["job.scaled"]


def test_the_pause_of_a_job_s_recovery() -> None:
    key, paused = keys.job_spec("demo"), replace(JOB, recovery_paused="careful")
    assert told(key, JOB, paused) == [Happening("recovery.paused", "careful", "demo")]
    assert not told(key, paused, replace(paused, stop=""))
    assert told(key, paused, JOB) == [Happening("recovery.resumed", "no longer: careful", "demo")]


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        (Phase.RESTORE, "job.phase"),
        (Phase.RUNNING, "job.phase"),
        (Phase.FINISHED, "job.finished"),
        (Phase.STOPPED, "job.stopped"),
        (Phase.FAILED, "job.failed"),
        (Phase.LOST, "job.lost"),
    ],
)
def test_phases(phase: Phase, kind: str) -> None:
    key = keys.generation("demo")
    assert told(key, None, PAUSE) == [
        Happening("job.phase", "generation 2 PAUSE: n0 is dead", "demo")
    ]
    assert kinds(key, PAUSE, replace(PAUSE, phase=phase)) == [kind]
    assert not told(key, PAUSE, replace(PAUSE, reason="other words"))


def test_waiting_says_for_what() -> None:
    key = keys.job_status("demo")
    waits = JobStatus(JobState.WAITING, "needs 2 nodes")
    assert told(key, None, waits) == [Happening("job.waiting", "needs 2 nodes", "demo")]
    assert kinds(key, waits, replace(waits, reason="needs 1 node")) == ["job.waiting"]
    assert not told(key, waits, replace(waits, step=1))
    assert not told(key, waits, JobStatus(JobState.RUNNING, step=1))
    held = JobStatus(JobState.RUNNING, held="n1: frozen")
    assert told(key, JobStatus(JobState.RUNNING), held) == [
        Happening("verdict.held", "n1: frozen", "demo")
    ]
    assert not told(key, held, replace(held, held="n1: frozen; n2: frozen"))
    assert kinds(key, held, JobStatus(JobState.RUNNING)) == ["verdict.held.cleared"]


def test_incidents() -> None:
    key = keys.incident("demo.2")
    (opened,) = told(key, None, INCIDENT)
    assert (opened.kind, opened.job, opened.time_ns) == ("incident.opened", "demo", 100 * SECOND)
    assert "node lost on n0" in opened.message
    (closed,) = told(key, INCIDENT, OVER)
    assert closed.kind == "incident.closed"
    assert closed.time_ns == 101 * SECOND + SECOND // 2
    assert "detected 0.000 s, first_step 1.500 s; 1.500 s, 2.00 MB moved" in closed.message
    assert not told(key, OVER, OVER)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("jobs/demo/slots/0", Slot(slot=0)),
        ("jobs/demo/acks/n0", Ack(1, "a")),
        ("jobs/demo/progress/n0", Progress("a")),
        ("election/c1", b"{}"),
        ("who/knows", b"\xff"),
    ],
)
def test_what_tells_an_operator_nothing(key: str, value: Any) -> None:
    assert not told(key, None, value)
    assert not told(key, value, None)


def test_a_record_that_can_t_be_read_is_told_and_its_successor_too() -> None:
    (bad,) = told("nodes/n0", None, b"{")
    assert (bad.kind, bad.node) == ("record.unreadable", "n0")
    assert kinds("nodes/n0", b"{", NODE) == ["node.joined"]
