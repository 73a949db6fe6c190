# SPDX-License-Identifier: Apache-2.0
"""Who owns which rank, and who holds state."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.model import (
    ClusterView,
    JobView,
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


def holds_state(job: JobView, slot: Slot, local: int) -> bool:
    """Whether a rank is known to hold a whole state, by its ack or by what it restored before."""
    given = acks(job, slot)
    if given is not None:
        return given[local].phase is not StepPhase.EMPTY
    seen = progress(job, slot, local)
    return seen is not None and seen.restored >= slot.ranks[local].since > 0


def keeps_a_holder(view: ClusterView, job: JobView, without: frozenset[int]) -> bool:
    """Whether every shard position that slots of ``without`` hold is held by another slot too.

    Rule 8: nobody that still answers is given up while it is the last holder of a position.
    """
    spec = job.job.spec
    leaving: set[int] = set()
    staying: set[int] = set()
    for slot in owners(job):
        over = ended(view, job, slot)
        lives = view.alive(slot.node, slot.incarnation)
        for local, rank in enumerate(slot.ranks):
            if local in over:
                continue
            position = spec.shard_position(spec.rank(slot.slot, local))
            if slot.slot in without:
                # not known to be empty counts as holding: the safe side
                given = acks(job, slot)
                if given is not None and given[local].phase is StepPhase.EMPTY:
                    continue
                if not rank.instance:
                    continue
                leaving.add(position)
            elif lives and holds_state(job, slot, local):
                staying.add(position)
    return leaving <= staying
