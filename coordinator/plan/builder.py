# SPDX-License-Identifier: Apache-2.0
"""Collects what a generation changes, and makes its record of it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from coordinator.model import (
    Assignment,
    Cause,
    ClusterView,
    Generation,
    JobView,
    Leaver,
    Phase,
    RankExit,
    Slot,
    SlotRank,
)
from coordinator.plan import incidents
from coordinator.plan.actions import Transition

OFFERS = 3
"""How many slots offer a rendezvous store."""


class Builder:
    """The next generation of a job, as it grows."""

    def __init__(self, view: ClusterView, job: JobView, number: int) -> None:
        self._view = view
        self._job = job
        self._number = number
        self._slots: dict[int, Slot] = {}
        self._assign: list[Assignment] = []
        self._unassign: list[str] = []

    def place(self, number: int, node: str, leaving: Slot | None = None) -> None:
        """A node without a place takes a slot, from ``leaving`` if its owner is to be a source."""
        spec = self._job.job.spec
        before = self._job.slots.get(number, Slot(slot=number)).leaving
        if leaving is not None:
            before = Leaver(leaving.node, leaving.incarnation, leaving.ranks, self._number)
        record = self._view.nodes[node].record
        self._slots[number] = Slot(
            slot=number,
            node=node,
            incarnation=record.incarnation,
            ranks=(SlotRank(since=self._number),) * spec.ranks_per_node,
            generation=self._number,
            leaving=before,
        )
        self._assign.append(
            Assignment(
                node=node,
                incarnation=record.incarnation,
                job=spec.name,
                slot=number,
                generation=self._number,
                control_address=record.control_address,
            )
        )

    def move(self, number: int, old: Slot, fresh: Set[int]) -> None:
        """The owner of another slot takes this one with its trainers, but for the local ranks
        ``fresh`` and those that no RESTORE has named."""
        ranks = tuple(
            SlotRank(since=self._number) if local in fresh or not rank.instance else rank
            for local, rank in enumerate(old.ranks)
        )
        moved = replace(old, slot=number, ranks=ranks, generation=self._number, leaving=None)
        self._slots[number] = moved
        held = self._view.assignments[old.node]
        self._assign.append(replace(held, slot=number, generation=self._number))

    def restart(self, old: Slot, local: Set[int]) -> None:
        """Some ranks of a slot start afresh where they are."""
        ranks = tuple(
            SlotRank(since=self._number) if one in local else rank
            for one, rank in enumerate(old.ranks)
        )
        self._slots[old.slot] = replace(old, ranks=ranks, generation=self._number)

    def empty(self, number: int) -> None:
        """A slot has no node any more."""
        self._slots[number] = Slot(slot=number, generation=self._number)

    def free(self, old: Slot) -> None:
        """The owner of a slot has no place any more, unless it was given another one."""
        held = self._view.assignments.get(old.node)
        name = self._job.job.spec.name
        if held is not None and (held.job, held.slot) == (name, old.slot):
            self._unassign.append(old.node)

    def transition(
        self,
        incident: tuple[Cause, tuple[str, ...]] | None,
        why: str,
        *,
        restarts: int | None = None,
        regroups: int = 0,
        absent: tuple[int, ...] | None = None,
        exits: tuple[RankExit, ...] = (),
    ) -> Transition:
        """The record that makes it valid; ``absent`` are its absent replicas, if they change, and
        ``exits`` the ended trainers that it replaces."""
        job, current, spec = self._job, self._job.generation, self._job.job.spec
        if absent is None:
            absent = current.absent_replicas if current else ()
        slots = {**job.slots, **self._slots}
        gone = frozenset(absent)
        members = [
            number
            for number in sorted(slots)
            if slots[number].node and spec.replica(spec.rank(number, 0)) not in gone
        ]
        fresh = {
            number
            for number in members
            if any(rank.since == self._number for rank in slots[number].ranks)
        }
        offers = sorted(members, key=lambda number: (number in fresh, number))[:OFFERS]
        record = None
        if incident is not None:
            cause, nodes = incident
            record = incidents.detected(job, self._number, cause, nodes, why, exits)
        generation = Generation(
            job=spec.name,
            generation=self._number,
            phase=Phase.PAUSE,
            spec_revision=job.job.spec_revision,
            last_running_generation=current.last_running_generation if current else 0,
            empty_slots=empty_slots(slots),
            absent_replicas=absent,
            changed_slots=tuple(sorted(self._slots))[:64],
            rendezvous_slots=tuple(sorted(offers)),
            incident=record.id if record is not None else "",
            restarts=restarts if restarts is not None else (current.restarts if current else 0),
            regroups=regroups,
            reason=why,
        )
        places = {one.node for one in self._assign}
        return Transition(
            generation,
            why,
            slots=tuple(self._slots[number] for number in sorted(self._slots)),
            assign=tuple(self._assign),
            unassign=tuple(one for one in self._unassign if one not in places),
            incident=record,
        )


def empty_slots(slots: dict[int, Slot]) -> tuple[int, ...]:
    """The slots without a node."""
    return tuple(number for number in sorted(slots) if not slots[number].node)
