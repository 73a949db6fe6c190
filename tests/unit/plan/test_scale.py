# SPDX-License-Identifier: Apache-2.0
"""A job whose number of replicas an operator has changed."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import Assignment, Cause, JobView, Phase, Slot
from coordinator.plan import KeepWarm, Transition, UpdateStatus, Wait
from tests.unit.plan.views import cluster, held, node, none, of, running, spec, the


def wanted(job: JobView, replicas: int) -> JobView:
    return replace(job, job=replace(job.job, wanted_replicas=replicas))


def shrunk(job: JobView, *absent: int) -> JobView:
    """Without some replicas of one rank each."""
    slots = {**job.slots, **{one: Slot(slot=one, generation=4) for one in absent}}
    record = replace(job.current, absent_replicas=absent, empty_slots=absent)
    return replace(job, slots=slots, generation=record)


def test_the_last_replicas_leave_at_a_boundary_and_their_state_is_kept_until_then() -> None:
    job = wanted(running(spec(min_replicas=1)), 2)
    asked = the(Transition, cluster(job)).generation
    assert (asked.generation, asked.phase) == (4, Phase.RUNNING)
    assert "the job shrinks to 2 of 3 replicas" in asked.hold
    assert none(cluster(held(job)), Transition)
    move = the(Transition, cluster(held(job, 0)))
    assert (move.generation.generation, move.generation.phase) == (5, Phase.PAUSE)
    assert move.generation.absent_replicas == (2,)
    assert move.incident is not None
    assert move.incident.cause is Cause.PLANNED
    assert "n2 (slot 2) keep their state until the others run" in move.reason


def test_a_scaled_job_is_as_it_is_to_be_and_does_not_grow() -> None:
    job = shrunk(wanted(running(spec(min_replicas=1)), 2), 2)
    view = cluster(job, nodes=[node("n3", hot=True), node("n4", hot=True)])
    assert none(view, Transition, Wait)
    assert the(UpdateStatus, view).status.replicas == 2


def test_it_grows_again_to_what_is_wanted_as_soon_as_nodes_are_warm() -> None:
    job = shrunk(wanted(running(spec(4, min_replicas=1, spares=0)), 3), 2, 3)
    cold = cluster(job, nodes=[node("n5"), node("n6")])
    assert [one.node for one in of(KeepWarm, cold)] == ["n5"]
    assert the(Wait, cold).reason == "it grows when 1 node is free and warm for it"
    assert not the(Wait, cold).blocked
    hot = [node("n5", hot=True), node("n6", hot=True)]
    move = the(Transition, cluster(held(job, 1), nodes=hot))
    assert move.generation.absent_replicas == (3,)
    assert [(one.slot, one.node) for one in move.slots] == [(2, "n5")]


def test_a_node_that_dies_is_not_replaced_beyond_what_is_wanted() -> None:
    job = wanted(running(spec(min_replicas=1)), 2)
    move = the(Transition, cluster(job, nodes=[node("n3", hot=True)], dead=["n0"]))
    assert move.generation.absent_replicas == (0,)
    assert move.assign == ()


def test_a_job_starts_with_what_is_wanted() -> None:
    job = wanted(JobView(job=running(spec(min_replicas=1)).job), 2)
    assert "needs 2 nodes, 1 are free" in the(Wait, cluster(job, nodes=[node("n0")])).reason
    nodes = [node(f"n{one}") for one in range(4)]
    move = the(Transition, cluster(job, nodes=nodes))
    assert [(one.slot, one.node) for one in move.slots] == [(0, "n0"), (1, "n1"), (2, "")]
    assert move.generation.absent_replicas == (2,)
    assert move.generation.empty_slots == (2,)
    # a leader that wanted more and fell before the record had placed somebody there
    placed = Slot(2, "n2", "n2-0", generation=1)
    left = replace(job, slots={2: placed})
    view = replace(
        cluster(left, nodes=nodes), assignments={"n2": Assignment("n2", "n2-0", "train", 2, 1)}
    )
    assert the(Transition, view).unassign == ("n2",)
