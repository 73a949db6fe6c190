# SPDX-License-Identifier: Apache-2.0
"""From PAUSE over RESTORE to RUNNING, and to the job's end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from coordinator.model import (
    Cause,
    ClusterView,
    Generation,
    JobView,
    Phase,
    RankAck,
    RankProgress,
    Rendezvous,
    Settings,
    Slot,
    SlotRank,
    Source,
    StepPhase,
)
from coordinator.plan import deaths, hang, holders, incidents, membership, reserves
from coordinator.plan.actions import Transition, Wait
from coordinator.plan.ladder import too_few

SOURCES = 4
"""How many sources a shard position names at most."""

FRESH_STARTS = 3
"""How often in a row ranks are started afresh because none has its initial state."""


@dataclass(frozen=True, slots=True)
class _Owned:
    """What one rank acknowledged, and by whom."""

    slot: Slot
    local: int
    position: int
    ack: RankAck


def paused(view: ClusterView, job: JobView, now: float, settings: Settings) -> Transition | Wait:
    """PAUSE: once every owner has acknowledged, name the resume step and who serves it.

    The resume step S is the highest that an owner of *this* generation acknowledged (rule 4). At
    each shard position a rank must hold S, or be PREPARED(S-1) so that its own update gives S.
    """
    generation = job.current
    name = job.job.spec.name
    silent = (slot for slot in holders.members(job) if holders.acks(job, slot) is None)
    some = list(itertools.islice(silent, reserves.NAMED + 1))
    if len(some) > reserves.NAMED:
        # With many nodes this is asked often while the acknowledgements come.
        return Wait(name, f"PAUSE: no acknowledgement yet from {reserves.names(some)}")
    owned, waiting = _acknowledged(job, holders.members(job))
    kept, late = _acknowledged(job, reserves.of_use(view, job))
    if late and now - job.phase_at < settings.pause:
        waiting += late
    if waiting:
        return Wait(name, f"PAUSE: no acknowledgement yet from {reserves.names(waiting)}")

    holding = _holding(owned)
    told = [one.ack for one in (*holding, *_holding(kept))]
    step = resume_step(told) if told else -1
    kept = _following(kept, step)
    held = {one.position for one in (*holding, *_holding(kept))}
    missing = tuple(one for one in range(job.job.spec.shard_positions) if one not in held)
    if missing and holders.has_run(job):
        return reserves.missing(view, job, missing, late)
    if open_slots(job):
        return Wait(
            name,
            f"slots {membership.some(open_slots(job))} are empty and no node is free to take them; "
            f"{too_few(job)}",
            blocked=True,
        )
    offers = [one.ack.offer for one in owned if one.ack.offer is not None]
    if not offers:
        why = "no owner could offer a rendezvous store"
        if now - job.phase_at < membership.regroup_delay(job, settings):
            return Wait(name, f"PAUSE: {why}; they are asked again soon")
        return membership.regroup(view, job, Cause.GROUP_BROKEN, why)
    rendezvous = offers[generation.regroups % len(offers)]
    if not told:
        return _initial(view, job, owned, rendezvous)
    if missing:
        return membership.restart_ranks(
            view,
            job,
            {one.ack.rank for one in holding},
            f"the job has not run yet and shard positions {membership.some(missing)} are lost: "
            "all begin anew",
        )

    wrong = [one for one in holding if not reaches(one.ack, step)]
    if wrong:
        return _behind(view, job, (*holding, *kept), wrong, step)
    # who has the step already serves at once; who must apply its own update first comes after
    ready = sorted(
        (*holding, *_holding(kept)), key=lambda one: (one.ack.step != step, one.ack.rank)
    )
    empty = {one.position for one in (*owned, *kept) if one.ack.phase is StepPhase.EMPTY}
    sources = _sources(ready, empty, "")
    again = any(
        one.ack.step == step and one.ack.phase is not StepPhase.DONE and not one.ack.held
        for one in holding
    )
    return _restore(
        job, owned, step, sources, rendezvous, initial=False, lost_steps=int(again), kept=kept
    )


def _holding(owned: Iterable[_Owned]) -> list[_Owned]:
    return [one for one in owned if one.ack.phase is not StepPhase.EMPTY]


def _following(kept: list[_Owned], step: int) -> list[_Owned]:
    """The ranks of the reserves that hold state and can reach the resume step with all of it."""
    held = {one.slot.slot for one in _holding(kept)}
    behind = {one.slot.slot for one in _holding(kept) if not reaches(one.ack, step)}
    return [one for one in kept if one.slot.slot in held - behind]


def _acknowledged(job: JobView, slots: Iterable[Slot]) -> tuple[list[_Owned], list[Slot]]:
    """What the owners acknowledged, by rank; and who hasn't."""
    owned: list[_Owned] = []
    waiting: list[Slot] = []
    for slot in slots:
        given = holders.acks(job, slot)
        if given is None:
            waiting.append(slot)
            continue
        for local, ack in enumerate(given):
            position = job.job.spec.shard_position(ack.rank)
            owned.append(_Owned(slot, local, position, ack))
    return owned, waiting


def open_slots(job: JobView) -> tuple[int, ...]:
    """The slots of present replicas that no node has: the job waits for some."""
    return tuple(
        number
        for number, slot in sorted(job.slots.items())
        if not slot.node and not holders.absent(job, number)
    )


def _behind(
    view: ClusterView, job: JobView, holding: tuple[_Owned, ...], wrong: list[_Owned], step: int
) -> Transition | Wait:
    """Members that can't reach the resume step.

    A reserve that came back may be: the others may have gone on without it, before RUNNING was
    recorded. Its state is of no use then.
    """
    name, number = job.job.spec.name, job.current.generation
    for one in wrong:
        came_back = one.slot.generation == number and one.slot.ranks[one.local].since < number
        if not came_back:
            return Wait(
                name,
                f"rank {one.ack.rank} holds state {one.ack.step} {one.ack.phase.name}, which can't "
                f"reach the resume step {step}: the protocol was violated, an operator must decide",
                blocked=True,
            )
    held = {one.position for one in _holding(holding) if reaches(one.ack, step)}
    missing = tuple(sorted({one.position for one in wrong} - held))
    ranks = tuple(one.ack.rank for one in wrong)
    if missing:
        return membership.ended(
            job,
            Phase.LOST,
            f"no living trainer holds state {step} of shard positions {membership.some(missing)} "
            f"any more; ranks {membership.some(ranks)} have an older one",
        )
    return membership.restart_ranks(
        view, job, set(ranks), f"ranks {membership.some(ranks)} have no state {step}, and pull it"
    )


def resume_step(holding: Iterable[RankAck]) -> int:
    """S: the highest step that an owner of this generation acknowledged (rule 4)."""
    return max(one.step for one in holding)


def reaches(ack: RankAck, step: int) -> bool:
    """Whether a rank holds the resume step, or comes to it by its own update."""
    return ack.step == step or (ack.step == step - 1 and ack.phase is StepPhase.PREPARED)


def _initial(
    view: ClusterView, job: JobView, owned: list[_Owned], rendezvous: Rendezvous
) -> Transition:
    """The job has never run: all begin from the lowest rank's own initial state."""
    sources: list[Source] = []
    for position in range(job.job.spec.shard_positions):
        built = [one for one in owned if one.position == position and one.ack.initial_digest]
        if not built:
            why = f"shard position {position}: no rank has the state that it was built with"
            if job.current.regroups >= FRESH_STARTS:
                return membership.ended(
                    job,
                    Phase.FAILED,
                    f"{why}, although all were started afresh {FRESH_STARTS} times",
                )
            dirty = {one.ack.rank for one in owned if one.position == position}
            return membership.restart_ranks(view, job, dirty, why)
        first = min(built, key=lambda one: one.ack.rank)
        sources.extend(_sources([first], {position}, first.ack.initial_digest))
    return _restore(job, owned, 0, tuple(sources), rendezvous, initial=True, lost_steps=0)


def _sources(ready: list[_Owned], positions: set[int], digest: str) -> tuple[Source, ...]:
    sources: list[Source] = []
    for position in sorted(positions):
        of_position = [one for one in ready if one.position == position][:SOURCES]
        sources.extend(
            Source(
                shard_position=position,
                rank=one.ack.rank,
                node=one.slot.node,
                instance=one.ack.instance,
                address=one.ack.shard_address,
                initial_digest=digest,
            )
            for one in of_position
        )
    return tuple(sources)


def _restore(
    job: JobView,
    owned: list[_Owned],
    step: int,
    sources: tuple[Source, ...],
    rendezvous: Rendezvous,
    *,
    initial: bool,
    lost_steps: int,
    kept: Iterable[_Owned] = (),
) -> Transition:
    """RESTORE; ``kept`` are the reserves that follow it, the others are freed."""
    generation = job.current
    named = (
        *_with_instances([*owned, *kept]),
        *reserves.freed(job, {one.slot.slot for one in kept}),
    )
    why = f"every owner has stopped; resume at step {step}"
    incident = incidents.marked(job, "paused", why)
    if incident is not None:
        incident = replace(incident, resume_step=step, lost_steps=lost_steps)
    return Transition(
        replace(
            generation,
            phase=Phase.RESTORE,
            resume_step=step,
            initial=initial,
            sources=sources,
            rendezvous=rendezvous,
            empty_slots=reserves.empty_after(job, named),
            reason=why,
        ),
        why,
        slots=named,
        incident=incident,
    )


def _with_instances(owned: list[_Owned]) -> tuple[Slot, ...]:
    """The slots in which the acknowledged instances are not named yet, with them."""
    # by owner, too: who leaves a slot has another one's place in it
    by_slot: dict[tuple[int, str], tuple[Slot, list[SlotRank]]] = {}
    for one in owned:
        at = (one.slot.slot, one.slot.node)
        slot, ranks = by_slot.setdefault(at, (one.slot, list(one.slot.ranks)))
        ranks[one.local] = replace(slot.ranks[one.local], instance=one.ack.instance)
    return tuple(
        replace(slot, ranks=tuple(ranks))
        for _, (slot, ranks) in sorted(by_slot.items())
        if tuple(ranks) != slot.ranks
    )


def _each_rank(job: JobView) -> Iterator[tuple[Slot, int, RankProgress | None]]:
    for slot in holders.members(job):
        for local in range(len(slot.ranks)):
            yield slot, local, holders.progress(job, slot, local)


def restoring(job: JobView) -> Transition | Wait:
    """RESTORE: once every rank has joined the new group, record that the job runs."""
    generation = job.current
    number = generation.generation
    missing = (
        str(job.job.spec.rank(slot.slot, local))
        for slot, local, one in _each_rank(job)
        if one is None or one.generation != number
    )
    waiting = list(itertools.islice(missing, reserves.NAMED + 1))
    if waiting:
        return Wait(
            job.job.spec.name, f"RESTORE: ranks {reserves.some(waiting)} have not joined yet"
        )
    why = f"every rank has joined the group and runs from step {generation.resume_step}"
    spec = job.job.spec
    if generation.absent_replicas:
        present = spec.replicas - len(generation.absent_replicas)
        why += f", with {present} of {spec.replicas} replicas"
    freed = reserves.freed(job)
    return Transition(
        replace(
            generation,
            phase=Phase.RUNNING,
            last_running_generation=number,
            empty_slots=reserves.empty_after(job, freed),
            reason=why,
        ),
        why,
        slots=freed,
        incident=incidents.marked(job, "regrouped"),
    )


def broken(view: ClusterView, job: JobView, now: float, settings: Settings) -> Transition | None:
    """A broken group, or one that stands still, is rebuilt with everybody in it (rules 6, 7).

    Who is the culprit shows then: it doesn't acknowledge. Each such generation in a row is given
    twice the time, so that a slow job comes through.
    """
    generation = job.current
    if job.broken_at is not None:
        if now - job.broken_at < membership.regroup_delay(job, settings):
            return None
        said = [
            f"rank {job.job.spec.rank(slot.slot, local)}: {one.broken}"
            for slot, local, one in _each_rank(job)
            if one is not None and one.broken_generation == generation.generation
        ]
        return membership.regroup(
            view, job, Cause.GROUP_BROKEN, f"the group is broken: {'; '.join(said[:3])}"
        )
    patience = 2 ** min(membership.regroups(job), 16)
    quiet = now - max(job.progress_at, job.phase_at, view.no_eviction_before)
    stuck = hang.find(view, job, now, settings)
    if stuck is not None and not stuck.culprits and quiet >= settings.hang * patience:
        why = f"all ranks have waited for each other for {stuck.seconds:.0f} s"
        return membership.regroup(view, job, Cause.NO_PROGRESS, why)
    excused = any(one is not None and one.excused for _, _, one in _each_rank(job))
    if generation.phase is Phase.RUNNING and quiet >= settings.progress * patience and not excused:
        return membership.regroup(
            view, job, Cause.NO_PROGRESS, f"no step in {settings.progress * patience:g} s"
        )
    doubted = deaths.doubted(view, job, now, settings)
    if doubted and not membership.regroups(job):
        return membership.regroup(
            view,
            job,
            Cause.DEADLINE,
            f"ranks {membership.some(doubted)} have not restored within {settings.restore:g} s, "
            "each from one node alone: who hangs shows when all stop",
        )
    if generation.phase is Phase.RESTORE and quiet >= settings.restore * patience:
        number = generation.generation
        if all(one is not None and one.restored >= number for _, _, one in _each_rank(job)):
            return membership.regroup(
                view,
                job,
                Cause.DEADLINE,
                f"every rank holds its state, but not all have joined in "
                f"{settings.restore * patience:g} s",
            )
    return None


def finished(job: JobView) -> Transition | None:
    """Rule 9: once every rank is done, and not before, the job's end is recorded."""
    generation = job.current
    digests: dict[int, set[str]] = {}
    steps = set()
    for slot, local, one in _each_rank(job):
        if (
            one is None
            or one.phase is not StepPhase.DONE
            or not one.digest  # its page says so, its word is still on the way
            or one.generation != generation.generation
        ):
            return None
        steps.add(one.step)
        position = job.job.spec.shard_position(job.job.spec.rank(slot.slot, local))
        digests.setdefault(position, set()).add(one.digest)
    differing = sorted(position for position, found in digests.items() if len(found) > 1)
    if len(steps) != 1 or differing:
        return membership.ended(
            job,
            Phase.FAILED,
            f"the replicas ended differently: steps {sorted(steps)}, "
            f"different states at shard positions {differing}",
        )
    return membership.ended(job, Phase.FINISHED, f"every rank is done at step {steps.pop()}")


def final_digests(job: JobView) -> tuple[str, ...]:
    """The digest of the final state of each shard position; empty where none is known any more."""
    digests: dict[int, str] = {}
    for slot, local, one in _each_rank(job):
        if one is not None and one.digest:
            digests[job.job.spec.shard_position(job.job.spec.rank(slot.slot, local))] = one.digest
    return tuple(digests.get(one, "") for one in range(job.job.spec.shard_positions))


def running_step(job: JobView) -> int:
    """The job's step: the highest that a rank has committed, as its progress says."""
    generation: Generation | None = job.generation
    steps = [one.step for _, _, one in _each_rank(job) if one is not None]
    return max([0, *steps, generation.resume_step if generation else 0])
