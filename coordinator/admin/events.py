# SPDX-License-Identifier: Apache-2.0
"""What the change of a record means to an operator. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.admin.timeline import headline, in_short
from coordinator.controller import records
from coordinator.model import (
    Assignment,
    FailureClass,
    Generation,
    Incident,
    Job,
    JobState,
    JobStatus,
    Node,
    NodeFlags,
    Phase,
    SpareAssignment,
    Trainer,
    TrainerState,
)
from coordinator.store import KeyKind, KeyValue, ParsedKey, RecordError, keys


@dataclass(frozen=True, slots=True)
class Happening:
    """One event. ``time_ns`` is what the record says, wall clock; 0 when it says nothing."""

    kind: str
    message: str
    job: str = ""
    node: str = ""
    time_ns: int = 0


def describe(key: str, before: KeyValue | None, after: KeyValue | None) -> tuple[Happening, ...]:
    """What happened when a key changed from ``before`` to ``after``; None: it didn't exist."""
    parsed = keys.parse(key)
    try:
        new = None if after is None else records.load(parsed.kind, after)
    except RecordError as error:
        return (Happening("record.unreadable", str(error), job=parsed.job, node=parsed.node),)
    try:
        old = None if before is None else records.load(parsed.kind, before)
    except RecordError:
        old = None  # said when it was written
    return tuple(_of_kind(parsed, old, new))


def _of_kind(parsed: ParsedKey, old: Any, new: Any) -> Iterator[Happening]:
    match parsed.kind:
        case KeyKind.NODE:
            return _node(parsed.node, old, new)
        case KeyKind.FLAGS:
            return _flags(parsed.node, old or NodeFlags(), new or NodeFlags())
        case KeyKind.ASSIGNMENT:
            return _assignment(parsed.node, old, new)
        case KeyKind.SPARE:
            return _spare(parsed.node, old, new)
        case KeyKind.JOB_SPEC:
            return _job(parsed.job, old, new)
        case KeyKind.GENERATION:
            return _generation(parsed.job, old, new)
        case KeyKind.JOB_STATUS:
            return _status(parsed.job, old, new)
        case KeyKind.INCIDENT:
            return _incident(old, new)
        case _:
            return iter(())


def _node(name: str, old: Node | None, new: Node | None) -> Iterator[Happening]:
    if new is None:
        if old is not None:
            message = f"incarnation {old.incarnation}: its lease has ended"
            yield Happening("node.left", message, node=name)
        return
    if old is None or old.incarnation != new.incarnation:
        instead = f" instead of {old.incarnation}" if old is not None else ""
        yield Happening(
            "node.joined",
            f"incarnation {new.incarnation}{instead}, {len(new.devices)} devices, "
            f"workerd {new.version or 'of unknown version'} at {new.control_address}",
            node=name,
        )
        old = None
    was_unhealthy = old.unhealthy if old is not None else ""
    if new.unhealthy != was_unhealthy:
        kind = "node.unhealthy" if new.unhealthy else "node.healthy"
        yield Happening(kind, new.unhealthy or f"no longer: {was_unhealthy}", node=name)
    known = {one.instance for one in old.trainers if _ended(one)} if old is not None else set()
    for trainer in new.trainers:
        if _ended(trainer) and trainer.instance not in known:
            yield Happening("trainer.ended", _how(trainer), job=trainer.job, node=name)


def _ended(trainer: Trainer) -> bool:
    return trainer.state is TrainerState.ENDED


def _how(trainer: Trainer) -> str:
    text = f"local rank {trainer.local_rank}, instance {trainer.instance}: "
    if trainer.exit is None:
        return text + "nothing is known of its end"
    if trainer.exit.signal:
        text += f"ended by signal {trainer.exit.signal}"
    else:
        text += f"exited with code {trainer.exit.code}"
    if trainer.exit.cause:
        named = trainer.exit.failure_class is not FailureClass.CLASS_UNSPECIFIED
        text += f": {trainer.exit.failure_class.name.lower()}" if named else ""
        text += f": {trainer.exit.cause}"
    return text + (f"; core: {trainer.exit.core}" if trainer.exit.core else "")


def _flags(name: str, old: NodeFlags, new: NodeFlags) -> Iterator[Happening]:
    known = {one.incarnation for one in old.dead}
    for one in new.dead:
        if one.incarnation not in known:
            message = f"incarnation {one.incarnation} is recorded dead: {one.reason}"
            yield Happening("node.dead", message, node=name, time_ns=one.time_ns)
    for mark in ("cordoned", "draining", "replacing", "quarantined"):
        was, now = getattr(old, mark), getattr(new, mark)
        if was != now:
            kind = f"node.{mark}" if now else f"node.{mark}.cleared"
            yield Happening(kind, now or f"no longer: {was}", node=name)


def _assignment(name: str, old: Assignment | None, new: Assignment | None) -> Iterator[Happening]:
    if new is not None and (old is None or (old.job, old.slot) != (new.job, new.slot)):
        message = f"takes slot {new.slot} in generation {new.generation}"
        yield Happening("node.placed", message, job=new.job, node=name)
    elif new is None and old is not None:
        yield Happening("node.freed", f"leaves slot {old.slot}", job=old.job, node=name)


def _spare(
    name: str, old: SpareAssignment | None, new: SpareAssignment | None
) -> Iterator[Happening]:
    if new is not None and new != old:
        yield Happening("node.spare", "is kept warm", job=new.job, node=name)


def _job(name: str, old: Job | None, new: Job | None) -> Iterator[Happening]:
    if new is None:
        return
    if old is None:
        spec = new.spec
        message = (
            f"{spec.ranks} ranks on {spec.slots} nodes, {spec.replicas} replicas, "
            f"{spec.spares} spares"
        )
        yield Happening("job.submitted", message, job=name, time_ns=new.submitted_ns)
    if new.stop and (old is None or not old.stop):
        yield Happening("job.stopping", new.stop, job=name)
    if old is not None and new.wanted != old.wanted:
        message = f"{new.wanted} replicas are to run, not {old.wanted}"
        yield Happening("job.scaled", message, job=name)
    was = old.recovery_paused if old is not None else ""
    if new.recovery_paused and not was:
        yield Happening("recovery.paused", new.recovery_paused, job=name)
    elif was and not new.recovery_paused:
        yield Happening("recovery.resumed", f"no longer: {was}", job=name)


_ENDS = {
    Phase.FINISHED: "job.finished",
    Phase.STOPPED: "job.stopped",
    Phase.FAILED: "job.failed",
    Phase.LOST: "job.lost",
}


def _generation(name: str, old: Generation | None, new: Generation | None) -> Iterator[Happening]:
    if new is None:
        return
    if old is not None and (old.generation, old.phase) == (new.generation, new.phase):
        if new.hold and not old.hold:
            message = f"all ranks stop after the step under way: {new.hold}"
            yield Happening("job.held", message, job=name)
        return
    message = f"generation {new.generation} {new.phase.name}"
    if new.reason:
        message += f": {new.reason}"
    yield Happening(_ENDS.get(new.phase, "job.phase"), message, job=name)


def _status(name: str, old: JobStatus | None, new: JobStatus | None) -> Iterator[Happening]:
    if new is None:
        return
    was = old.held if old is not None else ""
    if new.held and not was:
        yield Happening("verdict.held", new.held, job=name)
    elif was and not new.held:
        yield Happening("verdict.held.cleared", f"no longer: {was}", job=name)
    if new.state is not JobState.WAITING:
        return
    if old is None or (old.state, old.reason) != (new.state, new.reason):
        yield Happening("job.waiting", new.reason, job=name)


def _incident(old: Incident | None, new: Incident | None) -> Iterator[Happening]:
    if new is None:
        return
    marks = new.marks
    if old is None:
        began = marks[0].time_ns if marks else 0
        message = headline(new) + (f": {new.detail}" if new.detail else "")
        yield Happening("incident.opened", message, job=new.job, time_ns=began)
    if new.closed and (old is None or not old.closed):
        over = marks[-1].time_ns if marks else 0
        yield Happening("incident.closed", in_short(new), job=new.job, time_ns=over)
