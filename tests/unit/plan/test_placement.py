# SPDX-License-Identifier: Apache-2.0
"""Who gets a slot, and who is kept warm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    ClusterView,
    Generation,
    Job,
    JobState,
    JobStatus,
    JobView,
    NodeFlags,
    Phase,
    Slot,
    SlotRank,
    Trainer,
    TrainerState,
)
from coordinator.plan import KeepWarm, Transition, Unassign, UpdateStatus, Wait
from tests.unit.plan.views import (
    JOB,
    acked,
    cluster,
    emptied,
    ended,
    fresh,
    node,
    none,
    of,
    running,
    spec,
    the,
)


def waiting(**more: int) -> JobView:
    return JobView(job=Job(spec=spec(**more), spec_revision=7))


class TestStart:
    def test_every_slot_gets_a_node_and_its_assignment(self) -> None:
        view = cluster(waiting(), nodes=[node(f"n{number}") for number in range(4)])
        start = the(Transition, view)
        assert start.generation.generation == 1
        assert start.generation.phase is Phase.PAUSE
        assert start.generation.rendezvous_slots == (0, 1, 2)
        assert start.generation.incident == ""
        assert start.incident is None
        assert [(one.slot, one.node, one.incarnation) for one in start.slots] == [
            (0, "n0", "n0-0"),
            (1, "n1", "n1-0"),
            (2, "n2", "n2-0"),
        ]
        assert all(one.ranks == (SlotRank("", 1),) for one in start.slots)
        assert [(one.node, one.job, one.slot) for one in start.assign] == [
            ("n0", JOB, 0),
            ("n1", JOB, 1),
            ("n2", JOB, 2),
        ]

    def test_too_few_nodes(self) -> None:
        nodes = [node("n0"), node("n1", unhealthy="its disk is full"), node("n2", devices=1)]
        view = cluster(waiting(ranks_per_node=1), nodes=nodes)
        assert (
            "needs 3 nodes, 2 are free (n1: unhealthy: its disk is full)" in the(Wait, view).reason
        )
        status = the(UpdateStatus, view).status
        assert status.state is JobState.WAITING
        assert "needs 3 nodes" in status.reason

    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            (NodeFlags(cordoned="a test"), "cordoned: a test"),
            (NodeFlags(draining="maintenance"), "draining: maintenance"),
            (NodeFlags(quarantined="flaky"), "quarantined: flaky"),
        ],
    )
    def test_flagged_nodes_get_nothing(self, flags: NodeFlags, why: str) -> None:
        view = cluster(waiting(), nodes=[node("n0"), node("n1"), node("n2")])
        view = replace(view, flags={"n1": flags})
        assert f"n1: {why}" in the(Wait, view).reason

    def test_a_dead_incarnation_gets_nothing_but_the_next_one_does(self) -> None:
        nodes = [node("n0"), node("n1"), node("n2")]
        assert "recorded dead" in the(Wait, cluster(waiting(), nodes=nodes, dead=["n1"])).reason
        nodes[1] = node("n1", 1)
        assert of(Transition, cluster(waiting(), nodes=nodes, dead=["n1"]))

    def test_devices_are_counted(self) -> None:
        view = cluster(waiting(ranks_per_node=3), nodes=[node("n0", devices=2)])
        assert "it has 2 devices, the job needs 3 a node" in the(Wait, view).reason

    def test_two_jobs_never_take_the_same_node(self) -> None:
        other = JobView(job=Job(spec=replace(spec(), name="other"), spec_revision=1))
        view = cluster(waiting(), other, nodes=[node(f"n{number}") for number in range(6)])
        starts = of(Transition, view)
        assert len(starts) == 2
        taken = [place.node for start in starts for place in start.assign]
        assert len(taken) == len(set(taken)) == 6

    def test_the_second_job_waits_for_what_the_first_takes(self) -> None:
        other = JobView(job=Job(spec=replace(spec(), name="zother"), spec_revision=1))
        view = cluster(waiting(), other, nodes=[node(f"n{number}") for number in range(5)])
        assert the(Transition, view).generation.job == JOB
        assert the(Wait, view).job == "zother"

    def test_what_a_leader_staged_before_it_died_is_taken_over(self) -> None:
        """A large start takes several transactions; only the record makes them valid."""
        job = fresh(replace(waiting(), generation=Generation(job=JOB)), 1, "n7", since=1)
        job = replace(job, generation=None)
        view = cluster(job, nodes=[node(f"n{number}") for number in range(2)])
        start = the(Transition, view)
        assert {one.slot: one.node for one in start.slots} == {0: "n0", 2: "n1"}

    def test_a_staged_node_that_has_died_is_replaced(self) -> None:
        job = fresh(replace(waiting(), generation=Generation(job=JOB)), 1, "n7", since=1)
        job = replace(job, generation=None)
        nodes = [node(f"n{number}") for number in range(3)]
        start = the(Transition, cluster(job, nodes=nodes, without=["n7"]))
        assert {one.slot for one in start.slots} == {0, 1, 2}
        assert start.unassign == ("n7",)


class TestReplacement:
    def test_a_dead_node_is_replaced_by_a_hot_spare(self) -> None:
        view = cluster(running(spec()), nodes=[node("a"), node("z", hot=True)], dead=["n1"])
        change = the(Transition, view)
        assert (change.generation.generation, change.generation.phase) == (5, Phase.PAUSE)
        assert [(one.slot, one.node) for one in change.slots] == [(1, "z")]
        assert change.slots[0].ranks == (SlotRank("", 5),)
        assert change.unassign == ("n1",)
        assert [(one.node, one.control_address) for one in change.assign] == [("z", "z:1")]
        assert change.generation.changed_slots == (1,)
        assert "slot 1: n1 -> hot spare z" in change.reason
        assert change.generation.last_running_generation == 4
        assert change.generation.resume_step == -1

    def test_a_cold_one_when_none_is_hot(self) -> None:
        view = cluster(running(spec()), nodes=[node("a")], dead=["n1"])
        assert "slot 1: n1 -> cold spare a" in the(Transition, view).reason

    def test_the_spare_of_a_job_of_lower_priority_is_the_last_choice(self) -> None:
        jobs = [running(spec(priority=1)), replace(waiting(), job=Job(spec(name="other")))]
        view = cluster(*jobs, nodes=[node("a"), node("b")], dead=["n1"], spares={"a": "other"})
        assert the(Transition, view).slots[0].node == "b"
        view = cluster(*jobs, nodes=[node("a")], dead=["n1"], spares={"a": "other"})
        assert the(Transition, view).slots[0].node == "a"

    @pytest.mark.parametrize("priority", [1, 2])
    def test_the_spare_of_another_job_is_its_own(self, priority: int) -> None:
        other = JobView(job=Job(spec(name="other", priority=priority)))
        view = cluster(
            running(spec(priority=1)), other, nodes=[node("a")], dead=["n1"], spares={"a": "other"}
        )
        assert the(Transition, view).generation.empty_slots == (1,)

    def test_a_start_says_whose_the_nodes_are(self) -> None:
        other = running(spec(1, name="other", priority=3))
        view = cluster(waiting(replicas=1), other, nodes=[node("a")], spares={"a": "other"})
        assert the(Wait, view).reason == (
            "needs 1 nodes, 0 are free (a: it is kept for job other of priority 3)"
        )

    def test_being_warm_for_another_revision_is_cold(self) -> None:
        hot = node("a", hot=True)
        job = running(spec())
        job = replace(job, job=replace(job.job, spec_revision=8))
        assert "cold spare a" in the(Transition, cluster(job, nodes=[hot], dead=["n1"])).reason

    def test_offers_come_from_the_lowest_slots_that_stay(self) -> None:
        view = cluster(running(spec(5)), nodes=[node("z", hot=True)], dead=["n0"])
        assert the(Transition, view).generation.rendezvous_slots == (1, 2, 3)

    def test_no_spare_leaves_the_slot_empty(self) -> None:
        change = the(Transition, cluster(running(spec()), dead=["n1"]))
        assert change.generation.phase is Phase.PAUSE
        assert change.generation.empty_slots == (1,)
        assert change.slots == (Slot(slot=1, generation=5),)
        assert change.unassign == ("n1",)
        assert "slot 1: n1 is lost, no node is free" in change.reason

    def test_several_faults_in_one_pass(self) -> None:
        view = cluster(running(spec(5)), nodes=[node("y", hot=True), node("z")], dead=["n1", "n3"])
        change = the(Transition, ended(view, 4))
        assert {one.slot: one.node for one in change.slots} == {1: "y", 3: "z", 4: "n4"}
        assert change.generation.restarts == 1

    def test_a_node_that_comes_fills_the_empty_slot(self) -> None:
        job = emptied(running(spec(), phase=Phase.PAUSE), 1)
        assert of(Transition, cluster(acked(acked(job, 0), 2))) == []
        change = the(Transition, cluster(job, nodes=[node("n1", 1)], dead=["n1"]))
        assert change.generation.generation == 5
        assert change.generation.empty_slots == ()
        assert [(one.slot, one.node, one.incarnation) for one in change.slots] == [
            (1, "n1", "n1-1")
        ]

    def test_fewer_nodes_than_empty_slots(self) -> None:
        job = emptied(running(spec(), phase=Phase.PAUSE), 0, 1)
        change = the(Transition, cluster(job, nodes=[node("z")]))
        assert change.generation.empty_slots == (1,)
        assert "slot 1: still empty, no node is free" in change.reason

    def test_an_empty_slot_and_an_ended_trainer_at_once(self) -> None:
        job = emptied(running(spec(), phase=Phase.PAUSE), 1)
        change = the(Transition, ended(cluster(job), 2))
        assert change.generation.empty_slots == (1,)
        assert {one.slot: one.node for one in change.slots} == {2: "n2"}
        change = the(Transition, ended(cluster(job, nodes=[node("z", hot=True)]), 2))
        assert {one.slot: one.node for one in change.slots} == {1: "z", 2: "n2"}

    def test_a_spare_that_dies_before_its_ack_is_replaced(self) -> None:
        job = fresh(running(spec(), 5, Phase.PAUSE), 1, "z")
        change = the(Transition, cluster(job, nodes=[node("y")], dead=["z"]))
        assert change.generation.generation == 6
        assert change.slots[0].node == "y"
        assert change.unassign == ("z",)

    def test_slots_that_were_staged_are_taken_over(self) -> None:
        job = fresh(running(spec()), 1, "z", since=5)
        change = the(Transition, cluster(job))
        assert change.generation.generation == 5
        assert change.slots == ()
        assert "slots 1 were written before the leader changed" in change.reason

    def test_staged_slots_that_are_empty_or_lost_are_filled(self) -> None:
        job = fresh(running(spec()), 1, "z", since=5)
        job = replace(job, slots={**job.slots, 2: Slot(slot=2, generation=5)})
        change = the(Transition, cluster(job, nodes=[node("y")], dead=["z"]))
        assert {one.slot: one.node for one in change.slots} == {1: "y"}
        assert change.generation.empty_slots == (2,)

    def test_nothing_is_wrong(self) -> None:
        view = cluster(running(spec()), nodes=[node("z", hot=True)], spares={"z": JOB})
        assert none(view, Transition, Wait, KeepWarm)


class TestSpares:
    def test_as_many_as_the_job_asks_for(self) -> None:
        view = cluster(running(spec(spares=2)), nodes=[node("x"), node("y"), node("z")])
        assert [(one.node, one.job, one.spec_revision) for one in of(KeepWarm, view)] == [
            ("x", JOB, 7),
            ("y", JOB, 7),
        ]

    def test_none_before_the_job_is_placed(self) -> None:
        assert of(KeepWarm, cluster(waiting(), nodes=[node("x")])) == []

    def test_one_that_got_a_slot_is_none_any_more(self) -> None:
        view = cluster(running(spec(spares=0)), spares={"n1": JOB})
        assert the(KeepWarm, view).job == ""

    def test_one_that_is_taken_in_the_same_pass_is_not_kept(self) -> None:
        view = cluster(running(spec()), nodes=[node("z")], dead=["n1"])
        assert the(Transition, view).slots[0].node == "z"
        assert of(KeepWarm, view) == []

    @pytest.mark.parametrize("lost", [True, False])
    def test_an_unusable_one_is_let_go_and_replaced(self, lost: bool) -> None:
        nodes = [node("y"), node("z", unhealthy="hot")]
        view = cluster(
            running(spec()), nodes=nodes, spares={"z": JOB}, without=["z"] if lost else []
        )
        assert {(one.node, one.job) for one in of(KeepWarm, view)} == {("z", ""), ("y", JOB)}

    def test_of_an_ended_job_once_its_trainers_are_gone(self) -> None:
        job = running(spec(), phase=Phase.FINISHED)
        warm = Trainer("s", 0, TrainerState.WARM, JOB, 7)
        busy = cluster(job, nodes=[node("z", trainers=(warm,))], spares={"z": JOB})
        assert of(KeepWarm, busy) == []
        gone = replace(warm, state=TrainerState.ENDED)
        idle = cluster(job, nodes=[node("z", trainers=(gone,))], spares={"z": JOB})
        assert [(one.node, one.job) for one in of(KeepWarm, idle)] == [("z", "")]

    def test_of_a_job_that_can_not_be_read_are_left_alone(self) -> None:
        view = cluster(nodes=[node("z")], spares={"z": "unreadable"})
        assert of(KeepWarm, view) == []


class TestLeftovers:
    def view(self, status: JobStatus | None, *trainers: Trainer) -> ClusterView:
        job = replace(running(spec(), phase=Phase.FINISHED), status=status)
        return cluster(job, nodes=[node("n0", trainers=trainers)])

    def test_places_of_an_ended_job_go_once_its_trainers_are_gone(self) -> None:
        told = JobStatus(JobState.FINISHED)
        assert {one.node for one in of(Unassign, self.view(told))} == {"n0", "n1", "n2"}
        busy = Trainer("i0.0", 0, TrainerState.PLACED, JOB, 7, 1)
        assert {one.node for one in of(Unassign, self.view(told, busy))} == {
            "n1",
            "n2",
        }

    def test_not_before_the_status_is_told(self) -> None:
        """The final digests stand in the progress of the placed nodes."""
        assert of(Unassign, self.view(None)) == []
        assert of(Unassign, self.view(JobStatus(JobState.RUNNING))) == []

    def test_a_node_that_died_at_the_end_is_freed(self) -> None:
        job = running(spec(), phase=Phase.STOPPED, status=JobStatus(JobState.STOPPED))
        assert {one.node for one in of(Unassign, cluster(job, without=["n1"]))} == {
            "n0",
            "n1",
            "n2",
        }

    def test_a_place_whose_slot_has_gone_to_another(self) -> None:
        job = fresh(running(spec()), 1, "z", since=4)
        view = cluster(job, nodes=[node("n1")])
        old = replace(view.assignments["n0"], node="n1", incarnation="n1-0", slot=1)
        view = replace(view, assignments={**view.assignments, "n1": old})
        assert [(one.node, one.reason) for one in of(Unassign, view)] == [
            ("n1", f"slot 1 of job {JOB} is z's")
        ]

    def test_a_staged_place_stays(self) -> None:
        job = running(spec())
        view = cluster(job, nodes=[node("z")])
        staged = replace(view.assignments["n0"], node="z", incarnation="z-0", generation=5)
        view = replace(view, assignments={**view.assignments, "z": staged})
        assert of(Unassign, view) == []

    def test_of_a_job_that_can_not_be_read_are_left_alone(self) -> None:
        view = replace(cluster(running(spec())), jobs={})
        assert of(Unassign, view) == []
