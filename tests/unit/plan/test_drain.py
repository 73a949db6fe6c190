# SPDX-License-Identifier: Apache-2.0
"""Nodes whose places are to be others', at a step's boundary."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import (
    Ack,
    Assignment,
    Cause,
    ClusterView,
    DeadIncarnation,
    JobView,
    Leaver,
    NodeFlags,
    Phase,
    RankAck,
    Source,
    StepPhase,
    TrainerState,
)
from coordinator.plan import KeepWarm, SettleFlags, Transition, Unassign, UpdateStatus, Wait
from tests.unit.plan.views import (
    JOB,
    acked,
    cluster,
    ended,
    fresh,
    held,
    instance,
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


def test_who_leaves_keeps_its_place_as_a_source_until_the_others_run() -> None:
    job = running(spec())
    move = the(Transition, drained(cluster(held(job, 0), nodes=[HOT]), "n1"))
    (slot,) = move.slots
    assert slot.leaving == Leaver("n1", "n1-0", job.slots[1].ranks, 5)
    assert move.unassign == ()
    left = slot.left(move.generation)
    assert left is not None
    assert (left.node, left.ranks) == ("n1", job.slots[1].ranks)
    assert slot.left(replace(move.generation, phase=Phase.RESTORE)) is not None
    runs = replace(move.generation, phase=Phase.RUNNING, last_running_generation=5)
    assert slot.left(runs) is None
    assert slot.left(replace(move.generation, phase=Phase.STOPPED)) is None
    assert slot.left(job.current) is None


def left(job: JobView, phase: Phase = Phase.PAUSE, *, since: int = 5) -> ClusterView:
    """n1 has left slot 1 to n3 in generation 5."""
    owner = job.slots[1]
    record = replace(job.current, generation=5, phase=phase, last_running_generation=4)
    job = fresh(replace(job, generation=record), 1, "n3", since)
    leaver = Leaver(owner.node, owner.incarnation, owner.ranks, since)
    job = replace(job, slots={**job.slots, 1: replace(job.slots[1], leaving=leaver)})
    view = cluster(job, nodes=[node("n1"), HOT])
    place = Assignment("n1", "n1-0", JOB, 1, 1)
    return replace(view, assignments={**view.assignments, "n1": place})


def with_job(view: ClusterView, job: JobView) -> ClusterView:
    return replace(view, jobs={JOB: job})


def dead(view: ClusterView, name: str) -> ClusterView:
    return replace(view, flags={name: NodeFlags(dead=(DeadIncarnation(f"{name}-0", "it was"),))})


def served(*, acknowledged: bool = True) -> ClusterView:
    """Of one replica of two ranks: all have stopped but perhaps who leaves."""
    view = left(running(spec(1, 2)))
    job = acked(acked(view.jobs[JOB], 0, step=6), 1, StepPhase.EMPTY)
    ranks = (RankAck(1, instance(1), StepPhase.COMPUTING, 6, shard_address="n1:0", held=True),)
    if acknowledged:
        job = replace(job, acks={**job.acks, "n1": Ack(5, "n1-0", ranks)})
    return with_job(view, job)


def test_its_acknowledgement_is_waited_for_and_it_is_a_source() -> None:
    assert "n1 (slot 1)" in the(Wait, served(acknowledged=False)).reason
    view = served()
    move = the(Transition, view)
    assert (move.generation.phase, move.generation.resume_step) == (Phase.RESTORE, 6)
    (source,) = move.generation.sources
    assert (source.shard_position, source.node, source.instance) == (1, "n1", instance(1))
    (slot,) = move.slots  # named is who has the slot now
    assert (slot.node, slot.ranks[0].instance) == ("n3", "new1.0")
    assert slot.leaving is not None
    assert none(view, Unassign)


def test_when_it_dies_with_the_only_state_the_job_is_lost() -> None:
    assert the(Transition, dead(served(), "n1")).generation.phase is Phase.LOST


def test_when_it_dies_while_it_serves_a_new_generation_follows() -> None:
    view = left(running(spec()), Phase.RESTORE)
    job = view.jobs[JOB]
    source = Source(0, 1, "n1", instance(1), "n1:0")
    view = with_job(view, replace(job, generation=replace(job.current, sources=(source,))))
    assert none(view, Transition)
    move = the(Transition, dead(view, "n1"))
    assert (move.generation.generation, move.generation.phase) == (6, Phase.PAUSE)
    assert "n1 is lost while it serves" in move.reason


def test_when_the_replacement_dies_it_takes_its_place_back() -> None:
    move = the(Transition, dead(left(running(spec(1, 2))), "n3"))
    (slot,) = move.slots
    assert (slot.node, slot.ranks) == ("n1", running(spec(1, 2)).slots[1].ranks)
    assert slot.leaving is None
    assert "n3 -> n1 which had left it" in move.reason


def test_once_the_others_run_it_is_freed() -> None:
    view = left(running(spec()))
    assert none(view, Unassign)
    job = view.jobs[JOB]
    runs = replace(job.current, phase=Phase.RUNNING, last_running_generation=5)
    assert the(Unassign, with_job(view, replace(job, generation=runs))).node == "n1"


def test_who_leaves_may_tell_that_the_boundary_is_reached() -> None:
    """Its acknowledgement counts: whoever has not come there yet applies its update then."""
    job = running(spec(1))
    move = the(Transition, drained(cluster(held(job, 0), nodes=[HOT]), "n0"))
    assert move.generation.generation == 5


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
