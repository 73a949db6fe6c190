# SPDX-License-Identifier: Apache-2.0
"""The timeline of a failure, from its detection to the first step after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coordinator.model import (
    Cause,
    Incident,
    IncidentMark,
    JobView,
    Phase,
    RankExit,
    RankProgress,
    StepPhase,
)
from coordinator.plan import holders
from coordinator.plan.actions import UpdateIncident

_EXITS = 16
_CULPRITS = frozenset({Cause.NODE_LOST, Cause.TRAINER_ENDED})


def detected(
    job: JobView,
    generation: int,
    cause: Cause,
    nodes: tuple[str, ...],
    why: str,
    exits: tuple[RankExit, ...] = (),
) -> Incident:
    """The incident that a new generation belongs to: the open one goes on, else one begins.

    The latest ``exits`` are kept, at most 16 of them.
    """
    mark = IncidentMark(phase="detected", note=why)
    current = job.incident
    if current is not None and not current.closed:
        # The survivors' broken group often shows before its culprit does.
        found = cause in _CULPRITS and current.cause not in _CULPRITS
        return replace(
            current,
            cause=cause if found else current.cause,
            detail=why if found else current.detail,
            nodes=tuple(dict.fromkeys(current.nodes + nodes)),
            last_generation=generation,
            marks=(*current.marks, mark),
            exits=(*current.exits, *exits)[-_EXITS:],
        )
    name = job.job.spec.name
    return Incident(
        id=f"{name}.{generation}",
        job=name,
        cause=cause,
        nodes=nodes,
        detail=why,
        first_generation=generation,
        last_generation=generation,
        marks=(mark,),
        exits=exits[-_EXITS:],
    )


def marked(job: JobView, phase: str, note: str = "") -> Incident | None:
    """The open incident with one more mark; None when none is open."""
    if job.incident is None or job.incident.closed:
        return None
    return _with(job.incident, phase, note)


def _with(incident: Incident, phase: str, note: str) -> Incident:
    return replace(incident, marks=(*incident.marks, IncidentMark(phase, note)))


def _has_mark(incident: Incident, phase: str) -> bool:
    """Whether the mark stands since the latest detection."""
    for mark in reversed(incident.marks):
        if mark.phase == phase:
            return True
        if mark.phase == "detected":
            return False
    return False


def _ranks(job: JobView) -> Iterator[RankProgress | None]:
    for slot in holders.members(job):
        for local in range(len(slot.ranks)):
            yield holders.progress(job, slot, local)


def follow(job: JobView) -> UpdateIncident | None:
    """What the ranks' progress adds to the open incident: pulled, first step."""
    generation, incident = job.generation, job.incident
    if generation is None or incident is None or incident.closed:
        return None
    number = generation.generation
    if generation.phase is Phase.RESTORE and not _has_mark(incident, "pulled"):
        pulls = []
        one = None
        for one in _ranks(job):
            if one is None or one.restored < number:
                return None
            if one.pull is not None:
                pulls.append(one.pull)
        if one is None:
            return None  # nobody has a slot
        moved = sum(pull.bytes for pull in pulls)
        slowest = max((pull.seconds for pull in pulls), default=0.0)
        note = f"{moved} bytes by {len(pulls)} ranks in {slowest:.3f} s"
        return UpdateIncident(
            replace(_with(incident, "pulled", note), bytes_moved=incident.bytes_moved + moved),
            "every rank holds the resume step's state",
        )
    if generation.phase is Phase.RUNNING:
        for one in _ranks(job):
            if one is None or one.generation != number:
                continue
            if one.step > generation.resume_step or one.phase is StepPhase.DONE:
                grown = _with(incident, "first_step", f"state {one.step} is committed")
                return UpdateIncident(
                    replace(grown, closed=True), "the first step after the failure is committed"
                )
    return None
