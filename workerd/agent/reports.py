# SPDX-License-Identifier: Apache-2.0
"""What this node writes into etcd: its record, its acks, its progress. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coordinator.model import (
    Ack,
    Node,
    Phase,
    Progress,
    RankAck,
    RankProgress,
    StepPhase,
    Trainer,
    TrainerState,
    Warm,
)
from workerd.agent import stillness
from workerd.agent.actions import Action, ClearPlace, WriteAck, WriteNode, WriteProgress
from workerd.agent.standing import Condemned, Owner, Spare, Standing, lacking
from workerd.agent.state import Limits, Local, Orders, TrainerFacts

_STACKS = 4000
"""Characters of stacks that a record holds."""

NODE, ACK, PROGRESS = "node", "ack", "progress"
"""Kinds of writes, of which one each is under way at a time."""


def report(
    orders: Orders | None, local: Local, state: Standing, limits: Limits
) -> Iterator[Action]:
    """The writes that are due: none without a lease, and none by a dead incarnation."""
    if not local.registered or (isinstance(state, Condemned) and not local.stopping):
        return
    record = node_record(local, state, limits)
    if NODE not in local.busy and record != local.node_written:
        yield WriteNode(record, "it has changed")
    if orders is None:
        return
    if PROGRESS not in local.busy and local.written is not None:
        held = orders.assignment
        if held is None or (held.job, held.incarnation) != (local.written.job, local.incarnation):
            yield ClearPlace(local.written.job, "the node has no place in it any more")
            return
    if isinstance(state, Owner):
        if ACK not in local.busy:
            yield from _ack(orders, local, state)
        if PROGRESS not in local.busy:
            yield from _progress(local, state, limits)


def node_record(local: Local, state: Standing, limits: Limits) -> Node:
    """The node as it is to stand in etcd."""
    unhealthy = local.stopping or lacking(state, local) or _unkillable(local, limits)
    return replace(
        local.template,
        trainers=tuple(_trainer(one) for one in local.trainers),
        warm=_warm(local, state),
        unhealthy=unhealthy,
    )


def _unkillable(local: Local, limits: Limits) -> str:
    """What holds on to a device for good: a process that sleeps in a driver or a file system."""
    for one in local.trainers:
        gone_at = one.ended_at if one.ended_at is not None else one.killed_at
        if not one.cleared and gone_at is not None and local.now - gone_at >= limits.unkillable:
            return (
                f"processes of trainer {one.instance} (local rank {one.local_rank}) can't be killed"
            )
    return ""


def _trainer(facts: TrainerFacts) -> Trainer:
    if not facts.lives:
        state = TrainerState.ENDED
    elif facts.placement is not None:
        state = TrainerState.PLACED
    elif facts.ready:
        state = TrainerState.WARM
    else:
        state = TrainerState.STARTING
    return Trainer(
        instance=facts.instance,
        local_rank=facts.local_rank,
        state=state,
        job=facts.job,
        spec_revision=facts.spec_revision,
        since=facts.placement.since if facts.placement is not None else 0,
        exit=facts.exit,
    )


def _warm(local: Local, state: Standing) -> Warm | None:
    if not isinstance(state, Spare):
        return None
    spec = state.job.spec
    warm = Warm(job=spec.name, spec_revision=state.job.spec_revision)
    ready = {
        one.local_rank
        for one in local.trainers
        if one.lives
        and one.ready
        and one.connected
        and not one.ending
        and one.placement is None
        and Warm(one.job, one.spec_revision) == warm
    }
    return warm if ready >= set(range(spec.ranks_per_node)) else None


def _placed(local: Local, state: Owner) -> list[TrainerFacts]:
    """The trainers of the current place, ended ones too, by local rank."""
    mine = [one for one in local.trainers if state.keeps(one)]
    return sorted(mine, key=lambda one: one.local_rank)


def _ack(orders: Orders, local: Local, state: Owner) -> Iterator[Action]:
    generation = state.generation
    number = generation.generation
    if generation.phase not in (Phase.PAUSE, Phase.RESTORE):
        return
    spec = state.job.spec
    if local.ack_held and local.acked == (spec.name, number):
        return  # and what was read is older
    before = orders.jobs[spec.name].ack
    if (
        before is not None
        and before.incarnation == local.incarnation
        and before.generation >= number
    ):
        return
    ranks = []
    for one in _placed(local, state):
        # A dead trainer's word is void, and so is one whose end has been decided (rule 3).
        if not one.lives or one.ending or one.stopped is None:
            return
        if one.stopped.generation != number:
            return
        ranks.append(
            RankAck(
                rank=spec.rank(state.slot.slot, one.local_rank),
                instance=one.instance,
                phase=one.stopped.phase,
                step=one.stopped.step,
                initial_digest=one.stopped.initial_digest,
                shard_address=one.stopped.shard_address,
                offer=one.stopped.offer,
                held=one.stopped.held,
            )
        )
    if len(ranks) != len(state.slot.ranks):
        return
    ack = Ack(generation=number, incarnation=local.incarnation, ranks=tuple(ranks))
    yield WriteAck(spec.name, ack, f"every local rank has stopped for generation {number}")


def rank_progress(
    facts: TrainerFacts, rank: int, *, still: bool = False, excused: bool = False
) -> RankProgress:
    """Where one trainer stands."""
    done = facts.done_step is not None
    waiting = still and stillness.waits(facts)
    return RankProgress(
        rank=rank,
        instance=facts.instance,
        generation=facts.joined,
        phase=StepPhase.DONE if done else facts.phase,
        step=facts.done_step if facts.done_step is not None else facts.step,
        broken=facts.broken,
        broken_generation=facts.broken_generation,
        pull=facts.pull,
        digest=facts.digest,
        restored=facts.restored,
        held=facts.held,
        still=still,
        waiting=waiting,
        excused=excused,
        stacks=(facts.stacks or "")[:_STACKS] if still and not waiting else "",
    )


def _where(local: Local, state: Owner, limits: Limits, facts: TrainerFacts) -> RankProgress:
    unmoved = stillness.unmoved(state, local, limits, facts)
    excused = unmoved and stillness.excused(local, facts)
    return rank_progress(
        facts,
        state.job.spec.rank(state.slot.slot, facts.local_rank),
        still=unmoved and not excused and stillness.seen(facts),
        excused=excused,
    )


def _tells_step(state: Owner, limits: Limits) -> bool:
    """Whether this node is one of those that tell the job's step.

    All ranks commit a step together, so of many nodes a few are enough: those that the generation
    names anyway, and whose loss ends it.
    """
    few = state.job.spec.slots <= limits.progress_rate
    return few or state.slot.slot in state.generation.rendezvous_slots


def progress_interval(state: Owner, limits: Limits) -> float:
    """Seconds between two progress records of a node without an urgent reason."""
    if _tells_step(state, limits):
        return limits.progress_interval
    # by slot, so that nodes that were told something together don't go on writing together
    spread = 0.5 + state.slot.slot % 100 / 100
    return max(limits.progress_interval, state.job.spec.slots / limits.progress_rate * spread)


def _marks(facts: TrainerFacts, stands: object, *, tells_step: bool) -> tuple[object, ...]:
    """What must be known at once when it changes; ``stands`` is whether it stands still."""
    return (
        facts.instance,
        facts.lives,
        facts.joined,
        facts.restored,
        (facts.committed, facts.held) if tells_step else (0, 0),
        (facts.broken_generation, facts.broken),
        facts.done_step,
        facts.digest,
        stands,
    )


def _progress(local: Local, state: Owner, limits: Limits) -> Iterator[Action]:
    spec = state.job.spec
    placed = _placed(local, state)
    if not placed:
        return
    ranks = tuple(_where(local, state, limits, one) for one in placed)
    tells_step = _tells_step(state, limits)
    marks = tuple(
        _marks(facts, (one.still, one.waiting, one.excused), tells_step=tells_step)
        for facts, one in zip(placed, ranks, strict=True)
    )
    before = local.written
    progress = Progress(
        incarnation=local.incarnation,
        ranks=ranks,
        steps_per_second=local.steps_per_second,
        step_seconds=local.step_seconds,
    )
    if before is None:
        yield WriteProgress(spec.name, progress, marks, "the first of this place")
    elif before.marks != marks:
        yield WriteProgress(spec.name, progress, marks, "a rank's situation has changed")
    elif before.progress.ranks != ranks and local.now - before.at >= progress_interval(
        state, limits
    ):
        yield WriteProgress(spec.name, progress, marks, "it has moved on")
