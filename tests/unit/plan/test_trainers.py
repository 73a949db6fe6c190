# SPDX-License-Identifier: Apache-2.0
"""What follows when a trainer has ended on a node that is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.model import (
    Cause,
    FailureClass,
    JobView,
    Phase,
    RankExit,
    SlotRank,
    StepPhase,
    Trainer,
    TrainerExit,
    TrainerState,
)
from coordinator.plan import Transition
from tests.unit.plan.views import (
    JOB,
    acked,
    cluster,
    ended,
    fresh,
    instance,
    node,
    of,
    open_incident,
    running,
    said,
    spec,
    the,
)


def test_a_hot_spare_takes_the_slot() -> None:
    view = ended(cluster(running(spec()), nodes=[node("z", hot=True)]), 1, signal=9)
    change = the(Transition, view)
    assert [(one.slot, one.node) for one in change.slots] == [(1, "z")]
    assert change.unassign == ("n1",)
    assert change.generation.restarts == 1
    assert change.incident is not None
    assert change.incident.cause is Cause.TRAINER_ENDED
    assert change.incident.nodes == ("n1",)
    assert "rank 1 was ended by signal 9 on n1 -> hot spare z" in change.reason


def test_without_a_hot_spare_it_is_restarted_where_it_was() -> None:
    view = ended(cluster(running(spec()), nodes=[node("z")]), 1, code=3)
    change = the(Transition, view)
    (slot,) = change.slots
    assert (slot.node, slot.incarnation, slot.ranks) == ("n1", "n1-0", (SlotRank("", 5),))
    assert not change.assign
    assert not change.unassign
    assert "rank 1 exited with code 3 on n1, restarted there" in change.reason


def test_an_unhealthy_node_is_left_even_for_a_cold_spare() -> None:
    view = cluster(running(spec()), nodes=[node("z"), node("n1", unhealthy="ECC errors")])
    change = the(Transition, ended(view, 1))
    assert [(one.slot, one.node) for one in change.slots] == [(1, "z")]


def test_the_restarted_one_is_not_counted_twice() -> None:
    view = ended(cluster(running(spec())), 1)
    change = the(Transition, view)
    job = view.jobs[JOB]
    slots = {**job.slots, 1: change.slots[0]}
    after = replace(view, jobs={JOB: replace(job, generation=change.generation, slots=slots)})
    assert of(Transition, after) == []


def test_an_instance_that_no_slot_names_is_nothing() -> None:
    view = ended(cluster(running(spec())), 1)
    live = view.nodes["n1"]
    (over,) = live.record.trainers
    for stranger in (
        replace(over, instance="another"),
        replace(over, job="other"),
        replace(over, state=TrainerState.PLACED),
        replace(over, local_rank=5),
    ):
        record = replace(live.record, trainers=(stranger,))
        nodes = {**view.nodes, "n1": replace(live, record=record)}
        assert of(Transition, replace(view, nodes=nodes)) == []


def test_before_a_restore_the_trainer_is_told_by_its_generation() -> None:
    view = cluster(fresh(running(spec(), 5, Phase.PAUSE), 1, "z"))
    assert (
        "rank 1 exited with code 1 on z, restarted there" in the(Transition, ended(view, 1)).reason
    )
    live = view.nodes["z"]
    hot = Trainer("s", 0, TrainerState.ENDED, JOB, 7, 0, TrainerExit(1))
    record = replace(live.record, trainers=(hot,))
    nodes = {**view.nodes, "z": replace(live, record=record)}
    assert of(Transition, replace(view, nodes=nodes)) == []


def test_another_incarnations_word_counts_for_nothing() -> None:
    view = ended(cluster(running(spec())), 1)
    live = view.nodes["n1"]
    record = replace(live.record, incarnation="n1-1")
    view = replace(view, nodes={**view.nodes, "n1": replace(live, record=record)})
    assert of(Transition, view) == []


def test_too_many_restarts_fail_the_job_with_the_exits_message() -> None:
    job = open_incident(running(spec(restarts=2)), "detected")
    job = replace(job, generation=replace(job.current, restarts=2))
    change = the(Transition, ended(cluster(job, nodes=[node("z", hot=True)]), 1))
    assert change.generation.phase is Phase.FAILED
    assert change.generation.generation == 4
    assert "rank 1 on n1 exited with code 1" in change.generation.reason
    assert "3 trainers have ended, restarts allows 2" in change.generation.reason
    assert change.generation.reason.endswith("Traceback: boom")
    assert change.incident is not None
    assert change.incident.closed
    assert [one.phase for one in change.incident.marks] == ["detected", "failed"]


def test_several_in_one_pass_count_each() -> None:
    view = ended(ended(cluster(running(spec(restarts=1))), 0), 1)
    assert the(Transition, view).generation.phase is Phase.FAILED
    view = ended(ended(cluster(running(spec(restarts=2))), 0), 1)
    assert the(Transition, view).generation.restarts == 2


def test_restarts_are_kept_over_generations() -> None:
    job = running(spec())
    job = replace(job, generation=replace(job.current, restarts=2))
    assert the(Transition, cluster(job, dead=["n1"])).generation.restarts == 2


class TestNodesOfSeveralRanks:
    """A node with a living holder of state goes only if somebody else holds the same."""

    def test_the_other_ranks_stay_when_one_restarts(self) -> None:
        job = running(spec(4, 1, 2))
        (slot,) = the(Transition, ended(cluster(job), 1, 1)).slots
        assert slot.ranks == (SlotRank(instance(1, 0), 1), SlotRank("", 5))

    def test_it_moves_while_another_node_holds_its_positions(self) -> None:
        view = ended(cluster(running(spec(4, 1, 2)), nodes=[node("z", hot=True)]), 0)
        assert [(one.slot, one.node) for one in the(Transition, view).slots] == [(0, "z")]

    def test_the_last_holder_is_not_moved(self) -> None:
        view = ended(cluster(running(spec(2, 1, 2)), nodes=[node("z", hot=True)]), 0)
        assert [(one.slot, one.node) for one in the(Transition, view).slots] == [(0, "n0")]

    def test_two_in_one_pass_do_not_give_up_all_holders_together(self) -> None:
        hot = [node("y", hot=True), node("z", hot=True)]
        view = ended(ended(cluster(running(spec(4, 1, 2)), nodes=hot), 0), 1)
        change = the(Transition, view)
        assert {one.slot: one.node for one in change.slots} == {0: "y", 1: "n1"}
        assert change.slots[1].ranks == (SlotRank("", 5), SlotRank(instance(1, 1), 1))

    def test_the_holders_on_a_lost_node_count_for_nothing(self) -> None:
        hot = [node("y", hot=True), node("z", hot=True)]
        view = cluster(running(spec(4, 1, 2)), nodes=hot, dead=["n1"])
        change = the(Transition, ended(view, 0))
        assert {one.slot: one.node for one in change.slots} == {0: "n0", 1: "y"}

    def test_one_that_pulled_since_its_ack_holds_state(self) -> None:
        """The ack says EMPTY as long as the generation lasts; the progress knows better."""
        job = running(spec(4, 1, 2))
        job = acked(job, 1, StepPhase.EMPTY)
        assert (
            the(Transition, ended(cluster(job, nodes=[node("z", hot=True)]), 0)).slots[0].node
            == "z"
        )
        alone = cluster(job, nodes=[node("y", hot=True), node("z", hot=True)], dead=["n0"])
        change = the(Transition, ended(alone, 1))
        assert {one.slot: one.node for one in change.slots} == {0: "y", 1: "n1"}

    def test_one_whose_pull_is_not_known_to_be_over_is_no_holder(self) -> None:
        job = running(spec(4, 1, 2), phase=Phase.RESTORE)
        job = said(acked(job, 1, StepPhase.EMPTY), 1, generation=0, restored=0, step=-1)
        view = ended(cluster(acked(job, 0), nodes=[node("z", hot=True)]), 0)
        assert the(Transition, view).slots[0].node == "n0"

    def test_only_the_same_position_counts(self) -> None:
        """Two positions, each held by two of four nodes."""
        hot = [node("z", hot=True)]
        job: JobView = running(spec(2, 2, 1))
        view = ended(cluster(job, nodes=hot, dead=["n0"]), 1)
        change = the(Transition, view)
        assert {one.slot: one.node for one in change.slots} == {0: "z", 1: "n1"}


FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 7, in <module>\n'
RAISED: dict[str, Any] = {
    "code": 1,
    "failure_class": FailureClass.SOFTWARE,
    "cause": "ValueError: no data at 0x7f01",
    "traceback": FRAMES + "ValueError: no data at 0x7f01",
    "step": 4,
}


def raised_before(**other: Any) -> JobView:
    """A job whose rank 1 has raised, in an incident that is still open."""
    exit_ = TrainerExit(**(RAISED | {"cause": "ValueError: no data at 0x7f99"} | other))
    return open_incident(running(spec()), "detected", exits=(RankExit(1, "n1", "before", exit_),))


class TestTheSameErrorAgain:
    def test_it_ends_the_job_with_the_traceback(self) -> None:
        view = ended(cluster(raised_before(), nodes=[node("z", hot=True)]), 1, **RAISED)
        change = the(Transition, view)
        assert change.generation.phase is Phase.FAILED
        assert "rank 1 on n1 exited with code 1 (software: ValueError" in change.generation.reason
        assert "for the second time, and would again" in change.generation.reason
        assert change.generation.reason.endswith(RAISED["traceback"])

    @pytest.mark.parametrize(
        "other",
        [
            {"step": 3},
            {"cause": "KeyError: 1"},
            {"traceback": FRAMES.replace("line 7", "line 8")},
            {"traceback": "", "failure_class": FailureClass.UNKNOWN},
            {"failure_class": FailureClass.NETWORK},
        ],
    )
    def test_another_end_is_none(self, other: dict[str, Any]) -> None:
        view = ended(cluster(raised_before(**other), nodes=[node("z", hot=True)]), 1, **RAISED)
        assert the(Transition, view).generation.phase is Phase.PAUSE

    def test_nor_is_another_ranks(self) -> None:
        view = ended(cluster(raised_before(), nodes=[node("z", hot=True)]), 2, **RAISED)
        assert the(Transition, view).generation.phase is Phase.PAUSE

    def test_nor_is_one_before_a_committed_step(self) -> None:
        job = raised_before()
        assert job.incident is not None
        job = replace(job, incident=replace(job.incident, closed=True))
        view = ended(cluster(job, nodes=[node("z", hot=True)]), 1, **RAISED)
        assert the(Transition, view).generation.phase is Phase.PAUSE


def test_an_incident_keeps_how_its_trainers_ended() -> None:
    view = ended(cluster(running(spec()), nodes=[node("z", hot=True)]), 1, **RAISED)
    change = the(Transition, view)
    assert change.incident is not None
    old = view.jobs[JOB].slots[1].ranks[0].instance
    assert change.incident.exits == (RankExit(1, "n1", old, TrainerExit(**RAISED)),)
    assert "rank 1 exited with code 1 (software: ValueError: no data" in change.reason


@pytest.mark.parametrize("failure", [FailureClass.DEVICE, FailureClass.HOST])
def test_what_another_node_may_not_have_is_left_even_for_a_cold_spare(
    failure: FailureClass,
) -> None:
    view = ended(cluster(running(spec()), nodes=[node("z")]), 1, code=1, failure_class=failure)
    assert [(one.slot, one.node) for one in the(Transition, view).slots] == [(1, "z")]
    alone = ended(cluster(running(spec())), 1, code=1, failure_class=failure)
    assert "restarted there" in the(Transition, alone).reason


def test_who_was_ended_by_its_own_script_is_not_lost_but_has_failed() -> None:
    job = running(spec(replicas=1), 5, Phase.PAUSE)
    exits = (RankExit(0, "n0", "before", TrainerExit(**RAISED)),)
    job = open_incident(fresh(job, 0, "n0"), "detected", exits=exits)
    job = acked(job, 0, StepPhase.EMPTY)
    change = the(Transition, cluster(job))
    assert change.generation.phase is Phase.FAILED
    assert "no living trainer holds shard positions 0" in change.generation.reason
    assert change.generation.reason.endswith(RAISED["traceback"])
