# SPDX-License-Identifier: Apache-2.0
"""The simulation bites: with a rule of the protocol dropped, it finds what goes wrong.

Each mutation patches the production rule, and must be caught within a few hundred short runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from coordinator.controller import transactions
from coordinator.model import JobView, Phase, RankAck, Slot, StepPhase
from coordinator.plan import arrange, boundary, deaths, holders, membership, recover
from coordinator.plan.actions import Transition, Wait
from tests.sim import drive, leaders, trainers
from tests.sim.drive import Plan, Shape, run
from tests.sim.world import Violation
from workerd.protocol import phases

Patch = Callable[[pytest.MonkeyPatch], None]
RUNS = 600


@dataclass(frozen=True)
class Mutation:
    """A dropped rule, and the runs that show why it is there."""

    name: str
    patch: Patch
    says: str
    faults: tuple[str, ...]
    shape: Shape = Shape()
    mend: bool = True
    from_start: bool = False


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
    patch.setattr(
        holders, "acks", lambda job, slot: _acks(job, slot, generation=False, instance=True)
    )


def last_holder(patch: pytest.MonkeyPatch) -> None:
    """Whoever misses a deadline is lost, whatever it alone holds."""
    patch.setattr(holders, "held_elsewhere", lambda *_: True)


def runs_early(patch: pytest.MonkeyPatch) -> None:
    """RUNNING is recorded once the first rank has joined."""

    def restoring(job: JobView) -> Transition | Wait:
        number = job.current.generation
        if not any(
            one.generation == number for node in job.progress.values() for one in node.ranks
        ):
            return Wait("job", "nobody has joined")
        return Transition(
            replace(job.current, phase=Phase.RUNNING, last_running_generation=number), "early"
        )

    patch.setattr(recover, "restoring", restoring)


def ends_early(patch: pytest.MonkeyPatch) -> None:
    """FINISHED is recorded once the first rank is done."""

    def finished(job: JobView) -> Transition | None:
        for node in job.progress.values():
            if any(one.phase is StepPhase.DONE for one in node.ranks):
                return membership.ended(job, Phase.FINISHED, "one is done")
        return None

    patch.setattr(recover, "finished", finished)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A leader's write is guarded by nothing."""
    build = transactions.build

    def unguarded(action: Any, context: Any) -> Any:
        return tuple(replace(one, guards=()) for one in build(action, context))

    patch.setattr(leaders, "build", unguarded)


def joins_empty(patch: pytest.MonkeyPatch) -> None:
    """A rank joins before its state is there."""
    patch.setattr(
        phases,
        "holds",
        lambda standing, generation: phases.Verdict(phases.Do.GO, standing, "it will come"),
    )


def no_agreement(patch: pytest.MonkeyPatch) -> None:
    """A rank updates as soon as its own gradients are whole."""
    entered = trainers._entered
    patch.setattr(
        trainers,
        "_entered",
        lambda network, number, ranks, level: (
            level % 3 != 0 or entered(network, number, ranks, level)
        ),
    )


def no_replica_agreement(patch: pytest.MonkeyPatch) -> None:
    """The agreement runs along the DP group alone."""
    entered = trainers._entered
    patch.setattr(
        trainers,
        "_entered",
        lambda network, number, ranks, level: (
            (level % 3 == 1 and len(list(ranks)) == 2) or entered(network, number, ranks, level)
        ),
    )


def no_restore_deadline(patch: pytest.MonkeyPatch) -> None:
    """RESTORE has no deadline."""
    of_deadlines = deaths.of_deadlines

    def only_pause(view: Any, job: JobView, now: float, settings: Any, judged: Any) -> Any:
        if job.current.phase is Phase.PAUSE:
            yield from of_deadlines(view, job, now, settings, judged)

    patch.setattr(deaths, "of_deadlines", only_pause)


def no_regroup(patch: pytest.MonkeyPatch) -> None:
    """A broken group without a culprit stays as it is."""
    patch.setattr(recover, "broken", lambda *_: None)


def reserves_freed(patch: pytest.MonkeyPatch) -> None:
    """The rest of a broken replica is freed at once."""
    result = arrange._Arranging._result

    def without(self: Any, chosen: list[int]) -> Any:
        members = {one for block in chosen for one in self.slots(block)}
        self.stay = {one: slot for one, slot in self.stay.items() if one in members}
        return result(self, chosen)

    patch.setattr(arrange._Arranging, "_result", without)


def reserves_stay_out(patch: pytest.MonkeyPatch) -> None:
    """A reserve never takes the place of an owner that holds nothing, and serves nobody."""
    patch.setattr(arrange._Arranging, "_keep_holders", lambda *_: None)
    patch.setattr(recover, "_following", lambda *_: [])


def open_streams(patch: pytest.MonkeyPatch) -> None:
    """A source serves whenever it is asked."""
    patch.setattr(
        phases,
        "may_serve",
        lambda standing, *_: phases.Verdict(
            phases.Do.IGNORE if standing.phase == 0 else phases.Do.GO, standing, "anybody"
        ),
    )


def no_boundary(patch: pytest.MonkeyPatch) -> None:
    """A planned change stops ranks wherever they are."""
    patch.setattr(boundary, "at", lambda job, change: change)


def leavers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Who leaves is gone at once, with the state that it has come to."""
    patch.setattr(holders, "leavers", lambda view, job: [])


MUTATIONS = (
    Mutation("lowest step", lowest_step, "can't reach the resume step", ("crash",)),
    Mutation("stale acks", stale_acks, "LOST|is named by an ack of generation", ("crash", "crash")),
    Mutation(
        "last holder given up",
        last_holder,
        "is given up, the last holder",
        ("hang", "crash"),
        Shape(2),
    ),
    Mutation("RUNNING early", runs_early, "RUNNING, but only ranks", ("crash",)),
    Mutation("FINISHED early", ends_early, "FINISHED, but rank", ()),
    Mutation("no guard at all", no_fence, "the record goes from", ("crash", "lead")),
    Mutation(
        "join before the state is there", joins_empty, "would go on from different s", ("crash",)
    ),
    Mutation("no agreement", no_agreement, "but only .* were PREPARED", ("crash",)),
    Mutation(
        "no agreement along the replica",
        no_replica_agreement,
        "but only .* were PREPARED",
        ("crash",),
        Shape(2, 2),
    ),
    Mutation(
        "no deadline of RESTORE", no_restore_deadline, "no end: RESTORE", ("hang",), from_start=True
    ),
    Mutation(
        "reserves freed at once",
        reserves_freed,
        "LOST .* has a living holder",
        ("crash", "trainer"),
        Shape(2, 2, spares=0, fewest=1),
        mend=False,
    ),
    Mutation(
        "reserves stay out",
        reserves_stay_out,
        "LOST .* has a living holder",
        ("crash", "trainer"),
        Shape(2, 2, spares=0, fewest=1),
        mend=False,
    ),
    Mutation("no boundary", no_boundary, "a planned change costs", ("drain",), Shape(steps=6)),
    Mutation(
        "who leaves is forgotten",
        leavers_forgotten,
        "a planned change costs|LOST",
        ("drain",),
        Shape(steps=6),
        mend=False,
    ),
    Mutation("no regrouping", no_regroup, "no end: RUNNING", ("glitch",)),
    Mutation(
        "streams stay open",
        open_streams,
        "would go on from different s|changed under the pull",
        ("crash", "glitch"),
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_dropped_rule_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(7):
        drive.running(mutation.shape, seed)  # before the rule goes
    mutation.patch(monkeypatch)
    plan = Plan(mutation.faults, mutation.mend, mutation.from_start)

    def many_runs() -> None:
        for seed in range(RUNS):
            run(mutation.shape, plan, seed)

    with pytest.raises(Violation, match=mutation.says):
        many_runs()
