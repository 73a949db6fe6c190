# SPDX-License-Identifier: Apache-2.0
"""Nodes whose places are to be others', at a step's boundary."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import (
    Cause,
    ClusterView,
    NodeFlags,
    Phase,
    StepPhase,
    TrainerState,
)
from coordinator.plan import KeepWarm, SettleFlags, Transition, UpdateStatus, Wait
from tests.unit.plan.views import (
    JOB,
    acked,
    cluster,
    ended,
    fresh,
    held,
    node,
    none,
    of,
    open_incident,
    running,
    spec,
    the,
)


def drained(view: ClusterView, *names: str, mark: NodeFlags | None = None) -> ClusterView:
    flags = {name: mark or NodeFlags(draining="a move") for name in names}
    return replace(view, flags={**view.flags, **flags})


HOT = node("n3", hot=True)


def test_the_replacement_is_warmed_first_besides_the_spares() -> None:
    view = drained(cluster(running(spec()), nodes=[node("n3"), node("n4"), node("n5")]), "n1")
    assert none(view, Transition)
    assert [(one.node, one.job) for one in of(KeepWarm, view)] == [("n3", JOB), ("n4", JOB)]
    wait = the(Wait, view)
    assert not wait.blocked
    assert "n1 (slot 1) is draining: a move" in wait.reason
    assert "no node is free for it" in wait.reason
    status = the(UpdateStatus, view).status
    assert status.state.name == "RUNNING"
    assert "draining: a move" in status.reason
    warming = drained(cluster(running(spec()), nodes=[node("n3")], spares={"n3": JOB}), "n1")
    assert "n3 is not warm yet" in the(Wait, warming).reason


def test_then_the_ranks_are_asked_to_stop_after_their_step() -> None:
    job = running(spec())
    move = the(Transition, drained(cluster(job, nodes=[HOT]), "n1"))
    assert move.generation == replace(
        job.current, hold="slot 1: n1 -> hot spare n3, it is draining: a move"
    )
    assert (move.slots, move.assign, move.unassign, move.incident) == ((), (), (), None)
    waiting = drained(cluster(held(job), nodes=[HOT]), "n1")
    assert none(waiting, Transition)
    assert the(Wait, waiting).reason.startswith("until the step under way is done: slot 1")


def test_and_at_the_boundary_the_spare_takes_over() -> None:
    job = running(spec())
    move = the(Transition, drained(cluster(held(job, 0), nodes=[HOT]), "n1"))
    assert (move.generation.generation, move.generation.phase) == (5, Phase.PAUSE)
    assert move.generation.hold == ""
    assert [(one.slot, one.node) for one in move.slots] == [(1, "n3")]
    assert move.incident is not None
    assert (move.incident.cause, move.incident.nodes) == (Cause.PLANNED, ("n1",))


def test_who_leaves_does_not_tell_that_the_boundary_is_reached() -> None:
    """Its state goes with it: the others might not have come there, and would compute again."""
    job = running(spec())
    assert none(drained(cluster(held(job, 1), nodes=[HOT]), "n1"), Transition)
    both = drained(cluster(held(job, 1, 2), nodes=[HOT, node("n4", hot=True)]), "n1", "n2")
    assert none(both, Transition)


def test_several_leave_together_as_far_as_there_are_hot_spares() -> None:
    job = held(running(spec()), 0)
    for spares, slots in (((HOT,), [1]), ((HOT, node("n4", hot=True)), [1, 2])):
        move = the(Transition, drained(cluster(job, nodes=spares), "n1", "n2"))
        assert [one.slot for one in move.slots] == slots


def test_no_step_is_lost_at_a_boundary_and_one_is_without() -> None:
    for stands, lost in ((True, 0), (False, 1)):
        job = open_incident(running(spec(), 5, Phase.PAUSE), "detected", cause=Cause.PLANNED)
        job = fresh(job, 1, "n3")
        job = acked(acked(job, 0, step=6), 1, StepPhase.EMPTY)
        job = acked(job, 2, StepPhase.PREPARED, 5)
        ack = job.acks["n0"]
        ranks = tuple(replace(one, held=stands) for one in ack.ranks)
        job = replace(job, acks={**job.acks, "n0": replace(ack, ranks=ranks)})
        move = the(Transition, cluster(job))
        assert move.generation.resume_step == 6
        assert move.incident is not None
        assert move.incident.lost_steps == lost


def test_a_drain_that_is_called_off_lets_the_ranks_go_on() -> None:
    job = running(spec())
    view = cluster(held(job), nodes=[HOT])
    assert none(view, Transition)
    assert "can't be made any more" in the(Wait, view).reason
    for slot in range(3):
        move = the(Transition, cluster(held(job, slot), nodes=[HOT]))
        assert (move.generation.generation, move.slots) == (5, ())
        assert move.incident is not None
        assert move.incident.cause is Cause.PLANNED


def test_a_spare_that_is_gone_by_then_lets_the_ranks_go_on() -> None:
    view = drained(cluster(held(running(spec()), 0)), "n1")
    move = the(Transition, view)
    assert move.slots == ()
    assert "can't be made any more" in move.reason


def test_a_failure_comes_first() -> None:
    view = drained(cluster(running(spec()), nodes=[HOT], dead=["n2"]), "n1")
    assert [one.slot for one in the(Transition, view).slots] == [2]
    broken = replace(running(spec()), broken_at=0.0)
    move = the(Transition, drained(cluster(broken, nodes=[HOT]), "n1"), now=50.0)
    assert "the group is broken" in move.reason


def test_not_before_the_last_incident_is_over() -> None:
    job = open_incident(running(spec()), "detected", "regrouped")
    view = drained(cluster(job, nodes=[HOT]), "n1")
    assert none(view, Transition)
    assert f"not before the first step after incident {JOB}.4" in the(Wait, view).reason


def test_a_draining_node_takes_no_place_and_is_kept_warm_for_nothing() -> None:
    view = drained(cluster(running(spec()), nodes=[HOT], spares={"n3": JOB}, dead=["n1"]), "n3")
    (slot,) = the(Transition, view).slots
    assert slot.node == ""
    assert ("n3", "") in [(one.node, one.job) for one in of(KeepWarm, view)]


def test_an_ended_trainer_leaves_a_draining_node_for_any_spare() -> None:
    view = drained(ended(cluster(running(spec()), nodes=[node("n3")]), 1), "n1")
    assert [one.node for one in the(Transition, view).slots] == ["n3"]
    assert view.nodes["n1"].record.trainers[0].state is TrainerState.ENDED


def test_a_dead_node_is_no_matter_of_a_drain() -> None:
    view = drained(cluster(running(spec()), nodes=[HOT], without=["n1"]), "n1")
    assert none(view, Transition)


def test_a_replaced_node_is_free_again_as_soon_as_it_has_no_place() -> None:
    mark = NodeFlags(replacing="a doubt")
    view = drained(cluster(held(running(spec()), 0), nodes=[HOT]), "n1", mark=mark)
    assert [one.node for one in the(Transition, view).slots] == ["n3"]
    assert none(view, SettleFlags)
    gone = {name: one for name, one in view.assignments.items() if name != "n1"}
    assert the(SettleFlags, replace(view, assignments=gone)).node == "n1"


def test_a_paused_job_s_nodes_stay() -> None:
    job = running(spec())
    job = replace(job, job=replace(job.job, recovery_paused="look first"))
    view = drained(cluster(job, nodes=[HOT]), "n1")
    assert none(view, Transition)
    assert "would hold generation 4 at the end of the step under way" in the(Wait, view).reason
