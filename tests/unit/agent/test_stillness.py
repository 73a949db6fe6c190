# SPDX-License-Identifier: Apache-2.0
"""A rank that stands still: when its stacks are asked for, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import Phase, RankProgress, StepPhase
from tests.unit.agent.builders import decided, kinds, local, orders, trainer
from workerd.agent import actions as do
from workerd.agent.state import Limits, TrainerFacts

TOLD = orders(Phase.RUNNING, instance="t")
STILL = Limits().still
RUNNING = trainer(
    step=5, phase=StepPhase.COMPUTING, joined=1, restored=1, running_sent=1, moved_at=100.0
)
SEEN = replace(RUNNING, stacks_asked_at=100.0 + STILL, stacks="in go()")


def reported(facts: TrainerFacts, after: float, **here: object) -> RankProgress:
    (write,) = decided(TOLD, local(facts, now=100.0 + after, **here), do.WriteProgress)
    assert isinstance(write, do.WriteProgress)
    return write.progress.ranks[0]


def test_its_stacks_are_asked_for_once() -> None:
    assert kinds(TOLD, local(RUNNING, now=100.0 + STILL - 0.1)) == []
    assert kinds(TOLD, local(RUNNING, now=100.0 + STILL)) == ["AskStacks"]
    assert kinds(TOLD, local(SEEN, now=100.0 + STILL)) == []
    moved = replace(SEEN, moved_at=150.0)
    assert kinds(TOLD, local(moved, now=150.0 + STILL)) == ["AskStacks"]


@pytest.mark.parametrize(
    "facts",
    [{"joined": 0}, {"moved_at": 0.0}, {"excused_until": 1000.0}, {"instance": "another"}],
)
def test_not_of_one_that_may_rest(facts: dict[str, object]) -> None:
    rests = replace(RUNNING, **facts)  # type: ignore[arg-type]
    assert "AskStacks" not in kinds(TOLD, local(rests, now=500.0))


def test_not_outside_of_running() -> None:
    for phase in (Phase.PAUSE, Phase.RESTORE):
        told = orders(phase, instance="t")
        assert "AskStacks" not in kinds(told, local(RUNNING, now=500.0))


def test_three_usual_steps_are_no_standstill() -> None:
    for after, asked in ((59.0, []), (60.0, ["AskStacks"])):
        assert kinds(TOLD, local(RUNNING, now=100.0 + after, step_seconds=20.0)) == asked


@pytest.mark.parametrize(
    ("facts", "waiting"),
    [
        ({}, False),
        ({"phase": StepPhase.UPDATING}, False),
        ({"waiting": 1}, True),
        ({"phase": StepPhase.PREPARED}, True),
        ({"done_step": 6, "digest": "d"}, True),
    ],
)
def test_what_is_said_of_it(facts: dict[str, object], waiting: bool) -> None:
    one = reported(replace(SEEN, **facts), STILL)  # type: ignore[arg-type]
    assert (one.still, one.waiting, one.excused) == (True, waiting, False)
    assert one.stacks == ("" if waiting else "in go()")


def test_nothing_is_said_before_its_stacks_are_there_or_once_it_moves() -> None:
    asked = replace(SEEN, stacks=None)
    for facts, after in ((RUNNING, STILL), (asked, STILL), (replace(SEEN, moved_at=150.0), 60.0)):
        one = reported(facts, after)
        assert (one.still, one.waiting, one.stacks) == (False, False, "")


def test_one_that_is_excused_says_so() -> None:
    one = reported(replace(RUNNING, excused_until=200.0), STILL)
    assert (one.still, one.excused) == (False, True)
    assert not reported(replace(RUNNING, excused_until=200.0), STILL - 1).excused
    assert not reported(replace(SEEN, excused_until=150.0), 50.0).excused


def test_the_stacks_are_bounded() -> None:
    assert len(reported(replace(SEEN, stacks="x" * 9000), STILL).stacks) == 4000
