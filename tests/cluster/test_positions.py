# SPDX-License-Identifier: Apache-2.0
"""Replicas of two ranks: a node dies, and nobody else is restarted or moved."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.cli.demo import examples
from coordinator.model import Cause, JobSpec
from tests.cluster.support import HERE, Run, marks, running, spec

Reference = Callable[[JobSpec], list[str]]

TIMELINE = ["detected", "paused", "pulled", "regrouped", "first_step"]
SCRIPTS = {"fsdp": (examples() / "fsdp.py", 16), "split": (HERE / "split.py", 80)}

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("script", "ranks_per_node"), [("fsdp", 1), ("fsdp", 2), ("split", 1), ("split", 2)]
)
def test_a_node_of_a_replica_dies(reference: Reference, script: str, ranks_per_node: int) -> None:
    path, steps = SCRIPTS[script]
    job = replace(
        spec(replicas=2, ranks_per_node=ranks_per_node),
        command=(sys.executable, str(path), str(steps)),
        working_directory=str(path.parent),
        shard_positions=2,
    )
    wanted = reference(job)
    assert len(set(wanted)) == 2
    with running(job.slots + 1, devices=ranks_per_node) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(steps // 4)
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
