# SPDX-License-Identifier: Apache-2.0
"""Weighs what is known of a node that doesn't answer although its lease lives. Pure.

The lease decides in the end; this decides sooner, and only where the evidence is plain:

- nobody listens where its workerd listened, or another incarnation answers there: dead;
- the kernel accepts connections, workerd is silent: frozen, the lease decides;
- nothing answers: dead if witnesses say so too, or, when there are none, if its group is broken
  and it alone has not said so; alive if one reaches it, or if it goes on writing or its job on
  stepping.

A verdict is held back when it would go beyond the disruption budget, and never given on the last
holder of a shard position (rule 8).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from coordinator.model import Answer, ClusterView, Contact, JobView, Line, Phase, Settings
from coordinator.plan import holders

_WITNESSES = 2
_STALE = 1.5
"""Seconds: progress is written at most once in a second, so what comes so much later than a node's
last answer is of steps that were made without it, or with it and after it."""
_TOLD_WITHIN = 0.25
"""Seconds that a witness' word may take beyond its own time."""

Who = tuple[str, str]


class Judgement(IntEnum):
    """What the evidence comes to."""

    ALIVE = 0
    OPEN = 1
    """It will be known in a moment: what fails together is then mended together."""
    HELD = 2
    """It isn't plain, or must not count: the lease decides."""
    DEAD = 3


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What else is known besides the contact itself."""

    witnesses: int = 0
    """How many have been asked, or could be."""
    broken: bool = False
    """Others say that the group it is in is broken, it doesn't."""
    stepping: bool = False
    """Its job has gone on making steps after it answered no more."""
    last_holder: bool = False
    down: int = 1
    """How many don't answer, it among them, with those declared dead a moment ago."""
    budget: int = 1
    doubted_at: float = float("-inf")
    """When more than the budget didn't answer: who was tried before may have been one of them."""
    outage: bool = False
    """etcd was out of reach a moment ago."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A judgement and its reason."""

    judgement: Judgement
    reason: str
    over_budget: bool = False


def weigh(contact: Contact, around: Circumstances, now: float, settings: Settings) -> Weighed:
    """What is to be made of one incarnation. ``now``: the leader's monotonic seconds."""
    judgement, reason = _plain(contact, around, now, settings)
    if judgement is not Judgement.DEAD:
        return Weighed(judgement, reason)
    if around.outage:
        return Weighed(Judgement.HELD, f"{reason}; but etcd has only just come back")
    if around.down > around.budget:
        return Weighed(
            Judgement.HELD,
            f"{reason}; but {around.down} nodes don't answer at once, more than the disruption "
            f"budget of {around.budget}: this coordinator may be the one that is cut off, "
            "their leases decide",
            over_budget=True,
        )
    if around.last_holder:
        return Weighed(
            Judgement.HELD,
            f"{reason}; but nobody else is known to hold its shard position: its lease decides",
        )
    return Weighed(Judgement.DEAD, reason)


def _plain(
    contact: Contact, around: Circumstances, now: float, settings: Settings
) -> tuple[Judgement, str]:
    """By itself, whatever hangs on it."""
    match contact.line:
        case Line.ANSWERS:
            return Judgement.ALIVE, contact.detail
        case Line.REFUSED | Line.REPLACED:
            return Judgement.DEAD, contact.detail
        case Line.FROZEN | Line.UNKNOWN:
            return Judgement.HELD, f"{contact.detail}: its lease decides"
    if (
        contact.line is Line.SILENT
        and contact.tried <= around.doubted_at
        and (around.down <= around.budget)
    ):
        return Judgement.HELD, f"{contact.detail}; but so were others, until now: it is tried anew"
    if contact.wrote >= contact.tried:
        return Judgement.HELD, f"{contact.detail}; but it goes on writing to etcd"
    if around.stepping:
        return Judgement.HELD, f"{contact.detail}; but its job goes on making steps"
    said = {one.answer: one for one in reversed(contact.said)}
    if Answer.ACCEPTED in said:
        one = said[Answer.ACCEPTED]
        return Judgement.HELD, f"{contact.detail}; but {one.witness} says: {one.detail}"
    if contact.line is Line.LOST:
        return Judgement.OPEN, contact.detail
    waited = now - contact.tried
    if len(contact.said) < around.witnesses and waited < 3 * settings.ping + _TOLD_WITHIN:
        return Judgement.OPEN, f"{contact.detail}; its witnesses are being asked"
    for answer in (Answer.REFUSED, Answer.SILENT):
        if answer in said:
            one = said[answer]
            return Judgement.DEAD, f"{contact.detail}; {one.witness} says so too: {one.detail}"
    if around.broken:
        return Judgement.DEAD, f"{contact.detail}; its group is broken, as the others say"
    return Judgement.HELD, f"{contact.detail}; but there is no second witness: its lease decides"


# ---- in a view


def judge(view: ClusterView, now: float, settings: Settings) -> Mapping[Who, Weighed]:
    """Everybody with a lease who doesn't answer, and what is to be made of that."""
    doubtful = {
        who: contact
        for who, contact in view.contacts.items()
        if contact.line is not Line.ANSWERS and view.alive(*who)
    }
    if not doubtful:
        return {}
    down, budget = _counted(view, settings)
    found = {}
    for who, contact in sorted(doubtful.items()):
        job = _job_of(view, who)
        around = Circumstances(
            witnesses=len(witnesses(view, *who)),
            broken=job is not None and silent_in_broken(job, who),
            stepping=job is not None and _stepping(job, contact),
            last_holder=job is not None and _last_holder(view, job, doubtful.keys(), who),
            down=down,
            budget=budget,
            doubted_at=view.doubted_at,
            outage=now < view.no_eviction_before,
        )
        found[who] = weigh(contact, around, now, settings)
    return found


def crowded(view: ClusterView, settings: Settings) -> bool:
    """Whether more nodes don't answer than may be declared dead at once."""
    down, budget = _counted(view, settings)
    return down > budget


def _counted(view: ClusterView, settings: Settings) -> tuple[int, int]:
    down = sum(one.line is not Line.ANSWERS for one in view.contacts.values())
    return down, max(1, math.floor(settings.disruption * len(view.contacts)))


def witnesses(view: ClusterView, node: str, incarnation: str) -> tuple[Who, ...]:
    """Who is to be asked about a node: two that answer, of its own job if there are such.

    By their names those that come after it, so that it isn't the same two who are asked for all.
    """
    held = view.assignments.get(node)
    job = held.job if held is not None else ""

    def distance(who: Who) -> tuple[bool, bool, Who]:
        other = view.assignments.get(who[0])
        return (other is None or other.job != job, who < (node, incarnation), who)

    able = [
        who
        for who, one in view.contacts.items()
        if one.line is Line.ANSWERS and who[0] != node and view.alive(*who)
    ]
    return tuple(sorted(able, key=distance)[:_WITNESSES])


def silent_in_broken(job: JobView, who: Who) -> bool:
    """Whether an owner has said nothing of its group, which others say is broken."""
    if job.broken_at is None:
        return False
    number = job.current.generation
    for slot in holders.members(job):
        if (slot.node, slot.incarnation) == who:
            said = [holders.progress(job, slot, local) for local in range(len(slot.ranks))]
            return not any(one is not None and one.broken_generation == number for one in said)
    return False


def _job_of(view: ClusterView, who: Who) -> JobView | None:
    held = view.assignments.get(who[0])
    job = view.jobs.get(held.job) if held is not None and held.incarnation == who[1] else None
    if job is None or job.generation is None or job.generation.phase.ended:
        return None
    return job


def _stepping(job: JobView, contact: Contact) -> bool:
    return (
        job.current.phase is Phase.RUNNING
        and job.progress_at > job.phase_at
        and job.progress_at > contact.since + _STALE
    )


def _last_holder(view: ClusterView, job: JobView, doubtful: Collection[Who], who: Who) -> bool:
    """Whether a verdict would take the last one who is known to hold a state (rule 8)."""
    if not holders.has_run(job):
        return False
    leaving = {
        slot.slot for slot in holders.owners(job) if (slot.node, slot.incarnation) in doubtful
    }
    for slot in holders.owners(job):
        if (slot.node, slot.incarnation) == who:
            return not holders.held_elsewhere(view, job, slot, leaving)
    # who has left serves the others: its own state may be what they all wait for
    return any((one.node, one.incarnation) == who for one in holders.leavers(view, job))
