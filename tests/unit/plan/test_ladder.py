# SPDX-License-Identifier: Apache-2.0
"""Fewer replicas when nodes are missing, more when they are back."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import (
    Cause,
    ClusterView,
    JobSpec,
    JobState,
    JobView,
    Phase,
    Settings,
    Slot,
    SlotRank,
    StepPhase,
)
from coordinator.plan import KeepWarm, Transition, UpdateStatus, Wait, plan
from coordinator.plan.ladder import restart_delay
from tests.unit.plan.views import (
    acked,
    cluster,
    ended,
    held,
    instance,
    node,
    none,
    of,
    open_incident,
    running,
    said,
    spec,
    the,
)


def shrunk(
    of_: JobSpec, *absent: int, phase: Phase = Phase.RUNNING, reserves: bool = False
) -> JobView:
    """A job that goes on without some replicas; ``reserves`` still own their slots."""
    job = running(of_, 5, phase)
    slots = dict(job.slots)
    for number in slots:
        if of_.replica(of_.rank(number, 0)) in absent and not reserves:
            slots[number] = Slot(slot=number, generation=5)
    empty = tuple(number for number, slot in slots.items() if not slot.node)
    record = replace(job.current, absent_replicas=absent, empty_slots=empty)
    progress = {
        name: one
        for name, one in job.progress.items()
        if any(s.node == name for s in slots.values())
    }
    return replace(job, slots=slots, generation=record, progress=progress)


class TestShrink:
    def test_a_job_goes_on_with_fewer_replicas(self) -> None:
        change = the(Transition, cluster(running(spec(min_replicas=2)), dead=["n1"]))
        assert change.generation.phase is Phase.PAUSE
        assert change.generation.absent_replicas == (1,)
        assert change.generation.empty_slots == (1,)
        assert change.slots == (Slot(slot=1, generation=5),)
        assert change.unassign == ("n1",)
        assert change.generation.rendezvous_slots == (0, 2)
        assert "slot 1: n1 is lost, no node is free" in change.reason
        assert "the job shrinks to 2 of 3 replicas" in change.reason

    def test_a_node_that_is_free_comes_first_be_it_cold(self) -> None:
        view = cluster(running(spec(min_replicas=1)), nodes=[node("z")], dead=["n1"])
        change = the(Transition, view)
        assert change.generation.absent_replicas == ()
        assert [one.node for one in change.slots] == ["z"]

    def test_never_below_min_replicas(self) -> None:
        job = running(spec(min_replicas=2))
        change = the(Transition, cluster(job, dead=["n0", "n1"]))
        assert change.generation.absent_replicas == ()
        assert change.generation.empty_slots == (0, 1)
        assert "fewer than min_replicas = 2 would be left" in change.reason

    def test_without_min_replicas_never(self) -> None:
        change = the(Transition, cluster(running(spec()), dead=["n1"]))
        assert change.generation.absent_replicas == ()
        assert "the job needs all its replicas" in change.reason

    def test_a_record_does_not_grow_with_what_is_lost(self) -> None:
        lost = [f"n{number}" for number in range(1, 41)]
        job = running(spec(replicas=100, min_replicas=2))
        reason = the(Transition, cluster(job, dead=lost)).generation.reason
        assert reason.startswith("slot 1: n1 is lost")
        assert "; 25 more; " in reason
        assert reason.endswith("the job shrinks to 60 of 100 replicas")

    def test_one_node_is_enough_to_go_on_from_waiting(self) -> None:
        job = running(spec(min_replicas=2), 5, Phase.PAUSE)
        slots = {**job.slots, 0: Slot(slot=0, generation=5), 1: Slot(slot=1, generation=5)}
        job = replace(job, slots=slots, generation=replace(job.current, empty_slots=(0, 1)))
        wait = the(Wait, cluster(acked(job, 2)))
        assert "slots 0, 1 are empty" in wait.reason
        assert "min_replicas = 2" in wait.reason
        change = the(Transition, cluster(job, nodes=[node("z")]))
        assert [(one.slot, one.node) for one in change.slots] == [(0, "z")]
        assert change.generation.absent_replicas == (1,)

    def test_the_absent_are_not_waited_for(self) -> None:
        job = shrunk(spec(min_replicas=2), 1, phase=Phase.PAUSE)
        change = the(Transition, cluster(acked(acked(job, 0), 2)))
        assert change.generation.phase is Phase.RESTORE
        assert change.generation.absent_replicas == (1,)
        job = shrunk(spec(min_replicas=2), 1, phase=Phase.RESTORE)
        for number in (0, 2):
            job = said(job, number, generation=5, step=5, restored=5)
        change = the(Transition, cluster(job))
        assert change.generation.phase is Phase.RUNNING
        assert "with 2 of 3 replicas" in change.reason
        status = the(UpdateStatus, cluster(shrunk(spec(min_replicas=2), 1))).status
        assert (status.state, status.replicas) == (JobState.RUNNING, 2)
        assert "it grows when 1 node is free and warm for it" in status.reason

    def test_the_end_needs_only_those_that_run(self) -> None:
        job = shrunk(spec(min_replicas=2), 1)
        for number in (0, 2):
            job = said(job, number, generation=5, step=9, phase=StepPhase.DONE, digest="d")
        assert the(Transition, cluster(job)).generation.phase is Phase.FINISHED

    def test_a_node_of_several_replicas_takes_them_all(self) -> None:
        job = running(spec(4, 1, 2, min_replicas=2))
        change = the(Transition, cluster(job, dead=["n0"]))
        assert change.generation.absent_replicas == (0, 1)
        job = running(spec(4, 1, 2, min_replicas=3))
        assert the(Transition, cluster(job, dead=["n0"])).generation.absent_replicas == ()

    def test_a_node_with_parts_of_two_replicas_takes_both(self) -> None:
        """Three positions on nodes of two: what fills whole nodes are two replicas."""
        job = running(spec(4, 3, 2, min_replicas=2))
        change = the(Transition, cluster(job, dead=["n1"]))
        assert change.generation.absent_replicas == (0, 1)


class TestReserves:
    """Two replicas of two nodes, and of one a node dies: the other keeps its state for a while."""

    SPEC = spec(2, 2, min_replicas=1)

    def test_the_rest_of_a_broken_replica_keeps_its_state(self) -> None:
        change = the(Transition, cluster(running(self.SPEC), dead=["n0"]))
        assert change.generation.absent_replicas == (0,)
        assert change.generation.empty_slots == (0,)
        assert {one.slot for one in change.slots} == {0}
        assert change.unassign == ("n0",)
        assert "n1 (slot 1) keep their state until the others run" in change.reason

    def paused(self) -> JobView:
        job = shrunk(self.SPEC, 0, phase=Phase.PAUSE, reserves=True)
        return replace(job, slots={**job.slots, 0: Slot(slot=0, generation=5)})

    def test_it_is_asked_for_its_step(self) -> None:
        job = acked(acked(self.paused(), 2, StepPhase.PREPARED), 3, StepPhase.PREPARED)
        assert "n1 (slot 1)" in the(Wait, cluster(job)).reason
        change = the(Transition, cluster(acked(job, 1, step=6)))
        assert change.generation.resume_step == 6

    def test_it_follows_when_it_can_reach_the_step(self) -> None:
        job = acked(acked(self.paused(), 2, step=6), 3, step=6)
        change = the(Transition, cluster(acked(job, 1, StepPhase.PREPARED, 5)))
        assert (change.generation.resume_step, change.slots) == (6, ())
        change = the(Transition, cluster(acked(job, 1, StepPhase.COMPUTING, 5)))
        assert change.slots == (Slot(slot=1, generation=5),), "it is freed at once"
        assert change.generation.empty_slots == (0, 1)

    def test_nobody_waits_long_for_it(self) -> None:
        job = acked(acked(self.paused(), 2), 3)
        change = the(Transition, cluster(job), now=20.0)
        assert change.generation.phase is Phase.RESTORE
        assert change.slots == (Slot(slot=1, generation=5),)

    def test_it_is_freed_when_the_others_run(self) -> None:
        job = shrunk(self.SPEC, 0, phase=Phase.RESTORE, reserves=True)
        for number in (2, 3):
            job = said(job, number, generation=5, step=5, restored=5)
        change = the(Transition, cluster(job))
        assert change.generation.phase is Phase.RUNNING
        assert [(one.slot, one.node) for one in change.slots] == [(0, ""), (1, "")]
        assert change.generation.empty_slots == (0, 1)

    def test_it_comes_back_when_the_last_other_holder_dies(self) -> None:
        change = the(Transition, cluster(self.paused(), dead=["n3"]))
        assert change.generation.generation == 6
        assert change.generation.absent_replicas == (0,)
        moved = {one.slot: one for one in change.slots}[3]
        assert (moved.node, moved.ranks) == ("n1", (SlotRank(instance(1), 1),))
        assert [(one.node, one.slot) for one in change.assign] == [("n1", 3)]
        assert change.unassign == ("n3",)
        assert "slot 3: n3 -> n1 from slot 1" in change.reason

    def test_it_displaces_an_owner_that_holds_nothing(self) -> None:
        job = self.paused()
        slots = {**job.slots, 3: Slot(3, "z", "z-0", (SlotRank("", 5),), 5)}
        job = replace(job, slots=slots)
        job = acked(acked(job, 2), 3, StepPhase.EMPTY)
        assert "no acknowledgement yet" in the(Wait, cluster(job)).reason
        change = the(Transition, cluster(acked(job, 1)))
        assert [(one.slot, one.node) for one in change.slots] == [(1, ""), (3, "n1")]
        assert change.unassign == ("z",)

    def test_it_displaces_an_owner_whose_trainer_has_ended(self) -> None:
        job = shrunk(self.SPEC, 0, phase=Phase.RESTORE, reserves=True)
        job = replace(job, slots={**job.slots, 0: Slot(slot=0, generation=5)})
        change = the(Transition, ended(cluster(said(job, 1, restored=5, step=5)), 3))
        assert [(one.slot, one.node) for one in change.slots] == [(1, ""), (3, "n1")]
        assert change.unassign == ("n3",)
        assert "slot 3: rank 3 exited with code 1 on n3" in change.reason

    def test_the_job_is_not_lost_while_it_may_answer(self) -> None:
        job = self.paused()
        slots = {**job.slots, 3: Slot(3, "z", "z-0", (SlotRank("", 5),), 5)}
        job = acked(acked(replace(job, slots=slots), 2), 3, StepPhase.EMPTY)
        wait = the(Wait, cluster(job), now=1000.0)
        assert wait.blocked
        assert "nobody but n1 (slot 1) may hold shard positions 1" in wait.reason
        change = the(Transition, cluster(job, dead=["n1"]))
        assert change.generation.phase is Phase.LOST
        assert "shard positions 1" in change.reason

    def test_one_that_still_has_its_gradients_is_awaited(self) -> None:
        """The others may have gone on with other gradients than it holds."""
        job = shrunk(self.SPEC, 0, phase=Phase.RESTORE, reserves=True)
        job = said(acked(job, 1, StepPhase.PREPARED), 1, generation=4, step=5, restored=4)
        wait = the(Wait, cluster(job, dead=["n3"]))
        assert (wait.blocked, "nobody but n1 (slot 1)" in wait.reason) == (False, True)
        assert the(Wait, cluster(job, dead=["n3"]), now=1000.0).blocked
        followed = said(job, 1, generation=4, step=5, restored=5)
        change = the(Transition, cluster(followed, dead=["n3"]))
        assert {one.slot: one.node for one in change.slots}[3] == "n1"
        assert "n0" in change.unassign, "it has not said so, and nobody needs it"
        assert of(Transition, cluster(acked(job, 1, StepPhase.PREPARED, 4), dead=["n3"]))

    def test_an_older_state_is_of_no_use_any_more(self) -> None:
        """It came back, and the others had gone on before RUNNING was recorded."""
        job = running(self.SPEC, 6, Phase.PAUSE)
        record = replace(job.current, absent_replicas=(0,))
        slots = {**job.slots, 0: Slot(slot=0, generation=5), 1: Slot(slot=1, generation=6)}
        slots[3] = replace(job.slots[3], node="n1", incarnation="n1-0", generation=6)
        job = replace(job, generation=record, slots=slots)
        job = acked(acked(job, 2, step=6), 3, step=5)
        change = the(Transition, cluster(job))
        assert change.generation.phase is Phase.LOST
        assert "holds state 6 of shard positions 1" in change.reason

    def test_mixed_replicas_make_a_whole_one(self) -> None:
        change = the(Transition, cluster(running(self.SPEC), dead=["n0", "n3"]))
        assert change.generation.absent_replicas == (1,)
        assert [(one.slot, one.node) for one in change.slots] == [(0, "n2"), (2, ""), (3, "")]
        assert change.slots[0].ranks == (SlotRank(instance(2), 1),)


class TestGrow:
    def test_a_hot_spare_brings_a_replica_back(self) -> None:
        job = shrunk(spec(min_replicas=2), 1)
        hot = [node("z", hot=True)]
        asked = the(Transition, cluster(job, nodes=hot)).generation
        assert (asked.generation, asked.phase) == (5, Phase.RUNNING)
        assert "grows to 3 of 3 replicas" in asked.hold
        assert none(cluster(held(job), nodes=hot), Transition)
        change = the(Transition, cluster(held(job, 0), nodes=hot))
        assert change.generation.absent_replicas == ()
        assert [(one.slot, one.node) for one in change.slots] == [(1, "z")]
        assert change.incident is not None
        assert change.incident.cause is Cause.PLANNED
        assert "the job grows to 3 of 3 replicas" in change.reason

    def test_a_node_becomes_hot_first(self) -> None:
        job = shrunk(spec(min_replicas=2, spares=0), 1)
        view = cluster(job, nodes=[node("z")])
        assert none(view, Transition)
        assert (the(KeepWarm, view).node, the(KeepWarm, view).job) == ("z", "train")

    def test_whole_replicas_only(self) -> None:
        job = shrunk(spec(2, 2, min_replicas=1), 0)
        assert none(cluster(job, nodes=[node("y", hot=True), node("z")]), Transition)
        hot = [node("y", hot=True), node("z", hot=True)]
        change = the(Transition, cluster(held(job, 2), nodes=hot))
        assert [(one.slot, one.node) for one in change.slots] == [(0, "y"), (1, "z")]

    def test_not_before_the_first_step_without_it(self) -> None:
        job = open_incident(shrunk(spec(min_replicas=2), 1), "detected", "paused")
        view = cluster(job, nodes=[node("z", hot=True)])
        assert none(view, Transition)

    def test_a_fault_and_its_spares_grow_it_at_once(self) -> None:
        job = shrunk(spec(min_replicas=1), 1)
        hot = [node("y", hot=True), node("z", hot=True)]
        change = the(Transition, cluster(job, nodes=hot, dead=["n2"]))
        assert {one.slot: one.node for one in change.slots} == {1: "z", 2: "y"}
        assert change.generation.absent_replicas == ()


class TestRestarts:
    def test_the_first_restart_is_at_once_and_the_next_ones_wait(self) -> None:
        job = running(spec())
        assert restart_delay(job, Settings()) == 0.0
        again = open_incident(job, "detected", "detected", "detected")
        assert restart_delay(again, Settings()) == 4.0
        view = ended(cluster(again), 1)
        assert "not within 4 s" in the(Wait, view, now=3.0).reason
        assert the(Transition, view, now=4.0).slots[0].node == "n1"

    def test_a_spare_waits_for_nothing(self) -> None:
        again = open_incident(running(spec()), "detected", "detected", "detected")
        view = ended(cluster(again, nodes=[node("z", hot=True)]), 1)
        assert the(Transition, view).slots[0].node == "z"

    def test_the_node_of_an_ended_trainer_becomes_the_next_spare(self) -> None:
        view = ended(cluster(running(spec()), nodes=[node("z", hot=True)]), 1)
        change = the(Transition, view)
        assert change.unassign == ("n1",)
        assignments = {one: held for one, held in view.assignments.items() if one != "n1"}
        after = replace(view, assignments=assignments)
        job = after.jobs["train"]
        job = replace(job, slots={**job.slots, 1: change.slots[0]}, generation=change.generation)
        after = replace(after, jobs={"train": job})
        kept = [one for one in plan(after, 0.0, Settings()) if isinstance(one, KeepWarm)]
        assert [(one.node, one.job) for one in kept] == [("n1", "train")]


def test_an_arrangement_costs_no_look_at_the_nodes_when_all_is_well() -> None:
    view: ClusterView = cluster(running(spec()), nodes=[node("z", hot=True)], spares={"z": "train"})
    assert of(Transition, view) == []
