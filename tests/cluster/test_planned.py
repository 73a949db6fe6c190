# SPDX-License-Identifier: Apache-2.0
"""Planned changes of a running job: the same bits as of one to which nothing happened, no step
computed again, nobody else restarted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.model import Cause, JobSpec
from tests.cluster.support import END, Run, marks, running, spec

Reference = Callable[[JobSpec], list[str]]

pytestmark = pytest.mark.timeout(300)


def test_a_drained_node_leaves_at_a_step_s_boundary(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        leaves = run.node_of(1)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 2)}
        cluster.admin.drain(leaves, "a new rack")
        incident = run.wait_incident()
        assert incident.cause == Cause.PLANNED.value
        assert list(incident.nodes) == [leaves]
        assert incident.lost_steps == 0
        assert incident.bytes_moved > 0
        assert marks(incident) == ["detected", "paused", "pulled", "regrouped", "first_step"]
        assert run.node_of(1) != leaves
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 2)} == before
        cluster.admin.wait_nodes(
            lambda nodes: (
                not nodes[leaves].HasField("assignment")
                and not nodes[leaves].HasField("spare")
                and not nodes[leaves].node.trainers
            ),
            END,
            "the drained node is empty",
        )
        assert cluster.trainers(leaves) == {}
        assert run.finish() == wanted


def test_a_drained_node_that_alone_has_its_state_serves_it(reference: Reference) -> None:
    job = spec(replicas=1)
    wanted = reference(job)
    with running(2) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        leaves = run.node_of(0)
        cluster.admin.drain(leaves, "a new rack")
        incident = run.wait_incident()
        assert (incident.cause, incident.lost_steps) == (Cause.PLANNED.value, 0)
        assert incident.bytes_moved > 0
        assert run.node_of(0) != leaves
        cluster.admin.wait_nodes(
            lambda nodes: not nodes[leaves].HasField("assignment"), END, "the node is empty"
        )
        assert run.finish() == wanted


def test_a_job_is_scaled_down_and_up_again_without_a_restart() -> None:
    job = replace(spec(steps=100_000, spares=0), min_replicas=2)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 1)}
        leaves = run.node_of(2)
        cluster.admin.scale(job.name, 2)
        smaller = run.wait_incident()
        assert (smaller.cause, smaller.lost_steps) == (Cause.PLANNED.value, 0)
        assert run.describe().status.replicas == 2
        cluster.admin.wait_nodes(
            lambda nodes: not nodes[leaves].HasField("assignment"), END, "the node is free"
        )
        cluster.admin.scale(job.name, 3)
        larger = run.wait_incident(2)
        assert (larger.cause, larger.lost_steps) == (Cause.PLANNED.value, 0)
        assert larger.bytes_moved > 0
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 1)} == before
        seen = run.wait_step(larger.resume_step + 20)
        assert (seen.status.generation, seen.status.replicas) == (3, 3)
