# SPDX-License-Identifier: Apache-2.0
"""The next generation: who owns which slot, and why it changes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from coordinator.model import (
    Assignment,
    Cause,
    ClusterView,
    Generation,
    JobView,
    Phase,
    Settings,
    Slot,
    SlotRank,
    TrainerExit,
)
from coordinator.plan import holders, incidents
from coordinator.plan.actions import Transition, Wait
from coordinator.plan.placement import candidates, unusable

OFFERS = 3
"""How many slots offer a rendezvous store."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the owners of a generation."""

    lost: tuple[int, ...] = ()
    """Slots whose owner is dead."""
    ended: tuple[tuple[int, int, TrainerExit], ...] = ()
    """(slot, local rank, exit) of ended trainers on living nodes."""
    staged: tuple[int, ...] = ()
    """Slots that an earlier leader wrote for the next generation, without coming to its record."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.ended or self.staged)


def find(view: ClusterView, job: JobView) -> Faults:
    """The faults of the current generation's owners.

    An owner whose lease is gone is only suspect, not lost, until it is recorded dead.
    """
    lost: list[int] = []
    over: list[tuple[int, int, TrainerExit]] = []
    staged = tuple(sorted(holders.staged(job)))
    for slot in holders.owners(job):
        if view.flags_of(slot.node).is_dead(slot.incarnation):
            lost.append(slot.slot)
        elif slot.slot not in staged:
            ended = holders.ended(view, job, slot)
            over.extend((slot.slot, local, ended[local]) for local in sorted(ended))
    return Faults(tuple(lost), tuple(over), staged)


def first(view: ClusterView, job: JobView, taken: Set[str]) -> Transition | Wait:
    """Generation 1: a node for every slot, all of them at once.

    Nodes that an earlier leader had placed before it got to the record keep their place.
    """
    spec = job.job.spec
    found = candidates(view, job.job, taken).all
    kept = {one.slot for one in holders.owners(job) if view.alive(one.node, one.incarnation)}
    open_slots = [number for number in range(spec.slots) if number not in kept]
    if len(found) < len(open_slots):
        refused = [
            f"{node}: {why}"
            for node in sorted(view.nodes)
            if (why := unusable(view, node, spec.ranks_per_node))
        ]
        return Wait(
            spec.name,
            f"needs {len(open_slots)} nodes, {len(found)} are free"
            + (f" ({'; '.join(refused[:5])})" if refused else ""),
        )
    build = _Builder(view, job, 1)
    for number, node in zip(open_slots, found, strict=False):
        if number in job.slots:
            build.free(job.slots[number])
        build.place(number, node)
    return build.transition(None, f"start on {spec.slots} nodes")


def change(
    view: ClusterView, job: JobView, taken: Set[str], faults: Faults
) -> Transition | Wait | None:
    """A generation that mends the faults and fills empty slots; None when all is well.

    A hot spare comes first; without one an ended trainer is restarted where it was; a slot for
    which there is no node stays empty, its job paused, until one comes.
    """
    current = job.current
    spec = job.job.spec
    found = candidates(view, job.job, taken)
    empty = {number for number, slot in job.slots.items() if not slot.node}
    if not faults and not (empty and found.all):
        return None
    restarts = current.restarts + len(faults.ended)
    if restarts > spec.restarts and faults.ended:
        return failed(job, faults, restarts)

    build = _Builder(view, job, current.generation + 1)
    free = list(found.all)
    hot = set(found.hot)
    reasons: list[str] = []
    nodes: list[str] = []
    if faults.staged:
        reasons.append(f"slots {some(faults.staged)} were written before the leader changed")
    for number in sorted({*faults.lost, *empty}):
        old = job.slots.get(number, Slot(slot=number))
        if old.node:
            nodes.append(old.node)
            build.free(old)
        if free:
            node = free.pop(0)
            build.place(number, node)
            kind = "hot" if node in hot else "cold"
            reasons.append(f"slot {number}: {old.node or 'empty'} -> {kind} spare {node}")
        else:
            build.empty(number)
            what = f"{old.node} is lost" if old.node else "still empty"
            reasons.append(f"slot {number}: {what}, no node is free")
    leaving = {*faults.lost}
    by_slot: dict[int, list[tuple[int, TrainerExit]]] = {}
    for number, local, exit_ in faults.ended:
        by_slot.setdefault(number, []).append((local, exit_))
    for number, over in by_slot.items():
        old = job.slots[number]
        nodes.append(old.node)
        how = ", ".join(
            f"rank {spec.rank(number, local)} {describe(exit_)}" for local, exit_ in over
        )
        # an unhealthy node leaves even for a spare that has to start first
        better = bool(free) and (
            free[0] in hot or bool(unusable(view, old.node, spec.ranks_per_node))
        )
        if better and holders.held_elsewhere(view, job, old, leaving):
            node = free.pop(0)
            leaving.add(number)
            build.free(old)
            build.place(number, node)
            kind = "hot" if node in hot else "cold"
            reasons.append(f"slot {number}: {how} on {old.node} -> {kind} spare {node}")
        else:
            build.restart(old, frozenset(local for local, _ in over))
            reasons.append(f"slot {number}: {how} on {old.node}, restarted there")
    why = "; ".join(reasons)
    # a node that comes for an empty slot goes on with the incident that emptied it
    cause = Cause.TRAINER_ENDED if faults.ended and not faults.lost else Cause.NODE_LOST
    return build.transition((cause, tuple(nodes)), why, restarts=restarts)


def regroup(view: ClusterView, job: JobView, cause: Cause, why: str) -> Transition:
    """A generation that changes nobody: the group is rebuilt, with another store."""
    current = job.current
    build = _Builder(view, job, current.generation + 1)
    return build.transition((cause, ()), why, regroups=regroups(job) + 1)


def restart_ranks(view: ClusterView, job: JobView, ranks: Set[int], why: str) -> Transition:
    """A generation in which some ranks start afresh where they are."""
    current = job.current
    spec = job.job.spec
    build = _Builder(view, job, current.generation + 1)
    for slot in holders.owners(job):
        local = frozenset(
            one for one in range(len(slot.ranks)) if spec.rank(slot.slot, one) in ranks
        )
        if local:
            build.restart(slot, local)
    return build.transition((Cause.TRAINER_ENDED, ()), why, regroups=regroups(job) + 1)


def regroup_delay(job: JobView, settings: Settings) -> float:
    """How long a broken group waits for a culprit, in seconds."""
    return float(min(settings.regroup * 2 ** min(regroups(job), 16), settings.regroup_max))


def regroups(job: JobView) -> int:
    """Generations in a row that changed nobody; a committed step ends the row."""
    current = job.current
    if job.incident is not None and job.incident.closed:
        return 0
    return current.regroups


def failed(job: JobView, faults: Faults, restarts: int) -> Transition:
    """The job's own script ends it: more trainers ended than the job file allows."""
    number, local, exit_ = faults.ended[-1]
    rank = job.job.spec.rank(number, local)
    why = (
        f"rank {rank} on {job.slots[number].node} {describe(exit_)}; "
        f"{restarts} trainers have ended, restarts allows {job.job.spec.restarts}"
    )
    if exit_.message:
        why += f"\n{exit_.message}"
    return ended(job, Phase.FAILED, why)


def ended(job: JobView, phase: Phase, why: str) -> Transition:
    """The job's last record."""
    spec = job.job.spec
    current = job.generation or Generation(
        job=spec.name, generation=1, spec_revision=job.job.spec_revision
    )
    incident = incidents.marked(job, phase.name.lower(), why)
    if incident is not None:
        incident = replace(incident, closed=True)
    return Transition(replace(current, phase=phase, reason=why), why, incident=incident)


def some(numbers: tuple[int, ...]) -> str:
    """Numbers for people, not too many of them."""
    shown = ", ".join(str(one) for one in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def describe(exit_: TrainerExit) -> str:
    """How a trainer ended, in a few words."""
    if exit_.signal:
        return f"was ended by signal {exit_.signal}"
    return f"exited with code {exit_.code}"


class _Builder:
    """Collects what a generation changes."""

    def __init__(self, view: ClusterView, job: JobView, number: int) -> None:
        self._view = view
        self._job = job
        self._number = number
        self._slots: dict[int, Slot] = {}
        self._assign: list[Assignment] = []
        self._unassign: list[str] = []

    def place(self, number: int, node: str) -> None:
        spec = self._job.job.spec
        record = self._view.nodes[node].record
        self._slots[number] = Slot(
            slot=number,
            node=node,
            incarnation=record.incarnation,
            ranks=(SlotRank(since=self._number),) * spec.ranks_per_node,
            generation=self._number,
        )
        self._assign.append(
            Assignment(
                node,
                record.incarnation,
                spec.name,
                number,
                self._number,
                record.control_address,
            )
        )

    def restart(self, old: Slot, local: frozenset[int]) -> None:
        ranks = tuple(
            SlotRank(since=self._number) if one in local else rank
            for one, rank in enumerate(old.ranks)
        )
        self._slots[old.slot] = replace(old, ranks=ranks, generation=self._number)

    def empty(self, number: int) -> None:
        self._slots[number] = Slot(slot=number, generation=self._number)

    def free(self, old: Slot) -> None:
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
    ) -> Transition:
        job, current = self._job, self._job.generation
        slots = {**job.slots, **self._slots}
        kept = [number for number in sorted(slots) if slots[number].node]
        fresh = {
            number
            for number in kept
            if any(rank.since == self._number for rank in slots[number].ranks)
        }
        offers = sorted(kept, key=lambda number: (number in fresh, number))[:OFFERS]
        record = None
        if incident is not None:
            cause, nodes = incident
            record = incidents.detected(job, self._number, cause, nodes, why)
        generation = Generation(
            job=job.job.spec.name,
            generation=self._number,
            phase=Phase.PAUSE,
            spec_revision=job.job.spec_revision,
            last_running_generation=current.last_running_generation if current else 0,
            empty_slots=tuple(number for number in sorted(slots) if not slots[number].node),
            changed_slots=tuple(sorted(self._slots))[:64],
            rendezvous_slots=tuple(sorted(offers)),
            incident=record.id if record is not None else "",
            restarts=restarts if restarts is not None else (current.restarts if current else 0),
            regroups=regroups,
            reason=why,
        )
        return Transition(
            generation,
            why,
            slots=tuple(self._slots[number] for number in sorted(self._slots)),
            assign=tuple(self._assign),
            unassign=tuple(self._unassign),
            incident=record,
        )
