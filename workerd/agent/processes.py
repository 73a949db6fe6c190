# SPDX-License-Identifier: Apache-2.0
"""Which trainer processes start, are placed, and end. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.model import Phase
from workerd.agent import stillness
from workerd.agent.actions import (
    Action,
    AskStacks,
    EndTrainer,
    ForgetTrainer,
    KillTrainer,
    PlaceTrainer,
    Renew,
    StartTrainer,
)
from workerd.agent.standing import (
    Condemned,
    Expecting,
    Idle,
    Owner,
    Spare,
    Standing,
    Unknown,
    lacking,
)
from workerd.agent.state import JobOrders, Limits, Local, Orders, Placement, TrainerFacts

SHORT_LIFE = 60.0
"""A waiting trainer that lived for fewer seconds counts for the back-off of the next one."""


def processes(
    orders: Orders | None, local: Local, state: Standing, limits: Limits
) -> Iterator[Action]:
    """All of it, in the order in which it is to be done."""
    chosen = _chosen(local, state)
    for trainer in local.trainers:
        if trainer.lives and trainer.ending:
            if trainer.kill_at is not None and local.now >= trainer.kill_at:
                yield KillTrainer(trainer.instance, "it has not ended in time")
        elif trainer.lives:
            verdict = (
                _condemned(state, limits)
                or _silent(local, limits, trainer)
                or _orphaned(local, limits, trainer)
                or _of_job(orders, local, limits, trainer)
                or _misplaced(state, limits, trainer, chosen)
            )
            if verdict is not None and verdict[1]:
                grace, why = verdict
                yield EndTrainer(trainer.instance, grace, why)
            elif (moved := _moved(state, trainer)) is not None:
                yield PlaceTrainer(trainer.instance, moved, "its node has taken another slot")
            elif (
                stillness.unmoved(state, local, limits, trainer)
                and not stillness.excused(local, trainer)
                and trainer.stacks_asked_at < trainer.moved_at
            ):
                yield AskStacks(trainer.instance, "nothing of it has moved for long")
        elif trainer.cleared and (why := _forgotten(state, trainer)):
            yield ForgetTrainer(trainer.instance, why)
    if isinstance(state, Owner):
        yield from _fill(local, state, chosen)
    elif isinstance(state, Spare):
        yield from _warm(local, state, limits)
    elif (
        isinstance(state, Condemned)
        and not local.stopping
        and all(one.cleared for one in local.trainers)
    ):
        yield Renew(state.reason)


def _chosen(local: Local, state: Standing) -> dict[int, TrainerFacts]:
    """The waiting trainers that take the ranks of the slot which nobody has taken yet."""
    chosen: dict[int, TrainerFacts] = {}
    if not isinstance(state, Owner) or state.generation.phase is not Phase.PAUSE:
        return chosen
    for number, rank in enumerate(state.slot.ranks):
        # One trainer a place: if it has ended, the leader has to say so with a new `since`.
        taken = any(one.placement == state.placement(number) for one in local.trainers)
        if rank.instance or taken:
            continue
        waiting = [
            one
            for one in local.trainers
            if one.local_rank == number and _fits(one, state) and one.placement is None
        ]
        if waiting:
            chosen[number] = max(waiting, key=lambda one: (one.ready, one.connected))
    return chosen


def _fits(trainer: TrainerFacts, state: Owner | Spare) -> bool:
    """Whether a trainer runs what the job is now, and may go on."""
    return (
        trainer.lives
        and not trainer.ending
        and trainer.job == state.job.spec.name
        and trainer.spec_revision == state.job.spec_revision
    )


# A verdict is (grace, why); an empty why lets the trainer live, whatever comes later says.
_Verdict = tuple[float, str]
_LIVES: _Verdict = (0.0, "")


def _condemned(state: Standing, limits: Limits) -> _Verdict | None:
    if isinstance(state, Condemned):
        return (limits.end_grace if state.grace else 0.0), state.reason
    return None


def _silent(local: Local, limits: Limits, trainer: TrainerFacts) -> _Verdict | None:
    if trainer.unlinked_at is None or trainer.released_at is not None:
        return None
    if local.now - trainer.unlinked_at < limits.link_grace:
        return None
    return 0.0, "it has closed its link and goes on"


def _orphaned(local: Local, limits: Limits, trainer: TrainerFacts) -> _Verdict | None:
    """Rule 10: the deadline has passed *and* the group is broken, and nobody says what to do."""
    if local.overdue_since is None or trainer.placement is None:
        return None
    if not trainer.broken or trainer.broken_generation < trainer.joined:
        return None
    if local.now - local.overdue_since < limits.self_fence:
        return None
    return 0.0, (
        f"no word of etcd for {limits.self_fence:.0f} s past the lease's deadline, "
        "and its group is broken"
    )


def _of_job(
    orders: Orders | None, local: Local, limits: Limits, trainer: TrainerFacts
) -> _Verdict | None:
    if orders is None or trainer.job not in orders.jobs:
        return _LIVES
    job: JobOrders = orders.jobs[trainer.job]
    if job.job is None:
        return limits.end_grace, f"there is no job {trainer.job} any more"
    if job.phase is Phase.FINISHED:
        if trainer.released_at is None:
            # Without a link it can't be told; with one the release is on its way.
            return _LIVES if trainer.connected else (limits.end_grace, "the job has finished")
        if local.now - trainer.released_at < limits.release_grace:
            return _LIVES
        return limits.end_grace, "it has not left after the job's end"
    if job.phase.ended:
        reason = job.generation.reason if job.generation is not None else ""
        return limits.end_grace, f"the job is {job.phase.name}: {reason}"
    return None


def _misplaced(
    state: Standing, limits: Limits, trainer: TrainerFacts, chosen: dict[int, TrainerFacts]
) -> _Verdict | None:
    if isinstance(state, Unknown):
        return None
    place = trainer.placement
    if place is not None:
        if isinstance(state, Owner):
            if state.keeps(trainer):
                return None
            return 0.0, f"the slot means another trainer than the one of generation {place.since}"
        if isinstance(state, Expecting) and place.job == state.job:
            return None  # it may be meant: an owner takes its trainers along to another slot
        why = state.reason if isinstance(state, Idle) else "the node has another task"
        return 0.0, f"it has lost its place: {why}"
    if isinstance(state, Owner):
        if chosen.get(trainer.local_rank) is trainer:
            return None
        return limits.end_grace, "the slot has its trainers"
    if isinstance(state, Expecting):
        if trainer.job == state.job:
            return None
        return limits.end_grace, f"the node has a place in job {state.job}"
    if isinstance(state, Spare):
        if _fits(trainer, state):
            return None
        return limits.end_grace, "the node is to be warm for something else"
    return limits.end_grace, f"not needed: {state.reason}"


def _moved(state: Standing, trainer: TrainerFacts) -> Placement | None:
    """The place of a trainer whose node has taken another slot with it."""
    if not isinstance(state, Owner) or not state.keeps(trainer):
        return None
    place = state.placement(trainer.local_rank)
    return place if place != trainer.placement else None


def _forgotten(state: Standing, trainer: TrainerFacts) -> str:
    """Why an ended trainer needs no record any more; empty while it does."""
    place = trainer.placement
    if isinstance(state, Unknown | Condemned):
        return ""
    if place is None:
        if isinstance(state, Spare) and trainer.job == state.job.spec.name:
            return ""  # its end counts for the back-off until the next one runs
        return "it never had a place"
    if isinstance(state, Owner) and (
        state.keeps(trainer) or place == state.placement(trainer.local_rank)
    ):
        return ""
    if isinstance(state, Expecting) and place.job == state.job:
        return ""
    return "its place is somebody else's"


def _free(local: Local, local_rank: int) -> bool:
    """Whether nothing holds the device."""
    return local_rank < len(local.devices) and all(
        one.cleared for one in local.trainers if one.local_rank == local_rank
    )


def _fill(local: Local, state: Owner, chosen: dict[int, TrainerFacts]) -> Iterator[Action]:
    if state.generation.phase is not Phase.PAUSE or lacking(state, local):
        return
    for number, rank in enumerate(state.slot.ranks):
        place = Placement(state.job.spec.name, state.slot.slot, rank.since)
        if number in chosen:
            yield PlaceTrainer(chosen[number].instance, place, "a waiting trainer takes the rank")
        elif (
            not rank.instance
            and not any(one.placement == place for one in local.trainers)
            and _free(local, number)
        ):
            yield StartTrainer(
                local_rank=number,
                job=place.job,
                spec_revision=state.job.spec_revision,
                placement=place,
                attempt=0,
                reason=f"slot {place.slot} needs it since generation {place.since}",
            )


def _warm(local: Local, state: Spare, limits: Limits) -> Iterator[Action]:
    if lacking(state, local):
        return
    for number in range(state.job.spec.ranks_per_node):
        if not _free(local, number):
            continue
        before = [one for one in local.trainers if one.local_rank == number and not one.placement]
        attempt = 0
        if before:
            last = max(before, key=lambda one: one.started_at)
            ended = last.ended_at if last.ended_at is not None else local.now
            if ended - last.started_at < SHORT_LIFE and not last.ending:
                attempt = last.attempt + 1
                if local.now < ended + min(
                    limits.retry * 2 ** min(last.attempt, 16), limits.retry_max
                ):
                    continue
        for one in before:
            yield ForgetTrainer(one.instance, "the next one takes its place")
        yield StartTrainer(
            local_rank=number,
            job=state.job.spec.name,
            spec_revision=state.job.spec_revision,
            placement=None,
            attempt=attempt,
            reason=f"a hot spare for job {state.job.spec.name}",
        )
