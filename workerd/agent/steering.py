# SPDX-License-Identifier: Apache-2.0
"""What trainers are told over their links. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.model import Phase
from workerd.agent.actions import (
    Action,
    SendHold,
    SendRelease,
    SendRestore,
    SendRunning,
    SendStop,
    SendWelcome,
)
from workerd.agent.standing import Owner, Standing
from workerd.agent.state import Local, Orders, TrainerFacts


def steer(
    orders: Orders | None,
    local: Local,
    state: Standing,
    ended: frozenset[str],
) -> Iterator[Action]:
    """Messages for the trainers that live and are not being ended.

    ``ended`` are the instances whose end the same decision has just asked for.
    """
    if orders is None:
        return
    for trainer in local.trainers:
        if not trainer.lives or trainer.ending or not trainer.connected:
            continue
        if trainer.instance in ended:
            continue
        yield from _welcome(orders, trainer)
        yield from _release(orders, local, trainer)
        if isinstance(state, Owner):
            yield from _follow(orders, local, state, trainer)


def _welcome(orders: Orders, trainer: TrainerFacts) -> Iterator[Action]:
    job = orders.jobs.get(trainer.job)
    if trainer.welcomed or job is None or job.job is None:
        return
    yield SendWelcome(
        instance=trainer.instance,
        job=trainer.job,
        spec=job.job.spec,
        spec_revision=trainer.spec_revision,
        local_rank=trainer.local_rank,
        spare=trainer.placement is None,
        reason="it has said hello",
    )


def _release(orders: Orders, local: Local, trainer: TrainerFacts) -> Iterator[Action]:
    job = orders.jobs.get(trainer.job)
    if job is None or job.generation is None or trainer.released_at is not None:
        return
    if job.phase is not Phase.FINISHED:
        return
    done = [one.done_step for one in local.trainers if one.done_step is not None]
    step = max([job.generation.resume_step, *done])
    yield SendRelease(trainer.instance, step, "the job has finished")


def _follow(
    orders: Orders,
    local: Local,
    state: Owner,
    trainer: TrainerFacts,
) -> Iterator[Action]:
    if not state.keeps(trainer):
        return
    generation, spec = state.generation, state.job.spec
    number = generation.generation
    rank = spec.rank(state.slot.slot, trainer.local_rank)
    if generation.phase is Phase.PAUSE and trainer.stop_sent < number:
        yield SendStop(
            instance=trainer.instance,
            generation=number,
            rank=rank,
            offer_rendezvous=state.slot.slot in generation.rendezvous_slots
            and trainer.local_rank == 0
            and not state.leaving,
            reason=f"PAUSE of generation {number}",
        )
    elif generation.phase is Phase.RESTORE and trainer.restore_sent < number:
        replica = spec.replica(rank)
        absent = generation.absent_replicas  # few, where the replicas are many
        named = state.slot.ranks[trainer.local_rank].instance == trainer.instance
        if (
            named
            and acknowledged(orders, local, spec.name, number)
            and trainer.stopped is not None
            and trainer.stopped.generation == number
        ):
            position = spec.shard_position(rank)
            yield SendRestore(
                instance=trainer.instance,
                generation=number,
                resume_step=generation.resume_step,
                initial=generation.initial,
                rank=rank,
                replica=0 if replica in absent else replica - sum(one < replica for one in absent),
                replicas=spec.replicas - len(absent),
                shard_position=position,
                sources=tuple(one for one in generation.sources if one.shard_position == position),
                rendezvous=generation.rendezvous,
                reserve=state.leaving or replica in absent,
                reason=f"RESTORE of generation {number}",
            )
    elif generation.phase is Phase.RUNNING and trainer.joined == number:
        if trainer.running_sent < number:
            yield SendRunning(trainer.instance, number, f"RUNNING of generation {number}")
        if generation.hold and trainer.hold_sent < number:
            yield SendHold(trainer.instance, number, generation.hold)


def acknowledged(orders: Orders, local: Local, job: str, generation: int) -> bool:
    """Whether this incarnation has acknowledged a generation.

    Its ack may be gone from etcd with a lease that ended meanwhile.
    """
    if local.acked == (job, generation):
        return True
    ack = orders.jobs[job].ack
    return ack is not None and ack.generation == generation and ack.incarnation == local.incarnation
