# SPDX-License-Identifier: Apache-2.0
"""What this node is at the moment, by its own keys alone (rule 2). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.model import Generation, Job, Slot
from workerd.agent.state import JobOrders, Local, Orders, Placement, TrainerFacts


@dataclass(frozen=True, slots=True)
class Condemned:
    """Nothing may run here any more."""

    reason: str
    grace: bool
    """Whether trainers may be told before they are killed."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """etcd has not been read yet: whatever runs goes on."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The node has a place, and its slot is valid."""

    job: Job
    generation: Generation
    slot: Slot
    leaving: bool = False
    """Another node has the slot: this one serves its state, stopped, until the others run."""

    def placement(self, local_rank: int) -> Placement | None:
        """What the trainer of a local rank must be placed for; None without such a rank."""
        if local_rank >= len(self.slot.ranks):
            return None
        since = self.slot.ranks[local_rank].since
        return Placement(self.job.spec.name, self.slot.slot, since)

    def keeps(self, trainer: TrainerFacts) -> bool:
        """Whether a placed trainer is the one that the slot means (rule 1).

        It may have been placed for another slot: an owner takes its trainers along.
        """
        held, wanted = trainer.placement, self.placement(trainer.local_rank)
        if held is None or wanted is None:
            return False
        named = self.slot.ranks[trainer.local_rank].instance
        if not named:
            return held == wanted
        return named == trainer.instance and (held.job, held.since) == (wanted.job, wanted.since)


@dataclass(frozen=True, slots=True)
class Expecting:
    """The node has a place whose slot isn't valid yet, with the record of its generation."""

    job: str
    slot: int


@dataclass(frozen=True, slots=True)
class Spare:
    """The node has no place and is to be warm for a job."""

    job: Job


@dataclass(frozen=True, slots=True)
class Idle:
    """The node has nothing to do."""

    reason: str


Standing: TypeAlias = Condemned | Unknown | Owner | Expecting | Spare | Idle


def standing(orders: Orders | None, local: Local) -> Standing:
    """What the node is."""
    if local.stopping:
        return Condemned(local.stopping, grace=True)
    if orders is None:
        return Unknown()
    if orders.flags.is_dead(local.incarnation):
        return Condemned(f"incarnation {local.incarnation} is recorded dead", grace=False)
    held = orders.assignment
    if held is not None and held.job and held.incarnation == local.incarnation:
        return _owner(orders.jobs.get(held.job), held.job, held.slot, held.generation, local)
    return _spare(orders)


def _owner(
    job: JobOrders | None, name: str, number: int, since: int, local: Local
) -> Owner | Expecting | Idle:
    if job is None or job.job is None or job.generation is None or job.slot is None:
        return Expecting(name, number)
    generation, slot = job.generation, job.slot
    # Slots are staged before the record of their generation, and valid only with it.
    if max(slot.generation, since) > generation.generation:
        return Expecting(name, number)
    mine = (local.node, local.incarnation)
    left = slot.left(generation)
    if left is not None and (left.node, left.incarnation) == mine:
        return Owner(job.job, generation, left, leaving=True)
    if (slot.node, slot.incarnation) != mine:
        return Idle(f"slot {number} of job {name} belongs to {slot.node or 'nobody'}")
    if generation.phase.ended:
        return Idle(f"job {name} is {generation.phase.name}")
    return Owner(job.job, generation, slot)


def _spare(orders: Orders) -> Spare | Idle:
    wanted = orders.spare
    if wanted is None or not wanted.job:
        return Idle("it has no place and is no spare")
    job = orders.jobs.get(wanted.job)
    if job is None or job.job is None or job.job.spec_revision != wanted.spec_revision:
        return Idle(f"there is no job {wanted.job} of spec revision {wanted.spec_revision}")
    if job.phase.ended:
        return Idle(f"job {wanted.job} is {job.phase.name}")
    return Spare(job.job)


def lacking(standing: Standing, local: Local) -> str:
    """Why this node can't be what it is asked to be; empty when it can."""
    if not isinstance(standing, Spare | Owner):
        return ""
    spec = standing.job.spec
    if len(local.devices) >= spec.ranks_per_node:
        return ""
    return (
        f"job {spec.name} needs {spec.ranks_per_node} devices on a node, "
        f"this one has {len(local.devices)}"
    )
