# SPDX-License-Identifier: Apache-2.0
"""Who owns which rank, and who holds state."""

from __future__ import annotations

from collections.abc import Iterator, Set

from coordinator.model import (
    ClusterView,
    JobView,
    Phase,
    RankAck,
    RankProgress,
    Slot,
    StepPhase,
    TrainerExit,
    TrainerState,
)


def owners(job: JobView) -> Iterator[Slot]:
    """The slots that have a node, in order."""
    for number in sorted(job.slots):
        slot = job.slots[number]
        if slot.node:
            yield slot


def absent(job: JobView, number: int) -> bool:
    """Whether the generation runs without a slot: all replicas of its block are absent."""
    spec = job.job.spec
    return (
        job.generation is not None
        and spec.replica(spec.rank(number, 0)) in job.generation.absent_replicas
    )


def members(job: JobView) -> Iterator[Slot]:
    """The owners that make up the group: those of the replicas that the generation has."""
    if job.generation is None or not job.generation.absent_replicas:
        return owners(job)
    return (slot for slot in owners(job) if not absent(job, slot.slot))


def reserves(job: JobView) -> Iterator[Slot]:
    """The owners of absent replicas: their replica broke, and they hold state until RUNNING.

    They stop, acknowledge and follow the RESTORE like everybody, but don't join (rule 8).
    """
    return (slot for slot in owners(job) if absent(job, slot.slot))


def leavers(view: ClusterView, job: JobView) -> list[Slot]:
    """The slots of those who have left by a planned change, live, and hold state until RUNNING.

    As reserves they stop, acknowledge and follow the RESTORE, but don't join (rule 8).
    """
    current = job.current
    if current.phase not in (Phase.PAUSE, Phase.RESTORE):
        return []
    found = []
    some = (slot for slot in job.slots.values() if slot.leaving is not None)  # few, of many
    for slot in sorted(some, key=lambda one: one.slot):
        left = slot.left(current)
        if left is None or not view.alive(left.node, left.incarnation):
            continue
        held = view.assignments.get(left.node)
        mine = held is not None and (held.job, held.slot) == (job.job.spec.name, left.slot)
        if mine and not ended(view, job, left):
            found.append(left)
    return found


def staged(job: JobView) -> frozenset[int]:
    """Slots written for a generation whose record isn't there: a large change takes several
    transactions, and the leader that began it is gone. Only the next generation makes them valid.
    """
    current = 0 if job.generation is None else job.generation.generation
    return frozenset(number for number, one in job.slots.items() if one.generation > current)


def ended(view: ClusterView, job: JobView, slot: Slot) -> dict[int, TrainerExit]:
    """The local ranks of a slot whose trainer has ended, by its node's own word.

    Before a RESTORE has named the instance, the trainer is told by the generation since which
    its slot has the rank anew.
    """
    live = view.nodes.get(slot.node)
    if live is None or live.record.incarnation != slot.incarnation:
        return {}
    over = {}
    for trainer in live.record.trainers:
        if trainer.state is not TrainerState.ENDED or trainer.job != job.job.spec.name:
            continue
        if trainer.local_rank >= len(slot.ranks):
            continue
        rank = slot.ranks[trainer.local_rank]
        if rank.instance == trainer.instance or (not rank.instance and trainer.since == rank.since):
            over[trainer.local_rank] = trainer.exit or TrainerExit()
    return over


def acks(job: JobView, slot: Slot) -> tuple[RankAck, ...] | None:
    """What the slot's owner acknowledged for the current generation, by local rank.

    None while it hasn't. An ack by another incarnation, or by an instance that the slot
    doesn't name, is none (rules 3 and 4 of the design).
    """
    generation = job.generation
    ack = job.acks.get(slot.node)
    if generation is None or ack is None:
        return None
    if ack.generation != generation.generation or ack.incarnation != slot.incarnation:
        return None
    by_rank = {one.rank: one for one in ack.ranks}
    found = []
    for local, rank in enumerate(slot.ranks):
        one = by_rank.get(job.job.spec.rank(slot.slot, local))
        if one is None or (rank.instance and one.instance != rank.instance):
            return None
        found.append(one)
    return tuple(found)


def progress(job: JobView, slot: Slot, local: int) -> RankProgress | None:
    """The progress of the trainer that the slot names for a local rank; None when there is none."""
    record = job.progress.get(slot.node)
    if record is None or record.incarnation != slot.incarnation:
        return None
    number = job.job.spec.rank(slot.slot, local)
    for one in record.ranks:
        if one.rank == number and one.instance == slot.ranks[local].instance:
            return one
    return None


def has_run(job: JobView) -> bool:
    """Whether there is work to lose: trainers may go on before RUNNING is recorded."""
    if job.current.last_running_generation:
        return True
    said = [one.step for ack in job.acks.values() for one in ack.ranks]
    said += [one.step for node in job.progress.values() for one in node.ranks]
    if job.status is not None:
        said.append(job.status.step)
    return any(step > 0 for step in said)


def holds_state(job: JobView, slot: Slot, local: int) -> bool:
    """Whether a rank is known to hold a whole state.

    By what it acknowledged, or by what it has restored since: an EMPTY acknowledgement stays
    where it is while the rank pulls and goes on.
    """
    given = acks(job, slot)
    if given is not None and given[local].phase is not StepPhase.EMPTY:
        return True
    seen = progress(job, slot, local)
    first = slot.ranks[local].since if given is None else job.current.generation
    return seen is not None and seen.restored >= first > 0


def may_hold_state(job: JobView, slot: Slot, local: int) -> bool:
    """Whether it can't be excluded that a rank holds state: the safe side of the above."""
    if not slot.ranks[local].instance:
        return False  # no RESTORE has reached this trainer
    given = acks(job, slot)
    if job.current.phase is Phase.PAUSE and given is not None:
        return given[local].phase is not StepPhase.EMPTY
    return True


def held(view: ClusterView, job: JobView, slot: Slot, *, known: bool = False) -> frozenset[int]:
    """The shard positions whose state a slot may hold; with ``known``, is known to hold."""
    spec = job.job.spec
    over = ended(view, job, slot)
    holds = holds_state if known else may_hold_state
    return frozenset(
        spec.shard_position(spec.rank(slot.slot, local))
        for local in range(len(slot.ranks))
        if local not in over and holds(job, slot, local)
    )


def held_elsewhere(view: ClusterView, job: JobView, slot: Slot, leaving: Set[int]) -> bool:
    """Whether all that a slot may hold is held by other slots too, not counting ``leaving``.

    Rule 8: nobody that still answers is given up while it is the last holder of a position.
    """
    left = held(view, job, slot) | held(view, job, slot, known=True)
    for other in leavers(view, job):
        left -= held(view, job, other, known=True)
    for other in owners(job):
        if other.slot == slot.slot or other.slot in leaving:
            continue
        if view.alive(other.node, other.incarnation):
            left -= held(view, job, other, known=True)
    return not left
