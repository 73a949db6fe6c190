# SPDX-License-Identifier: Apache-2.0
"""Owners of absent replicas, and who leaves: they hold state, stopped, until RUNNING (rule 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from coordinator.model import ClusterView, JobView, Phase, Slot
from coordinator.plan import arrange, holders, membership
from coordinator.plan.actions import Transition, Wait
from coordinator.plan.builder import empty_slots

NAMED = 5
"""How many of those that are waited for a reason names."""


def of_use(view: ClusterView, job: JobView) -> list[Slot]:
    """The reserves that still can acknowledge."""
    kept = list(holders.reserves(job)) if job.current.absent_replicas else []
    if kept:
        stay = arrange.staying(view, job, frozenset())
        kept = [slot for slot in kept if slot.slot in stay]
    return [*kept, *holders.leavers(view, job)]


def missing(
    view: ClusterView, job: JobView, positions: tuple[int, ...], late: list[Slot]
) -> Transition | Wait:
    """No member holds a shard position: the job is lost, unless a reserve may still answer.

    Where its own script has ended the trainers, it has failed.
    """
    for slot in late:
        if holders.held(view, job, slot) & set(positions):
            return Wait(
                job.job.spec.name,
                f"PAUSE: nobody but {names([slot])} may hold shard positions "
                f"{membership.some(positions)}, and it has not acknowledged",
                blocked=True,
            )
    lost = f"no living trainer holds shard positions {membership.some(positions)} any more"
    incident = job.incident
    for one in () if incident is None or incident.closed else incident.exits:
        if job.job.spec.shard_position(one.rank) in positions and membership.raised(one.exit):
            why = f"rank {one.rank} on {one.node} {membership.describe(one.exit)}; {lost}"
            return membership.ended(job, Phase.FAILED, f"{why}\n{one.exit.traceback}")
    return membership.ended(job, Phase.LOST, lost)


def freed(job: JobView, kept: Set[int] = frozenset()) -> tuple[Slot, ...]:
    """The slots of absent replicas without their owners, but for those that are kept."""
    number = job.current.generation
    return tuple(
        Slot(slot=slot.slot, generation=number)
        for slot in holders.reserves(job)
        if slot.slot not in kept
    )


def empty_after(job: JobView, changed: Iterable[Slot]) -> tuple[int, ...]:
    """The empty slots once some have changed."""
    return empty_slots({**job.slots, **{one.slot: one for one in changed}})


def names(slots: Sequence[Slot]) -> str:
    """Owners for people, not too many of them."""
    return some([f"{slot.node} (slot {slot.slot})" for slot in slots[: NAMED + 1]])


def some(words: Sequence[str]) -> str:
    """The first :data:`NAMED` of some words, and whether there are others."""
    return ", ".join(words[:NAMED]) + (" and others" if len(words) > NAMED else "")
