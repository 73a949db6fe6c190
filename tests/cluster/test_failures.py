# SPDX-License-Identifier: Apache-2.0
"""Something dies; the job ends with the same bits as one to which nothing happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.model import Cause, JobSpec, JobState
from tests.cluster.support import END, RECOVERY, Run, marks, running, spec

Reference = Callable[[JobSpec], list[str]]

TIMELINE = ["detected", "paused", "pulled", "regrouped", "first_step"]

pytestmark = pytest.mark.timeout(300)


def test_a_node_dies_and_a_spare_takes_its_place(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        victim = run.node_of(1)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 2)}
        cluster.kill_node(victim)
        incident = run.wait_incident()
        assert incident.cause == Cause.NODE_LOST.value
        assert list(incident.nodes) == [victim]
        assert marks(incident)[-5:] == TIMELINE
        assert [one.time_ns for one in incident.marks] == sorted(
            one.time_ns for one in incident.marks
        )
        assert incident.bytes_moved > 0
        assert incident.lost_steps <= 1
        # no healthy trainer is restarted
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 2)} == before
        assert run.finish() == wanted


@pytest.mark.parametrize("rank", [0, 2])
def test_a_trainer_dies_and_a_spare_takes_its_place(reference: Reference, rank: int) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        victim = run.node_of(rank)
        cluster.kill_trainer(job.name, rank)
        incident = run.wait_incident()
        assert incident.cause == Cause.TRAINER_ENDED.value
        assert marks(incident)[-5:] == TIMELINE
        assert run.node_of(rank) != victim
        assert run.finish() == wanted


def test_without_a_spare_a_trainer_is_restarted_where_it_was(reference: Reference) -> None:
    job = spec(spares=0)
    wanted = reference(job)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        victim = run.node_of(1)
        cluster.kill_trainer(job.name, 1)
        run.wait_incident()
        assert run.node_of(1) == victim
        assert run.describe().generation.restarts == 1
        assert run.finish() == wanted


def test_without_a_node_the_job_waits_and_goes_on_when_one_comes(reference: Reference) -> None:
    job = spec(spares=0)
    wanted = reference(job)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        cluster.kill_node(run.node_of(2))
        run.wait(
            lambda one: (
                JobState(one.status.state) is JobState.WAITING
                and "slots 2 are empty" in one.status.reason
            ),
            RECOVERY,
            "the job waits for a node and says so",
        )
        cluster.start_node("n9")
        incident = run.wait_incident()
        assert incident.bytes_moved > 0
        assert run.node_of(2) == "n9"
        assert run.finish() == wanted


def test_a_node_with_several_ranks_dies(reference: Reference) -> None:
    job = spec(replicas=4, ranks_per_node=2)
    wanted = reference(job)
    with running(3, devices=2) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        cluster.kill_node(run.node_of(0))
        incident = run.wait_incident()
        assert marks(incident)[-5:] == TIMELINE
        assert run.finish() == wanted


def test_one_trainer_of_several_on_a_node_dies(reference: Reference) -> None:
    job = spec(replicas=4, ranks_per_node=2, spares=0)
    wanted = reference(job)
    with running(2, devices=2) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        others = {rank: cluster.trainer(job.name, rank) for rank in (0, 1, 2)}
        cluster.kill_trainer(job.name, 3)
        run.wait_incident()
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 1, 2)} == others
        assert run.finish() == wanted


def test_two_nodes_die_one_after_the_other(reference: Reference) -> None:
    job = spec(spares=2)
    wanted = reference(job)
    with running(5) as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        run.wait_step(15)
        cluster.kill_node(run.node_of(0))
        run.wait_incident()
        cluster.kill_node(run.node_of(1))
        run.wait_incident(2)
        assert run.finish() == wanted


def test_the_last_state_survives_when_a_rank_dies_after_others_are_done(
    reference: Reference,
) -> None:
    with running(4) as cluster:
        gate = cluster.folder / "gate"
        job = spec(GATE=str(gate), LATE="2")
        wanted = reference(job)
        run = Run(cluster, job)
        run.wait_spare()
        done = run.wait(
            lambda one: (
                sum(rank.digest != "" for node in one.progress.values() for rank in node.ranks) == 2
            ),
            END,
            "two ranks are done",
        )
        assert JobState(done.status.state) is JobState.RUNNING
        cluster.kill_trainer(job.name, 2)
        run.wait_incident()
        assert JobState(run.describe().status.state) is JobState.RUNNING
        gate.touch()
        assert run.finish() == wanted
