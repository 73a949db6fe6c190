# SPDX-License-Identifier: Apache-2.0
"""The ends that a job can have besides finishing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cli.localcluster import LocalCluster
from coordinator.model import JobState
from tests.cluster.support import END, START, Run, running, spec

pytestmark = pytest.mark.timeout(300)


def _no_trainers(cluster: LocalCluster) -> None:
    cluster.admin.wait_for(
        lambda: {name: cluster.trainers(name) for name in cluster.nodes},
        lambda seen: not any(seen.values()),
        END,
        "no trainer runs",
    )


def test_a_stopped_job_frees_its_nodes_for_the_next() -> None:
    job = spec(steps=100_000)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(5)
        cluster.admin.stop(job.name, "enough of it")
        seen = run.wait_state(JobState.STOPPED)
        assert "enough of it" in seen.status.reason
        _no_trainers(cluster)
        cluster.admin.wait_nodes(
            lambda nodes: not any(one.HasField("assignment") for one in nodes.values()),
            END,
            "every node is free",
        )


def test_a_script_that_always_raises_fails_the_job_with_its_traceback() -> None:
    job = spec(restarts=1, RAISE_AT="3")
    with running(4) as cluster:
        run = Run(cluster, job)
        seen = run.wait_state(JobState.FAILED, START + END)
        assert "ValueError: no data for step 3" in seen.status.reason
        assert "train.py" in seen.status.reason
        _no_trainers(cluster)


def test_the_same_error_at_the_same_step_again_ends_the_job_whatever_restarts_allows() -> None:
    job = spec(restarts=100, RAISE_AT="3", RAISE_REPLICA="1")
    with running(4) as cluster:
        run = Run(cluster, job)
        seen = run.wait_state(JobState.FAILED, START + END)
        assert "software: ValueError: no data for step 3" in seen.status.reason
        assert "for the second time" in seen.status.reason
        assert "train.py" in seen.status.reason
        assert seen.generation.restarts == 1


def test_a_command_that_is_not_there_fails_the_job_and_says_so() -> None:
    job = spec(restarts=0)
    job = type(job)(name=job.name, command=("no-such-program",), replicas=1)
    with running(1) as cluster:
        run = Run(cluster, job)
        seen = run.wait_state(JobState.FAILED, START)
        assert "no-such-program" in seen.status.reason


def test_a_spare_is_its_job_s_own_unless_a_more_important_one_needs_it() -> None:
    with running(3) as cluster:
        low = Run(cluster, replace(spec(steps=100_000, replicas=2), name="low"))
        low.wait_spare()
        low.wait_step(5)
        reserve = ({*cluster.nodes} - {low.node_of(0), low.node_of(1)}).pop()
        equal = Run(cluster, replace(spec(steps=100_000, replicas=1), name="equal"))
        waits = equal.wait_state(JobState.WAITING)
        assert f"{reserve}: it is kept for job low of priority 0" in waits.status.reason
        high = Run(cluster, replace(spec(steps=100_000, replicas=1), name="high", priority=1))
        high.wait_step(5)
        assert high.node_of(0) == reserve
        assert low.wait_state(JobState.RUNNING).generation.generation == 1
