# SPDX-License-Identifier: Apache-2.0
"""Every action becomes guarded transactions that etcd takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from coordinator.controller import records
from coordinator.controller.transactions import (
    DEAD_KEPT,
    MAX_OPERATIONS,
    Context,
    Stale,
    Transaction,
    build,
    undo_staged,
)
from coordinator.model import (
    Assignment,
    Cause,
    ClusterView,
    DeadIncarnation,
    Generation,
    Incident,
    IncidentMark,
    Job,
    JobState,
    JobStatus,
    JobView,
    LiveNode,
    Node,
    NodeFlags,
    Phase,
    Slot,
    SpareAssignment,
)
from coordinator.plan import (
    Action,
    DeclareDead,
    KeepWarm,
    Probe,
    Transition,
    Unassign,
    UpdateIncident,
    UpdateStatus,
    Wait,
)
from coordinator.store import Absent, Created, Delete, KeyValue, Put, Unchanged, keys

LEADER = Created("election/c1", 5)
NOW = 1234
GENERATION = keys.generation("demo")


def context(revisions: Mapping[str, int] | None = None, view: ClusterView | None = None) -> Context:
    known = revisions or {}
    return Context(LEADER, view or ClusterView(), lambda key: known.get(key, 0), NOW)


def only(action: Action, given: Context) -> Transaction:
    (transaction,) = build(action, given)
    return transaction


def value(transaction: Transaction, key: str) -> object:
    """The record that a transaction puts."""
    for write in transaction.writes:
        if isinstance(write, Put) and write.key == key:
            return records.load(keys.parse(key).kind, KeyValue(key, write.value, 1, 1, 0))
    raise AssertionError(f"{key} is not put")


def cluster(count: int) -> ClusterView:
    return ClusterView(
        nodes={
            f"n{number}": LiveNode(Node(node=f"n{number}", incarnation="a"), 1, 100 + number)
            for number in range(count)
        }
    )


def transition(count: int, freed: int = 0, number: int = 1) -> Transition:
    """A generation that fills so many slots and frees so many nodes."""
    return Transition(
        Generation(job="demo", generation=number, phase=Phase.PAUSE),
        "why",
        slots=tuple(
            Slot(slot=one, node=f"n{one}", incarnation="a", generation=number)
            for one in range(count)
        ),
        assign=tuple(Assignment(f"n{one}", "a", "demo", one, number) for one in range(count)),
        unassign=tuple(f"old{one}" for one in range(freed)),
        incident=Incident(id="demo.1", job="demo", marks=(IncidentMark("detected"),)),
    )


def test_a_transition_is_one_transaction() -> None:
    action = transition(2, freed=1)
    made = only(action, context(view=cluster(2)))
    assert made.guards == (
        LEADER,
        Absent(GENERATION),
        Absent("assignments/n0"),
        Created("nodes/n0", 100),
        Absent("assignments/n1"),
        Created("nodes/n1", 101),
    )
    assert {write.key for write in made.writes} == {
        GENERATION,
        *("jobs/demo/slots/0", "jobs/demo/slots/1", "assignments/n0", "assignments/n1"),
        *("incidents/demo.1", "assignments/old0"),
    }
    assert Delete("assignments/old0") in made.writes
    assert value(made, GENERATION) == action.generation
    assert value(made, "jobs/demo/slots/1") == action.slots[1]
    assert value(made, "assignments/n1") == action.assign[1]


def test_the_end_is_written_with_its_status() -> None:
    status = JobStatus(JobState.FINISHED, "done", digests=("d",))
    end = replace(transition(0), status=status)
    assert value(only(end, context(view=cluster(0))), keys.job_status("demo")) == status


def test_an_owner_that_moves_keeps_its_assignments_key() -> None:
    view = cluster(1)
    moving = transition(1)
    (place,) = moving.assign
    view = replace(view, assignments={place.node: replace(place, slot=7)}, nodes={})
    written = only(moving, context(view=view))
    assert value(written, keys.assignment(place.node)) == place
    assert not any(isinstance(one, Absent) and "assignments" in one.key for one in written.guards)


def test_a_later_generation_is_guarded_by_the_record_that_was_seen() -> None:
    made = only(transition(0, number=2), context({GENERATION: 77}))
    assert made.guards == (LEADER, Unchanged(GENERATION, 77))


def test_marks_get_the_time_of_the_write_and_keep_it() -> None:
    incident = Incident(
        id="demo.1", job="demo", marks=(IncidentMark("detected", time_ns=9), IncidentMark("paused"))
    )
    made = only(UpdateIncident(incident, "why"), context({GENERATION: 77}))
    assert made.guards == (LEADER, Unchanged(GENERATION, 77))
    stored = value(made, "incidents/demo.1")
    assert isinstance(stored, Incident)
    assert [mark.time_ns for mark in stored.marks] == [9, NOW]


@pytest.mark.parametrize("gone", [True, False])
def test_a_node_that_is_not_the_one_that_was_chosen(gone: bool) -> None:
    other = {} if gone else {"n0": LiveNode(Node(node="n0", incarnation="b"), 1, 200)}
    with pytest.raises(Stale):
        build(transition(1), context(view=ClusterView(nodes=other)))


@pytest.mark.parametrize(
    ("count", "freed"), [(63, 0), (62, 2), (64, 0), (200, 0), (200, 200), (0, 200), (1000, 3)]
)
def test_a_large_transition_is_staged(count: int, freed: int) -> None:
    """The record comes after every slot and before any place is taken away."""
    action = transition(count, freed, number=2)
    made = build(action, context({GENERATION: 77}, cluster(count)))
    for one in made:
        assert len(one.guards) <= MAX_OPERATIONS
        assert len(one.writes) <= MAX_OPERATIONS
        assert LEADER in one.guards
    at = next(i for i, one in enumerate(made) if GENERATION in {w.key for w in one.writes})
    assert all(Unchanged(GENERATION, 77) in one.guards for one in made[: at + 1])
    assert not any(Unchanged(GENERATION, 77) in one.guards for one in made[at + 1 :])
    seen: set[str] = set()
    for index, one in enumerate(made):
        written = {write.key for write in one.writes}
        assert not written & seen
        seen |= written
        if index < at:
            assert all(key.startswith(("jobs/demo/slots/", "assignments/n")) for key in written)
        for slot in action.slots:
            if keys.slot("demo", slot.slot) in written:
                assert keys.assignment(slot.node) in written
                assert Absent(keys.assignment(slot.node)) in one.guards
        freed_here = {key for key in written if key.startswith("assignments/old")}
        assert not freed_here or index >= at
    assert len(seen) == 2 * count + freed + 2


def test_an_assignment_without_its_slot_is_a_mistake() -> None:
    action = Transition(
        Generation(job="demo"), "why", assign=(Assignment("n0", "a", "demo", 0, 1),)
    )
    with pytest.raises(ValueError, match="without a slot"):
        build(action, context(view=cluster(1)))


def test_a_death_is_added_to_the_flags() -> None:
    old = NodeFlags(dead=(DeadIncarnation("z", "older", 1),), cordoned="why")
    given = context({"flags/n0": 8}, ClusterView(flags={"n0": old}))
    made = only(DeclareDead("n0", "a", "silent"), given)
    assert made.guards == (LEADER, Unchanged("flags/n0", 8))
    assert value(made, "flags/n0") == NodeFlags(
        dead=(*old.dead, DeadIncarnation("a", "silent", NOW)), cordoned="why"
    )


def test_the_first_death_of_a_node() -> None:
    made = only(DeclareDead("n0", "a", "silent"), context())
    assert made.guards == (LEADER, Absent("flags/n0"))


def test_the_newest_deaths_are_kept() -> None:
    old = NodeFlags(dead=tuple(DeadIncarnation(f"i{one}") for one in range(DEAD_KEPT)))
    given = context({"flags/n0": 8}, ClusterView(flags={"n0": old}))
    made = value(only(DeclareDead("n0", "a", "silent"), given), "flags/n0")
    assert isinstance(made, NodeFlags)
    assert len(made.dead) == DEAD_KEPT
    assert made.is_dead("a")
    assert not made.is_dead("i0")


def test_the_small_ones() -> None:
    given = context({GENERATION: 77})
    assert only(KeepWarm("n0", "", 0, "why"), given) == Transaction(
        (LEADER,), (Delete("spares/n0"),)
    )
    warm = only(KeepWarm("n0", "demo", 1, "why"), given)
    assert warm.guards == (LEADER, Unchanged(GENERATION, 77))
    assert value(warm, "spares/n0") == SpareAssignment("n0", "demo", 1)
    assert only(Unassign("n0", "demo", "why"), given) == Transaction(
        (LEADER,), (Delete("assignments/n0"),)
    )
    status = JobStatus(JobState.RUNNING, step=4)
    made = only(UpdateStatus("demo", status, "why"), given)
    assert made.guards == (LEADER, Unchanged(GENERATION, 77))
    assert value(made, "jobs/demo/status") == status
    assert only(UpdateStatus("demo", status, "why"), context()).guards == (
        LEADER,
        Absent(GENERATION),
    )
    assert build(Probe("n0", "a", "", "why"), given) == ()
    assert build(Wait("demo", "why"), given) == ()


def test_every_record_is_written_as_it_is_read() -> None:
    incident = Incident(id="demo.1", job="demo", cause=Cause.DEADLINE, nodes=("n0",), closed=True)
    made = only(UpdateIncident(incident, "why"), context())
    assert value(made, "incidents/demo.1") == incident


@pytest.mark.parametrize("count", [0, 3, 150])
def test_what_was_staged_for_a_job_that_never_began_is_taken_back(count: int) -> None:
    job = JobView(Job(), slots={one: Slot(slot=one, node=f"n{one}") for one in range(count)})
    begun = replace(job, generation=Generation(job="begun", generation=1))
    places = {f"n{one}": Assignment(f"n{one}", "a", "demo", one, 1) for one in range(count)}
    view = ClusterView(
        jobs={"demo": job, "begun": begun},
        assignments={**places, "other": Assignment("other", "a", "begun", 0, 1)},
    )
    made = undo_staged(context(view=view))
    deleted = [write.key for one in made for write in one.writes]
    assert sorted(deleted) == sorted(
        [keys.slot("demo", one) for one in range(count)] + [keys.assignment(one) for one in places]
    )
    for one in made:
        assert one.guards == (LEADER, Absent(GENERATION))
        assert len(one.writes) <= MAX_OPERATIONS
