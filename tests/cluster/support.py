# SPDX-License-Identifier: Apache-2.0
"""Clusters, jobs and what may be awaited of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from coordinator.cli.localcluster import ClusterError, LocalCluster
from coordinator.cli.localcluster.processes import running_with, tail
from coordinator.model import JobSpec, JobState, Phase
from protos import admin_pb2, incident_pb2

HERE = Path(__file__).resolve().parent
STEPS = 120
PACE = 0.02
LEASE_TTL = 3.0

START = 90.0
RECOVERY = 60.0
END = 90.0


def spec(
    *,
    steps: int = STEPS,
    width: int = 64,
    replicas: int = 3,
    ranks_per_node: int = 1,
    spares: int = 1,
    restarts: int = 10,
    **environment: str,
) -> JobSpec:
    """A job of ``train.py``; more arguments are its environment."""
    settings = {"OMP_NUM_THREADS": "1", "PACE": str(PACE), **environment}
    return JobSpec(
        name="job",
        command=(sys.executable, str(HERE / "train.py"), str(steps), str(width)),
        environment=tuple(sorted(settings.items())),
        working_directory=str(HERE),
        replicas=replicas,
        ranks_per_node=ranks_per_node,
        spares=spares,
        seed=7,
        restarts=restarts,
    )


@contextlib.contextmanager
def running(
    nodes: int, *coordinator: str, devices: int = 1, lease_ttl: float = LEASE_TTL
) -> Iterator[LocalCluster]:
    """A cluster, of which nothing is left afterwards; its logs are shown when the test fails.

    ``coordinator``: more arguments for the coordinators.
    """
    with LocalCluster(
        nodes=nodes, devices=devices, lease_ttl=lease_ttl, coordinator_arguments=coordinator
    ) as cluster:
        try:
            yield cluster
        except BaseException:
            show(cluster)
            raise
    assert running_with(str(cluster.folder)) == []
    assert not cluster.folder.exists()


def show(cluster: LocalCluster) -> None:
    for event in cluster.admin.events():
        print(event.revision, event.kind, event.job, event.node, event.message)
    logs = [*cluster.folder.glob("*.log"), *cluster.trainer_logs("stderr")]
    for log in logs + cluster.trainer_logs():
        said = tail(log, 40)
        if said:
            print(f"---- {log.relative_to(cluster.folder)}\n{said}")


class Run:
    """One job in a cluster."""

    def __init__(self, cluster: LocalCluster, job: JobSpec) -> None:
        self.cluster = cluster
        self.spec = job
        cluster.admin.submit(job)

    def describe(self) -> admin_pb2.JobDescription:
        return self.cluster.admin.describe(self.spec.name)

    def wait(
        self, until: Callable[[admin_pb2.JobDescription], bool], timeout: float, what: str
    ) -> admin_pb2.JobDescription:
        """Wait for a condition; a job that ends before it comes is an error at once."""
        seen = self.cluster.admin.wait_job(
            self.spec.name,
            lambda one: until(one) or JobState(one.status.state).ended,
            timeout,
            what,
        )
        if not until(seen):
            raise ClusterError(f"the job has ended before this came: {what}\n{seen.status}")
        return seen

    def wait_step(self, step: int, timeout: float = START) -> admin_pb2.JobDescription:
        """Wait until the job runs and has committed a step."""
        return self.wait(
            lambda one: one.generation.phase == Phase.RUNNING.value and reached(one) >= step,
            timeout,
            f"step {step} of a running job",
        )

    def wait_spare(self, count: int = 1) -> None:
        """Wait until so many nodes are hot spares of this job."""
        self.cluster.admin.wait_nodes(
            lambda nodes: (
                sum(one.alive and one.node.warm.job == self.spec.name for one in nodes.values())
                >= count
            ),
            START,
            f"{count} hot spares",
        )

    def wait_state(self, state: JobState, timeout: float = END) -> admin_pb2.JobDescription:
        return self.wait(
            lambda one: JobState(one.status.state) is state, timeout, f"state {state.name}"
        )

    def wait_incident(self, number: int = 1) -> incident_pb2.Incident:
        """Wait for the end of the job's n-th incident."""
        seen = self.wait(
            lambda one: len(one.incidents) >= number and one.incidents[number - 1].closed,
            RECOVERY,
            f"incident {number} is closed",
        )
        return seen.incidents[number - 1]

    def finish(self) -> list[str]:
        """Wait for the job's end; returns the digest of each shard position."""
        digests = list(self.wait_state(JobState.FINISHED).status.digests)
        assert len(digests) == self.spec.shard_positions
        assert all(digests)
        return digests

    def node_of(self, slot: int) -> str:
        """The node that has a slot now."""
        return next(one.node for one in self.describe().slots if one.slot == slot)


def wait_until(until: Callable[[], bool], timeout: float = END, pause: float = 0.02) -> None:
    """Look every ``pause`` seconds for what no event tells."""
    deadline = time.monotonic() + timeout
    waiting = threading.Event()
    while not until():
        if time.monotonic() >= deadline:
            raise ClusterError(f"not within {timeout:g} s")
        waiting.wait(pause)


def reached(seen: admin_pb2.JobDescription) -> int:
    """The highest step that a rank is known to have reached."""
    steps = [rank.step for node in seen.progress.values() for rank in node.ranks]
    return max([seen.status.step, *steps])


def marks(incident: incident_pb2.Incident) -> list[str]:
    """The phases of an incident's timeline, in order."""
    return [one.phase for one in incident.marks]


def undisturbed(job: JobSpec, folder: Path) -> list[str]:
    """The digests that the job ends with when nothing happens to it; worked out once a session.

    ``folder`` is common to all test processes.
    """
    environment = tuple(pair for pair in job.environment if pair[0] == "OMP_NUM_THREADS")
    plain = replace(job, environment=environment, spares=0)
    key = hashlib.sha256(repr(plain).encode()).hexdigest()[:16]
    cached = folder / f"undisturbed-{key}.json"
    with (folder / f"undisturbed-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cached.exists():
            with running(plain.slots, devices=plain.ranks_per_node) as cluster:
                cached.write_text(json.dumps(Run(cluster, plain).finish()))
        digests: list[str] = json.loads(cached.read_text())
        return digests
