# SPDX-License-Identifier: Apache-2.0
"""Without a spare a job goes on with fewer replicas, and grows again when a node is back."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.model import Cause, JobSpec, JobState, Phase
from tests.cluster import global_batch
from tests.cluster.support import HERE, RECOVERY, START, Run, marks, running, spec

STEPS = 800

pytestmark = pytest.mark.timeout(300)


def shrinking(folder: Path, steps: int = STEPS) -> JobSpec:
    """A job of ``global_batch.py`` on three nodes, of which two can go on."""
    script = str(Path(global_batch.__file__).resolve())
    return replace(
        spec(spares=0, PACE="0.1", GATE=str(folder / "gate")),
        command=(sys.executable, script, str(steps), str(folder / "weights")),
        min_replicas=2,
    )


def reference(steps: int = STEPS) -> list[torch.Tensor]:
    """The weights after one process has taken every batch whole."""
    model = global_batch.build()
    optimizer = global_batch.optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        global_batch.loss_of(model, global_batch.batch(step)).backward()
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def test_a_job_shrinks_and_grows_and_the_mean_gradient_stays_right(tmp_path: Path) -> None:
    job = shrinking(tmp_path)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 2)}
        cluster.kill_node(run.node_of(1))
        incident = run.wait_incident()
        assert incident.cause == Cause.NODE_LOST.value
        assert marks(incident)[-5:] == ["detected", "paused", "pulled", "regrouped", "first_step"]
        assert incident.bytes_moved == 0
        assert incident.lost_steps <= 1
        shrunk = run.wait(lambda one: one.status.replicas == 2, RECOVERY, "two replicas run")
        assert list(shrunk.generation.absent_replicas) == [1]
        assert "with 2 of 3 replicas" in shrunk.status.reason

        cluster.start_node("n9")
        grown = run.wait(
            lambda one: one.generation.phase == Phase.RUNNING.value and one.status.replicas == 3,
            START,
            "three replicas run again",
        )
        assert list(grown.generation.absent_replicas) == []
        assert run.node_of(1) == "n9"
        # nobody who was well has been started again, neither to shrink nor to grow
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 2)} == before
        incident = run.wait_incident(2)
        assert incident.cause == Cause.PLANNED.value
        assert incident.lost_steps == 0, "it grows at a step's boundary"
        (tmp_path / "gate").touch()
        run.finish()
        logs = "".join(one.read_text() for one in cluster.trainer_logs())
    for replicas in (2, 3):
        assert f"replica {replicas - 1} of {replicas}\n" in logs, "ranks of the group are dense"
    assert "replica 2 of 2" not in logs
    for ours, theirs in zip(torch.load(tmp_path / "weights"), reference(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_below_min_replicas_it_waits_and_says_so(tmp_path: Path) -> None:
    job = shrinking(tmp_path, steps=200)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(10)
        for number in (1, 2):
            cluster.kill_node(run.node_of(number))
            if number == 1:
                run.wait_incident()
        waiting = run.wait(
            lambda one: (
                JobState(one.status.state) is JobState.WAITING
                and "slots 2 are empty" in one.status.reason
            ),
            RECOVERY,
            "the job waits for a node and says so",
        )
        assert "fewer than min_replicas = 2 would be left" in waiting.status.reason
        cluster.start_node("n9")
        run.wait_incident(2)
        assert run.describe().status.replicas == 2
        (tmp_path / "gate").touch()
        run.finish()


def test_a_replica_of_two_nodes_goes_and_comes_back() -> None:
    """What is left of a broken replica is freed, and is half of the one that comes back."""
    job = replace(
        spec(replicas=2, spares=0, PACE="0.1"),
        command=(sys.executable, str(HERE / "split.py"), "100000"),
        shard_positions=2,
        min_replicas=1,
    )
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_step(10)
        before = {rank: cluster.trainer(job.name, rank) for rank in (2, 3)}
        freed, victim = run.node_of(0), run.node_of(1)
        cluster.kill_node(victim)
        run.wait_incident()
        shrunk = run.wait(lambda one: one.status.replicas == 1, RECOVERY, "one replica runs")
        assert list(shrunk.generation.absent_replicas) == [0]
        assert list(shrunk.generation.empty_slots) == [0, 1]
        cluster.start_node("n9")
        run.wait(
            lambda one: one.generation.phase == Phase.RUNNING.value and one.status.replicas == 2,
            START,
            "two replicas run again",
        )
        assert {run.node_of(0), run.node_of(1)} == {freed, "n9"}
        assert run.wait_incident(2).bytes_moved > 0
        assert {rank: cluster.trainer(job.name, rank) for rank in (2, 3)} == before
        cluster.admin.stop(job.name, "enough")
        run.wait_state(JobState.STOPPED)
