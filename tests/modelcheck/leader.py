# SPDX-License-Identifier: Apache-2.0
"""What a leader sees, decides and writes: the production planner and transactions.

Records are kept without what no decision depends on (texts, times, addresses). A revision is
told by what it stands for: each (generation, phase) is written once, each flags record only grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from coordinator.controller import transactions
from coordinator.controller.records import load
from coordinator.controller.transactions import Context, Transaction
from coordinator.model import (
    ClusterView,
    Contact,
    DeadIncarnation,
    Generation,
    Incident,
    IncidentMark,
    JobState,
    JobStatus,
    JobView,
    Line,
    LiveNode,
    NodeFlags,
    Phase,
    Settings,
    Suspect,
    Verdict,
)
from coordinator.plan import Action, DeclareDead, Transition
from coordinator.store import (
    Absent,
    Created,
    Guard,
    KeyKind,
    KeyValue,
    ParsedKey,
    Put,
    Unchanged,
    Write,
    keys,
)
from tests.modelcheck.trainers import STORE
from tests.modelcheck.values import JOB, Control, Key, Violation, present
from workerd.agent.state import JobOrders, Orders

SETTINGS = Settings(
    disruption=1,
    pause=1000,
    start=1000,
    restore=1000,
    progress=1000,
    regroup=1,
    regroup_max=10,
    restart=1,
    restart_max=50,
    status=1e12,
)
NOW, SETTLED, LATE = 0.0, 100.0, 1e10
"""A leader's times: at once; a broken group has waited long enough; every deadline has passed."""

MANY = 3
"""Regrouped so often, it makes no difference any more (FRESH_STARTS)."""


def view(
    control: Control,
    held: Mapping[str, Key],
    living: Mapping[str, str],
    wrong: tuple[str, str] | None = None,
) -> ClusterView:
    """What the leader sees.

    ``living``: the incarnation of each node that answers the leader, ``wrong`` is one that doesn't
    although it could. (A frozen node answers here: it waits for its lease's end as one does.)
    """
    generation = control.generation
    slots = {slot.slot: slot for slot in control.slots if slot is not None}
    progress = {node: key.progress for node, key in held.items() if key.progress is not None}
    number = 0 if generation is None else generation.generation
    broken = any(
        one.broken_generation == number for all_ in progress.values() for one in all_.ranks
    )
    job = JobView(
        job=control.job,
        status=control.status,
        generation=generation,
        slots=slots,
        acks={node: key.ack for node, key in held.items() if key.ack is not None},
        progress=progress,
        incident=control.incident if generation is not None and generation.incident else None,
        broken_at=0.0 if broken and number else None,
        status_at=0.0,
    )
    flags = {f"n{number}": one for number, one in enumerate(control.flags) if one is not None}
    assignments = {one.node: one for one in control.assignments if one is not None}
    placed = {(one.node, one.incarnation) for one in assignments.values()}
    if generation is None or not generation.phase.ended:
        placed |= {(one.node, one.incarnation) for one in slots.values() if one.node}
    suspects = {}
    contacts = {}
    for node, incarnation in placed:
        if node in flags and flags[node].is_dead(incarnation):
            continue
        answers = living.get(node) == incarnation and wrong != (node, incarnation)
        live = held.get(node)
        if live is not None and live.record.incarnation == incarnation:
            line = Line.ANSWERS if answers else Line.REFUSED
            contacts[node, incarnation] = Contact(node, incarnation, (node,), line, "a ping")
            continue
        verdict = Verdict.ALIVE if answers else Verdict.DEAD
        suspects[node, incarnation] = Suspect(node, incarnation, node, verdict, "a probe")
    return ClusterView(
        nodes={node: LiveNode(key.record, key.lease, key.lease) for node, key in held.items()},
        flags=flags,
        assignments=assignments,
        spares={one.node: one for one in control.spares if one is not None},
        jobs={JOB: job},
        suspects=suspects,
        contacts=contacts,
    )


class Jobs(dict[str, JobOrders]):
    """Jobs' orders that can be numbered."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def orders(control: Control, number: int, jobs: frozenset[str]) -> Orders:
    """What etcd says to a node. Its own ack is never older than what it knows of it itself."""
    assignment, spare = control.assignments[number], control.spares[number]
    wanted = jobs | {one.job for one in (assignment, spare) if one is not None}
    found = Jobs()
    if JOB in wanted:
        slot = None if assignment is None else control.slots[assignment.slot]
        found[JOB] = JobOrders(control.job, control.generation, slot)
    flags = control.flags[number] or NodeFlags()
    return Orders(flags=flags, assignment=assignment, spare=spare, jobs=found)


# ---- writes


def election(leader: int) -> Created:
    """What a leader's writes are guarded by."""
    return Created(f"election/c{leader}", leader)


def generation_revision(generation: Generation | None) -> int:
    """When the record was last changed."""
    if generation is None:
        return 0
    return 20 * generation.generation + 2 * int(generation.phase) + bool(generation.hold)


def revision(control: Control, key: str) -> int:
    """When a generation or flags key was last changed."""
    at = parsed(key)
    if at.kind is KeyKind.GENERATION:
        return generation_revision(control.generation)
    flags = control.flags[_index(at.node)] or NodeFlags()
    return 1 + 2 * len(flags.dead) + bool(flags.draining)


def build(action: Action, control: Control, seen: ClusterView) -> tuple[Transaction, ...]:
    """The production transactions of an action."""

    def mod_revision(key: str) -> int:
        at = parsed(key)
        if at.kind is KeyKind.FLAGS and control.flags[_index(at.node)] is None:
            return 0
        return revision(control, key)

    context = Context(election(control.leader), seen, mod_revision, wall_ns=0)
    return transactions.build(action, context)


def holds(guard: Guard, control: Control, held: Mapping[str, Key]) -> bool:
    """Whether a guard holds now."""
    at = parsed(guard.key)
    match guard:
        case Created():
            if at.kind is KeyKind.NODE:
                key = held.get(at.node)
                return guard.create_revision == (0 if key is None else key.lease)
            return guard == election(control.leader)
        case Absent():
            return _value(control, at) is None
        case Unchanged():
            return (
                _value(control, at) is not None
                and revision(control, guard.key) == guard.mod_revision
            )


def commit(transaction: Transaction, control: Control, held: Mapping[str, Key]) -> Control | None:
    """Carry out a transaction; None when a guard doesn't hold."""
    if not all(holds(guard, control, held) for guard in transaction.guards):
        return None
    for write in transaction.writes:
        control = _write(control, write)
    return control


def _value(control: Control, at: ParsedKey) -> Any:
    match at.kind:
        case KeyKind.GENERATION:
            return control.generation
        case KeyKind.SLOT:
            return control.slots[at.number]
        case KeyKind.ASSIGNMENT:
            return control.assignments[_index(at.node)]
        case KeyKind.SPARE:
            return control.spares[_index(at.node)]
        case KeyKind.FLAGS:
            return control.flags[_index(at.node)]
    raise AssertionError(at)


def _write(control: Control, write: Write) -> Control:
    at = parsed(write.key)
    record = _loaded(at.kind, write.value) if isinstance(write, Put) else None
    match at.kind:
        case KeyKind.GENERATION:
            return control._replace(generation=record)
        case KeyKind.JOB_STATUS:
            return control._replace(status=record)
        case KeyKind.INCIDENT:
            return control._replace(incident=record)
        case KeyKind.SLOT:
            return control._replace(slots=_put(control.slots, at.number, record))
        case KeyKind.ASSIGNMENT:
            index = _index(at.node)
            return control._replace(assignments=_put(control.assignments, index, record))
        case KeyKind.SPARE:
            return control._replace(spares=_put(control.spares, _index(at.node), record))
        case KeyKind.FLAGS:
            return control._replace(flags=_put(control.flags, _index(at.node), record))
    raise AssertionError(at)


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


@cache
def parsed(key: str) -> ParsedKey:
    """What a key is about."""
    return keys.parse(key)


def _index(node: str) -> int:
    return int(node[1:])


@lru_cache(maxsize=100_000)
def _loaded(kind: KeyKind, raw: bytes) -> Any:
    record = load(kind, KeyValue("", raw, 0, 0, 0))
    match record:
        case Generation():
            return replace(
                record,
                sources=() if record.phase >= Phase.RUNNING else record.sources,
                changed_slots=() if record.phase >= Phase.RUNNING else record.changed_slots,
                last_running_generation=min(record.last_running_generation, 1),
                rendezvous_slots=(),
                rendezvous=None if record.rendezvous is None else STORE,
                incident="i" if record.incident else "",
                regroups=min(record.regroups, MANY),
                hold="planned" if record.hold else "",
                reason="",
            )
        case Incident():
            marks: list[str] = []
            for mark in record.marks:
                if mark.phase == "detected":
                    marks.clear()
                if mark.phase in ("detected", "pulled"):
                    marks.append(mark.phase)
            return Incident(
                id="i",
                job=record.job,
                cause=record.cause,
                closed=record.closed,
                marks=tuple(IncidentMark(one) for one in marks),
            )
        case JobStatus():
            state = record.state if record.state.ended else JobState.RUNNING
            return JobStatus(state, step=min(record.step, 1))
        case NodeFlags():
            dead = tuple(DeadIncarnation(one.incarnation) for one in record.dead)
            return replace(record, dead=dead)
    return record


# ---- what every write must leave


def check(before: Control, after: Control) -> None:
    """What must hold of a leader's write, whatever the nodes are doing."""
    old, new = before.generation, after.generation
    seen: dict[str, int] = {}
    for slot in after.slots:
        if slot is None or not slot.node:
            continue
        if slot.node in seen:
            raise Violation(f"node {slot.node} owns slots {seen[slot.node]} and {slot.slot}")
        seen[slot.node] = slot.slot
        held = after.assignments[_index(slot.node)]
        over = new is not None and new.phase.ended
        if not over and (held is None or held.slot != slot.slot):
            raise Violation(f"slot {slot.slot} is {slot.node}'s, which is assigned {held}")
    if new is None or new == old:
        return
    if old is not None and not old.hold and new == replace(old, hold=new.hold):
        if new.phase is not Phase.RUNNING:
            raise Violation(f"generation {new.generation} is held in {new.phase.name}")
        return
    was = (0, 0) if old is None else (old.generation, int(old.phase))
    if (new.generation, new.phase) <= was or new.generation > was[0] + 1:
        raise Violation(f"the record goes from {was} to {(new.generation, int(new.phase))}")
    if new.generation == was[0] + 1 and new.phase not in (Phase.PAUSE, Phase.STOPPED):
        raise Violation(f"generation {new.generation} begins with {new.phase.name}")
    if new.generation == was[0] and was[1] == Phase.PAUSE and new.phase is Phase.RUNNING:
        raise Violation(f"generation {new.generation} runs without a RESTORE")
    empty = tuple(slot.slot for slot in after.slots if slot is not None and not slot.node)
    if not new.phase.ended and empty != new.empty_slots:
        raise Violation(f"slots {empty} are empty, the record says {new.empty_slots}")
    if new.phase is Phase.RESTORE:
        spec = after.job.spec
        members = set(present(spec, new))
        if len(new.absent_replicas) > spec.replicas - spec.fewest:
            raise Violation(f"replicas {new.absent_replicas} are absent")
        for slot in after.slots:
            assert slot is not None
            ranks = {spec.rank(slot.slot, one) for one in range(spec.ranks_per_node)}
            if ranks & members and not ranks <= members:
                raise Violation(f"slot {slot.slot} has ranks of absent replicas and of others")
            if not ranks & members and not slot.node:
                continue
            if not slot.node or not all(one.instance for one in slot.ranks):
                raise Violation(f"RESTORE, but a slot names {slot}")


def primary(action: Action) -> bool:
    """Whether an action is more than bookkeeping."""
    return isinstance(action, Transition | DeclareDead)
