# SPDX-License-Identifier: Apache-2.0
"""Running jobs in a cluster of one's own, and hitting them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from coordinator.cli.localcluster import ClusterError, LocalCluster
from coordinator.cli.localcluster.processes import kill_all, tree
from coordinator.model import JobSpec, JobState, Phase
from protos import admin_pb2, incident_pb2

_PATIENCE = 120.0


class JobRun:
    """One job in a cluster."""

    def __init__(self, cluster: LocalCluster, spec: JobSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self.incidents = 0
        cluster.admin.submit(spec)

    def wait(
        self, until: Callable[[admin_pb2.JobDescription], bool], timeout: float, what: str
    ) -> admin_pb2.JobDescription:
        """Wait for a condition. Raises ClusterError when the job ends, or the time, before it."""
        seen = self.cluster.admin.wait_job(
            self.spec.name,
            lambda one: until(one) or JobState(one.status.state).ended,
            timeout,
            what,
        )
        if not until(seen):
            raise ClusterError(f"job {self.spec.name} has ended: {seen.status.reason}")
        return seen

    def wait_running(self) -> None:
        """Wait until it runs and as many spares as it asks for are hot."""
        self.wait(
            lambda one: one.generation.phase == Phase.RUNNING.value and one.status.step > 0,
            _PATIENCE,
            "it runs",
        )
        self.cluster.admin.wait_nodes(
            lambda nodes: (
                sum(one.alive and one.node.warm.job == self.spec.name for one in nodes.values())
                >= self.spec.spares
            ),
            _PATIENCE,
            "hot spares",
        )

    def wait_recovered(self) -> incident_pb2.Incident:
        """Wait for the end of the next incident."""
        number = self.incidents
        seen = self.wait(
            lambda one: len(one.incidents) > number and one.incidents[number].closed,
            _PATIENCE,
            "the recovery",
        )
        self.incidents += 1
        return seen.incidents[number]

    def node_of(self, slot: int) -> str:
        """The node that has a slot now."""
        slots = self.cluster.admin.describe(self.spec.name).slots
        return next(one.node for one in slots if one.slot == slot)

    def nodes(self) -> set[str]:
        """The nodes that have a slot now."""
        return {one.node for one in self._describe().slots if one.node}

    def step(self) -> int:
        """The job's step, as its status tells."""
        return self._describe().status.step

    def wait_whole(self) -> None:
        """Wait until it has run on for a step, its incidents closed, and it has its spares."""
        before = self._describe()
        self.wait(
            lambda one: (
                one.generation.phase == Phase.RUNNING.value
                and all(incident.closed for incident in one.incidents)
                and one.status.step > before.status.step
            ),
            _PATIENCE,
            "it runs on",
        )
        self.wait_running()

    def kill_trainers(self, node: str) -> None:
        """SIGKILL all trainers of a node."""
        for pid in self.cluster.trainers(node).values():
            kill_all(tree(pid))

    def kill_node(self, slot: int) -> tuple[str, int]:
        """SIGKILL the node of a slot; returns it, and the wall clock's nanoseconds."""
        node = self.node_of(slot)
        at = _wall_ns()
        self.cluster.kill_node(node)
        return node, at

    def kill_trainer(self, rank: int) -> int:
        """SIGKILL the trainer of a rank; returns the wall clock's nanoseconds."""
        at = _wall_ns()
        self.cluster.kill_trainer(self.spec.name, rank)
        return at

    def _describe(self) -> admin_pb2.JobDescription:
        return self.cluster.admin.describe(self.spec.name)

    def finish(self, timeout: float) -> list[str]:
        """Wait for its end; returns the digests of its final state."""
        seen = self.wait(
            lambda one: JobState(one.status.state) is JobState.FINISHED, timeout, "its end"
        )
        return list(seen.status.digests)


def pause(seconds: float) -> None:
    """Let the job run on."""
    threading.Event().wait(seconds)


def _wall_ns() -> int:
    return time.time_ns()  # noqa: TID251 - an incident's marks are wall-clock, on this machine
