# SPDX-License-Identifier: Apache-2.0
"""Replicas of two ranks: a node dies, and nobody else is restarted or moved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.cli.demo import examples
from coordinator.model import Cause, JobSpec, Phase
from tests.cluster.support import HERE, RECOVERY, Run, marks, running, spec

Reference = Callable[[JobSpec], list[str]]

TIMELINE = ["detected", "paused", "pulled", "regrouped", "first_step"]
SCRIPTS = {"fsdp": (examples() / "fsdp.py", 16), "split": (HERE / "split.py", 80)}

pytestmark = pytest.mark.timeout(600)


def job_of(script: str, ranks_per_node: int = 1, spares: int = 1) -> JobSpec:
    """Two replicas of two ranks each."""
    path, steps = SCRIPTS[script]
    return replace(
        spec(replicas=2, ranks_per_node=ranks_per_node, spares=spares),
        command=(sys.executable, str(path), str(steps)),
        working_directory=str(path.parent),
        shard_positions=2,
    )


@pytest.mark.parametrize(
    ("script", "ranks_per_node"), [("fsdp", 1), ("fsdp", 2), ("split", 1), ("split", 2)]
)
def test_a_node_of_a_replica_dies(reference: Reference, script: str, ranks_per_node: int) -> None:
    job = job_of(script, ranks_per_node)
    wanted = reference(job)
    assert len(set(wanted)) == 2
    with running(job.slots + 1, devices=ranks_per_node) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(SCRIPTS[script][1] // 4)
        lost = 1  # the slot
        ranks = range(job.replicas * job.shard_positions)
        others = [rank for rank in ranks if rank // ranks_per_node != lost]
        before = {rank: cluster.trainer(job.name, rank) for rank in others}
        places = {slot: run.node_of(slot) for slot in range(job.slots) if slot != lost}
        victim = run.node_of(lost)
        cluster.kill_node(victim)
        incident = run.wait_incident()
        assert incident.cause == Cause.NODE_LOST.value
        assert list(incident.nodes) == [victim]
        assert marks(incident)[-5:] == TIMELINE
        assert incident.bytes_moved > 0
        assert incident.lost_steps <= 1
        assert {rank: cluster.trainer(job.name, rank) for rank in others} == before
        assert {slot: run.node_of(slot) for slot in places} == places
        assert run.finish() == wanted


def test_a_job_shrinks_by_a_whole_replica_and_grows_again() -> None:
    steps = 600
    job = replace(
        job_of("split", spares=0),
        command=(sys.executable, str(SCRIPTS["split"][0]), str(steps)),
        min_replicas=1,
    )
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 1)}
        cluster.kill_node(run.node_of(3))
        shrunk = run.wait(lambda one: one.status.replicas == 1, RECOVERY, "one replica runs")
        assert list(shrunk.generation.absent_replicas) == [1]
        run.wait_incident()
        cluster.start_node("n9")
        grown = run.wait(
            lambda one: one.generation.phase == Phase.RUNNING.value and one.status.replicas == 2,
            RECOVERY,
            "two replicas run again",
        )
        assert list(grown.generation.absent_replicas) == []
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 1)} == before
        assert len(set(run.finish())) == 2
