# SPDX-License-Identifier: Apache-2.0
"""From an action to the guarded transactions that carry it out. Pure.

Every transaction is guarded by the leader's election key, and what concerns a job by its
generation record as the view had it: a deposed leader's write, or one that was decided from an
older record, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from coordinator.controller.records import dump
from coordinator.model import ClusterView, DeadIncarnation, Incident, SpareAssignment
from coordinator.plan import (
    Action,
    AskWitnesses,
    DeclareDead,
    HoldBack,
    KeepWarm,
    Probe,
    SettleFlags,
    Transition,
    Unassign,
    UpdateIncident,
    UpdateStatus,
    Wait,
)
from coordinator.store import Absent, Created, Delete, Guard, Put, Unchanged, Write, keys

MAX_OPERATIONS = 128
"""What etcd takes in one transaction, of guards and of writes."""

DEAD_KEPT = 16
"""Dead incarnations that a node's flags remember; older ones can't be met any more."""


class Stale(Exception):
    """The action needs what the view no longer has: decide anew."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Writes that are carried out together, if all guards hold."""

    guards: tuple[Guard, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What the transactions are built from.

    ``mod_revision`` gives the revision of the last change of a generation or flags key, 0 while
    it is absent; ``wall_ns`` is wall-clock time since the epoch, for people.
    """

    leader: Created
    view: ClusterView
    mod_revision: Callable[[str], int]
    wall_ns: int


def build(action: Action, context: Context) -> tuple[Transaction, ...]:
    """The transactions of an action, to be carried out in order, until one fails.

    Raises :class:`Stale` when the view that the action came from is not ``context.view``.
    """
    match action:
        case Transition():
            return _transition(action, context)
        case DeclareDead():
            return (_declare_dead(action, context),)
        case Unassign():
            return (_one(context, (), Delete(keys.assignment(action.node))),)
        case SettleFlags():
            key = keys.flags(action.node)
            settled = replace(context.view.flags_of(action.node), replacing="")
            return (_one(context, [_unchanged(key, context)], Put(key, dump(settled))),)
        case KeepWarm():
            return (_keep_warm(action, context),)
        case UpdateStatus():
            put = Put(keys.job_status(action.job), dump(action.status))
            return (_one(context, [_generation(action.job, context)], put),)
        case UpdateIncident():
            guard = _generation(action.incident.job, context)
            return (_one(context, [guard], _incident(action.incident, context)),)
        case Probe() | AskWitnesses() | HoldBack() | Wait():
            return ()


def undo_staged(context: Context) -> tuple[Transaction, ...]:
    """Take back what was staged for the first generation of a job, and never became valid.

    Its leader fell, or lost a race, before the record: a job without a record has no slots, and
    the nodes that were to have them are free. (Later generations need no undoing: a slot that is
    staged replaces a lost one, and becomes valid with whichever record comes next.)
    """
    undone: list[Transaction] = []
    for name, job in sorted(context.view.jobs.items()):
        if job.generation is not None:
            continue
        stale = [keys.slot(name, number) for number in sorted(job.slots)]
        stale += [
            keys.assignment(node)
            for node, held in sorted(context.view.assignments.items())
            if held.job == name
        ]
        guards = (context.leader, Absent(keys.generation(name)))
        units = [Transaction((), (Delete(key),)) for key in stale]
        undone += [Transaction(guards, part.writes) for part in _packed(units, len(guards))]
    return tuple(undone)


def _one(context: Context, guards: Sequence[Guard], write: Write) -> Transaction:
    return Transaction((context.leader, *guards), (write,))


def _unchanged(key: str, context: Context) -> Guard:
    revision = context.mod_revision(key)
    return Unchanged(key, revision) if revision else Absent(key)


def _generation(job: str, context: Context) -> Guard:
    return _unchanged(keys.generation(job), context)


def _incident(incident: Incident, context: Context) -> Put:
    marks = tuple(
        one if one.time_ns else replace(one, time_ns=context.wall_ns) for one in incident.marks
    )
    return Put(keys.incident(incident.id), dump(replace(incident, marks=marks)))


def _declare_dead(action: DeclareDead, context: Context) -> Transaction:
    flags = context.view.flags_of(action.node)
    dead = DeadIncarnation(action.incarnation, action.reason, context.wall_ns)
    kept = (*flags.dead, dead)[-DEAD_KEPT:]
    key = keys.flags(action.node)
    return _one(context, [_unchanged(key, context)], Put(key, dump(replace(flags, dead=kept))))


def _keep_warm(action: KeepWarm, context: Context) -> Transaction:
    key = keys.spare(action.node)
    if not action.job:
        return _one(context, (), Delete(key))
    record = SpareAssignment(action.node, action.job, action.spec_revision)
    return _one(context, [_generation(action.job, context)], Put(key, dump(record)))


def _transition(action: Transition, context: Context) -> tuple[Transaction, ...]:
    """One transaction, or, if etcd doesn't take it whole, several around the record's.

    A slot stands with its assignment in one transaction. What is written before the record has
    the new generation's number and is valid only with the record; places are taken away after it,
    since until then the old record's owners have them.
    """
    job = action.generation.job
    guards = (context.leader, _generation(job, context))
    placed = {one.slot: one for one in action.assign}
    units: list[Transaction] = []
    for slot in action.slots:
        writes: list[Write] = [Put(keys.slot(job, slot.slot), dump(slot))]
        needed: list[Guard] = []
        assignment = placed.pop(slot.slot, None)
        if assignment is not None and assignment.node in context.view.assignments:
            # an owner that moves: nobody but the leader writes its place, or this job's slots
            writes.append(Put(keys.assignment(assignment.node), dump(assignment)))
        elif assignment is not None:
            live = context.view.nodes.get(assignment.node)
            if live is None or live.record.incarnation != assignment.incarnation:
                raise Stale(f"node {assignment.node} has another incarnation by now")
            key = keys.assignment(assignment.node)
            needed = [Absent(key), Created(keys.node(assignment.node), live.create_revision)]
            writes.append(Put(key, dump(assignment)))
        units.append(Transaction(tuple(needed), tuple(writes)))
    if placed:
        raise ValueError(f"assignments of {job} without a slot: {sorted(placed)}")

    record: list[Write] = [Put(keys.generation(job), dump(action.generation))]
    if action.incident is not None:
        record.append(_incident(action.incident, context))
    if action.status is not None:
        record.append(Put(keys.job_status(job), dump(action.status)))
    frees = [Transaction((), (Delete(keys.assignment(node)),)) for node in action.unassign]

    whole = _join([*units, Transaction((), tuple(record)), *frees])
    if _fits(whole, len(guards)):
        return (Transaction((*guards, *whole.guards), whole.writes),)
    before = [
        Transaction((*guards, *part.guards), part.writes) for part in _packed(units, len(guards))
    ]
    # The record's own write changes its revision, so what follows it has only the leader's guard.
    after = [Transaction((context.leader, *part.guards), part.writes) for part in _packed(frees, 1)]
    return (*before, Transaction(guards, tuple(record)), *after)


def _join(parts: Iterable[Transaction]) -> Transaction:
    guards: list[Guard] = []
    writes: list[Write] = []
    for part in parts:
        guards.extend(part.guards)
        writes.extend(part.writes)
    return Transaction(tuple(guards), tuple(writes))


def _fits(whole: Transaction, more_guards: int) -> bool:
    return len(whole.guards) + more_guards <= MAX_OPERATIONS and len(whole.writes) <= MAX_OPERATIONS


def _packed(units: Sequence[Transaction], more_guards: int) -> list[Transaction]:
    """The units in as few transactions as in order they fit into."""
    packed: list[Transaction] = []
    for unit in units:
        if packed:
            grown = _join([packed[-1], unit])
            if _fits(grown, more_guards):
                packed[-1] = grown
                continue
        packed.append(unit)
    return packed
