# SPDX-License-Identifier: Apache-2.0
"""Rules of the protocol, each dropped by a patch of the production code that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from coordinator.controller import transactions
from coordinator.model import JobView, Phase, RankAck, Slot, StepPhase, TrainerExit
from coordinator.plan import boundary, deaths, evidence, holders, membership, recover
from coordinator.plan.actions import Transition
from tests.modelcheck import checks
from tests.modelcheck.system import System
from tests.modelcheck.values import Shape
from workerd.agent import decide, standing, steering
from workerd.agent.actions import SendRelease
from workerd.agent.processes import processes
from workerd.agent.standing import Owner
from workerd.protocol import phases
from workerd.protocol.page import StepPhase as Stage

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A dropped rule, and the smallest search that shows why it is there."""

    name: str
    patch: Patch
    says: str
    shape: Shape


def lowest_step(patch: pytest.MonkeyPatch) -> None:
    """S is the lowest step."""
    patch.setattr(recover, "resume_step", lambda acks: min(one.step for one in acks))


def _acks(job: JobView, slot: Slot, *, generation: bool, instance: bool) -> Any:
    ack = job.acks.get(slot.node)
    if ack is None or (generation and ack.generation != job.current.generation):
        return None
    if instance and ack.incarnation != slot.incarnation:
        return None
    by_rank = {one.rank: one for one in ack.ranks}
    found: list[RankAck] = []
    for local, rank in enumerate(slot.ranks):
        one = by_rank.get(job.job.spec.rank(slot.slot, local))
        if one is None or (instance and rank.instance and one.instance != rank.instance):
            return None
        found.append(one)
    return tuple(found)


def stale_acks(patch: pytest.MonkeyPatch) -> None:
    """An ack of any generation counts."""

    def acks(job: JobView, slot: Slot) -> Any:
        return _acks(job, slot, generation=False, instance=True)

    patch.setattr(holders, "acks", acks)


def any_instance(patch: pytest.MonkeyPatch) -> None:
    """Whatever trainer has ended on a slot's node, it is the one that the slot means."""

    def ended(view: Any, job: JobView, slot: Slot) -> dict[int, TrainerExit]:
        live = view.nodes.get(slot.node)
        trainers = () if live is None else live.record.trainers
        return {one.local_rank: one.exit for one in trainers if one.exit is not None}

    patch.setattr(holders, "ended", ended)


def what_changed(patch: pytest.MonkeyPatch) -> None:
    """A node sees to the trainers of its slot only if the record says that the slot has changed."""

    def trusting(orders: Any, local: Any, state: Any, limits: Any) -> Any:
        if isinstance(state, Owner) and state.slot.slot not in state.generation.changed_slots:
            return iter(())
        return processes(orders, local, state, limits)

    patch.setattr(decide, "processes", trusting)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A leader's write is guarded by nothing."""
    build = transactions.build

    def unguarded(action: Any, context: Any) -> Any:
        return tuple(replace(one, guards=()) for one in build(action, context))

    patch.setattr(transactions, "build", unguarded)


def last_holder(patch: pytest.MonkeyPatch) -> None:
    """Whoever misses a deadline is lost, whatever it alone holds."""
    patch.setattr(holders, "held_elsewhere", lambda *_: True)


def loose_freeze(patch: pytest.MonkeyPatch) -> None:
    """An update may begin although a stop has been taken."""
    may_update = phases.may_update

    def loose(standing: phases.Standing, agreed: bool, stop_after: bool = False) -> phases.Verdict:
        if not agreed:
            return may_update(standing, agreed)
        verdict = may_update(standing._replace(stopped=standing.joined), agreed, stop_after)
        late = verdict.standing._replace(stopped=standing.stopped)
        return phases.Verdict(verdict.do, late, verdict.reason)

    patch.setattr(phases, "may_update", loose)


def joins_empty(patch: pytest.MonkeyPatch) -> None:
    """A rank joins before its state is there."""

    def holds(standing: phases.Standing, generation: int) -> phases.Verdict:
        return phases.Verdict(phases.Do.GO, standing, "it will come")

    patch.setattr(phases, "holds", holds)


def open_streams(patch: pytest.MonkeyPatch) -> None:
    """A source serves whenever it is asked."""

    def may_serve(standing: phases.Standing, *_: int) -> phases.Verdict:
        there = standing.phase is not Stage.EMPTY
        return phases.Verdict(phases.Do.GO if there else phases.Do.WAIT, standing, "anybody")

    patch.setattr(phases, "may_serve", may_serve)


def older_streams(patch: pytest.MonkeyPatch) -> None:
    """A source that is stopped anew leaves the streams of before open."""
    may_serve = phases.may_serve

    def left_open(standing: phases.Standing, generation: int, step: int) -> phases.Verdict:
        if standing.stopped > generation and standing.phase is not Stage.EMPTY:
            return phases.Verdict(phases.Do.GO, standing, "it has begun")
        return may_serve(standing, generation, step)

    patch.setattr(phases, "may_serve", left_open)


def no_agreement(patch: pytest.MonkeyPatch) -> None:
    """A rank updates as soon as its own gradients are whole."""
    may_update = phases.may_update

    def loose(standing: phases.Standing, agreed: bool, stop_after: bool = False) -> phases.Verdict:
        return may_update(standing, True, stop_after)

    patch.setattr(phases, "may_update", loose)


def no_replica_agreement(patch: pytest.MonkeyPatch) -> None:
    """The agreement runs along the DP group alone."""
    init = System.__init__

    def alone(system: System, shape: Shape) -> None:
        init(system, shape)
        system.replica = [[rank] for rank in range(shape.spec.ranks)]

    patch.setattr(System, "__init__", alone)


def no_restore_deadline(patch: pytest.MonkeyPatch) -> None:
    """RESTORE has no deadline."""
    _deadline_only_in(patch, Phase.PAUSE)


def no_pause_deadline(patch: pytest.MonkeyPatch) -> None:
    """PAUSE has no deadline."""
    _deadline_only_in(patch, Phase.RESTORE)


def _deadline_only_in(patch: pytest.MonkeyPatch, phase: Phase) -> None:
    of_deadlines = deaths.of_deadlines

    def some(view: Any, job: JobView, now: float, settings: Any, judged: Any) -> Any:
        if job.current.phase is phase:
            yield from of_deadlines(view, job, now, settings, judged)

    patch.setattr(deaths, "of_deadlines", some)


def no_regroup(patch: pytest.MonkeyPatch) -> None:
    """A broken group without a culprit stays as it is."""
    patch.setattr(recover, "broken", lambda *_: None)


def ends_early(patch: pytest.MonkeyPatch) -> None:
    """FINISHED is recorded once the first rank is done."""

    def finished(job: JobView) -> Transition | None:
        for node in job.progress.values():
            if any(one.phase is StepPhase.DONE for one in node.ranks):
                return membership.ended(job, Phase.FINISHED, "one is done")
        return None

    patch.setattr(recover, "finished", finished)


def leaves_early(patch: pytest.MonkeyPatch) -> None:
    """A rank that has done its last step is released without waiting for the others."""

    def release(orders: Any, local: Any, trainer: Any) -> Any:
        if trainer.done_step is not None and trainer.released_at is None:
            yield SendRelease(trainer.instance, trainer.done_step, "it is done")

    patch.setattr(steering, "_release", release)


def no_boundary(patch: pytest.MonkeyPatch) -> None:
    """A planned change doesn't wait for a step's boundary."""
    patch.setattr(boundary, "reached", lambda *_: True)


def last_holder_judged(patch: pytest.MonkeyPatch) -> None:
    """A node is judged by what others see of it, although only it holds a state (rule 8)."""
    patch.setattr(evidence, "_last_holder", lambda *_: False)


def lives_on(patch: pytest.MonkeyPatch) -> None:
    """A node doesn't look whether it has been recorded dead."""

    def blind(orders: Any, local: Any) -> Any:
        if orders is not None:
            orders = replace(orders, flags=replace(orders.flags, dead=()))
        return standing.standing(orders, local)

    patch.setattr(decide, "standing", blind)


def _of(shape: str, *kinds: str, **more: Any) -> Shape:
    return replace(checks.with_faults(checks.CONFIGURATIONS[shape], *kinds), **more)


DIFFERENT = "would go on from different s"
MUTATIONS = (
    Mutation("fence dropped", no_fence, "the record goes from", _of("3 x 1", "crash", "lead")),
    Mutation("stale ack taken", stale_acks, "of another generation", _of("3 x 1", "crash")),
    Mutation("S is the lowest", lowest_step, "can't reach", _of("3 x 1", "crash")),
    Mutation("freeze not atomic", loose_freeze, "after it has ack", _of("3 x 1", "crash")),
    Mutation("instance ignored", any_instance, "FAILED", _of("3 x 1", "trainer", spares=0)),
    Mutation(
        "what changed trusted",
        what_changed,
        "well, and given",
        _of("3 x 1", "trainer", "trainer", spares=0),
    ),
    Mutation("joined before loaded", joins_empty, DIFFERENT, _of("3 x 1", "crash")),
    Mutation(
        "older stream left open",
        older_streams,
        "under the pull",
        _of("3 x 1", "crash", "misjudge", replicas=2, spares=2),
    ),
    Mutation("served by anybody", open_streams, DIFFERENT, _of("3 x 1", "crash")),
    Mutation("agreement dropped: DP", no_agreement, "were not PREPARED", _of("3 x 1")),
    Mutation("agreement dropped: replica", no_replica_agreement, "were not PREPARED", _of("2 x 2")),
    Mutation(
        "last holder freed",
        last_holder,
        "last holder",
        _of("3 x 1", "crash", "verdict", replicas=2),
    ),
    Mutation(
        "deadline of RESTORE dropped", no_restore_deadline, "no end", _of("3 x 1", "crash", "hang")
    ),
    Mutation("deadline of PAUSE dropped", no_pause_deadline, "no end", _of("3 x 1", "mute")),
    Mutation("end not held", leaves_early, "LOST, although", _of("3 x 1")),
    Mutation("FINISHED early", ends_early, "FINISHED, but rank", _of("3 x 1")),
    Mutation("no regrouping", no_regroup, "no end", _of("3 x 1", "glitch")),
    Mutation(
        "last holder judged",
        last_holder_judged,
        "the last holder",
        _of("2 x 2", "crash", "misjudge"),
    ),
    Mutation("boundary ignored", no_boundary, "in vain", _of("3 x 1", "drain")),
    Mutation(
        "own death ignored",
        lives_on,
        "every node is well",
        _of("3 x 1", "mute", replicas=2, spares=0),
    ),
)
