# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when a running job stands still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import Cause, JobView, Phase, StepPhase
from coordinator.plan import Transition, hang
from tests.unit.plan.views import (
    SETTINGS,
    cluster,
    node,
    of,
    running,
    said,
    spec,
    the,
)

LONG = SETTINGS.hang + 1


def still(job: JobView, number: int, *, waiting: bool = True, stacks: str = "") -> JobView:
    """With an owner that says of its ranks that they stand still."""
    return at_one_second(
        said(
            job,
            number,
            generation=4,
            step=5,
            restored=4,
            still=True,
            waiting=waiting,
            stacks=stacks,
        )
    )


def at_one_second(job: JobView, seconds: float = 1.0) -> JobView:
    """With steps that usually take so long."""
    records = {name: replace(one, step_seconds=seconds) for name, one in job.progress.items()}
    return replace(job, progress=records)


def hung(job: JobView | None = None) -> JobView:
    """Two wait for the second of three."""
    job = running(spec()) if job is None else job
    return still(still(still(job, 0), 2), 1, waiting=False, stacks="in go()")


def test_who_does_not_wait_is_replaced_by_a_hot_spare() -> None:
    change = the(Transition, cluster(hung(), nodes=[node("z", hot=True)]), now=LONG)
    assert [(one.slot, one.node) for one in change.slots] == [(1, "z")]
    assert change.unassign == ("n1",)
    assert change.generation.restarts == 1
    assert change.incident is not None
    assert change.incident.cause is Cause.NO_PROGRESS
    (one,) = change.incident.exits
    assert (one.rank, one.node, one.exit.traceback) == (1, "n1", "in go()")
    assert f"hung in COMPUTING(5) for {LONG:.0f} s" in change.reason


def test_without_a_spare_its_trainer_is_started_again() -> None:
    change = the(Transition, cluster(hung()), now=LONG)
    (slot,) = change.slots
    assert (slot.slot, slot.node, slot.ranks[0].since) == (1, "n1", 5)
    assert not change.unassign


@pytest.mark.parametrize("number", [0, 1, 2])
def test_not_while_one_says_nothing(number: int) -> None:
    moving = said(hung(), number, generation=4, step=5)
    assert of(Transition, cluster(moving), now=LONG) == []
    earlier = at_one_second(said(hung(), number, generation=3, step=5, still=True))
    assert of(Transition, cluster(earlier), now=LONG) == []


def test_not_when_nobody_waits() -> None:
    """All of them write a checkpoint, say."""
    job = running(spec())
    for number in range(3):
        job = still(job, number, waiting=False)
    view = cluster(job)
    assert hang.find(view, job, LONG, SETTINGS) is None
    assert of(Transition, view, now=LONG) == []


def test_when_all_wait_for_each_other_the_group_is_built_anew() -> None:
    job = running(spec())
    for number in range(3):
        job = still(job, number)
    change = the(Transition, cluster(job), now=LONG)
    assert (change.slots, change.generation.regroups) == ((), 1)
    assert "all ranks have waited for each other" in change.reason


@pytest.mark.parametrize(
    ("usual", "after"),
    [
        (0.0, SETTINGS.hang_max),
        (0.1, SETTINGS.hang),
        (30.0, 300.0),
        (900.0, SETTINGS.hang_max),
    ],
)
def test_how_long_goes_by_the_jobs_usual_step(usual: float, after: float) -> None:
    view = cluster(at_one_second(hung(), usual))
    assert of(Transition, view, now=after - 0.1) == []
    assert the(Transition, view, now=after).generation.phase is Phase.PAUSE


def test_the_last_holder_is_never_ended() -> None:
    job = still(hung(running(spec(2, 2))), 3)
    assert [one.slot for one in the(Transition, cluster(job), now=LONG).slots] == [1]
    alone = still(job, 3, waiting=False)
    assert of(Transition, cluster(alone), now=LONG) == [], "both that hold position 1 hang"


def test_who_hangs_in_its_update_is_told_from_those_that_wait_for_its_next_step() -> None:
    job = still(still(running(spec()), 0), 2)
    job = said(job, 1, generation=4, step=5, phase=StepPhase.UPDATING, still=True)
    job = at_one_second(job)
    change = the(Transition, cluster(job), now=LONG)
    assert "hung in UPDATING(5)" in change.reason


def test_a_job_that_is_excused_is_not_paused() -> None:
    job = said(running(spec()), 1, generation=4, step=5, excused=True)
    assert of(Transition, cluster(job), now=SETTINGS.progress + 1) == []
    assert of(Transition, cluster(running(spec())), now=SETTINGS.progress + 1) != []
