# SPDX-License-Identifier: Apache-2.0
"""Who is found dead long before its lease ends, and who isn't although it seems to be."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from benchmarks.wires import WiredCluster
from coordinator.cli.localcluster import LocalCluster
from coordinator.model import Cause
from tests.cluster.support import Run, reached, running, spec, wait_until
from tests.cluster.wires import wired

TTL = 120.0
"""Seconds: whoever is found dead within the time of a test has not been waited for."""

pytestmark = pytest.mark.timeout(300)


@contextlib.contextmanager
def job() -> Iterator[Run]:
    """A job of three nodes with a hot spare."""
    with running(4, lease_ttl=TTL) as cluster:
        run = Run(cluster, spec(steps=1_000_000))
        run.wait_spare()
        run.wait_step(5)
        yield run


def goes_on(run: Run) -> None:
    """Wait for a few more steps."""
    now = reached(run.describe())
    run.wait(lambda one: reached(one) > now + 5, 60.0, "more steps")


def deaths(cluster: LocalCluster) -> list[str]:
    return [one.message for one in cluster.admin.events() if one.kind == "node.dead"]


@pytest.mark.parametrize("kill", [LocalCluster.kill_node, LocalCluster.kill_workerd])
def test_a_killed_node_is_dead_without_its_lease_s_end(
    kill: Callable[[LocalCluster, str], None],
) -> None:
    """Its workerd at least is: the trainers end with that."""
    with job() as run:
        cluster, victim = run.cluster, run.node_of(1)
        kill(cluster, victim)
        incident = run.wait_incident()
        assert incident.cause == Cause.NODE_LOST.value
        assert list(incident.nodes) == [victim]
        assert "it does not answer" in deaths(cluster)[-1]
        assert "connection refused" in deaths(cluster)[-1]
        goes_on(run)


def test_a_stopped_workerd_is_left_alone() -> None:
    with job() as run:
        cluster, victim = run.cluster, run.node_of(1)
        log = cluster.coordinators[cluster.leader()].log
        workerd = cluster.nodes[victim].pid
        os.kill(workerd, signal.SIGSTOP)
        try:
            wait_until(lambda: ": FROZEN, " in log.read_text())
            threading.Event().wait(2.0)
            goes_on(run)
        finally:
            os.kill(workerd, signal.SIGCONT)
        wait_until(lambda: ": ANSWERS, " in log.read_text().rpartition(": FROZEN, ")[2])
        goes_on(run)
        assert not deaths(cluster)
        assert not run.describe().incidents


# ---- with cables that can be cut


@contextlib.contextmanager
def wired_job(ttl: float = TTL) -> Iterator[tuple[WiredCluster, Run]]:
    with wired(4, lease_ttl=ttl) as cluster:
        run = Run(cluster, spec(steps=1_000_000))
        run.wait_spare()
        run.wait_step(5)
        yield cluster, run


def said(cluster: LocalCluster) -> str:
    """What the leader has logged."""
    return cluster.coordinators[cluster.leader()].log.read_text()


def test_a_node_whose_cable_is_pulled_is_dead_without_its_lease_s_end() -> None:
    with wired_job() as (cluster, run):
        victim = run.node_of(1)
        cluster.wires.pull(victim)
        incident = run.wait_incident()
        assert list(incident.nodes) == [victim]
        assert "says so too" in deaths(cluster)[-1]
        goes_on(run)


def test_a_node_that_only_the_leader_can_t_hear_is_left_alone() -> None:
    """One direction of one link: what the node sends to the leader is lost, nothing else is."""
    with wired_job() as (cluster, run):
        victim = run.node_of(1)
        port = cluster.admin.nodes()[victim].node.control_address.rpartition(":")[2]
        leader = cluster.wires.address(cluster.leader())
        cluster.wires.drop(victim, f"ip daddr {leader} tcp sport {port}")
        wait_until(lambda: f"no verdict on {victim}" in said(cluster))
        goes_on(run)
        cluster.wires.restore(victim)
        wait_until(lambda: ": ANSWERS, " in said(cluster).rpartition(": SILENT, ")[2])
        assert not deaths(cluster)
        assert not run.describe().incidents


def test_a_leader_that_is_cut_off_from_the_nodes_doubts_itself() -> None:
    with wired_job() as (cluster, run):
        leader = cluster.leader()
        cluster.wires.drop(leader, f"ip daddr != {cluster.wires.host}")
        names = sorted(cluster.nodes)
        wait_until(lambda: all(f"no verdict on {one}" in said(cluster) for one in names))
        goes_on(run)
        cluster.wires.restore(leader)
        wait_until(lambda: said(cluster).count(": ANSWERS, ") >= 2 * len(names))
        assert not deaths(cluster)
        assert not run.describe().incidents


def test_a_leader_that_is_cut_off_with_etcd_doubts_itself_although_all_leases_end() -> None:
    """The nodes reach each other and train on; then they register again, as they were."""
    with wired_job(ttl=3.0) as (cluster, run):
        wires = cluster.wires
        cut = f"ip daddr {{ {wires.host}, {wires.address('c0')}, {wires.address('c1')} }}"
        for name in cluster.nodes:
            wires.drop(name, cut)
        doubtful = "its lease is gone; but 3 nodes without a lease are silent"
        wait_until(lambda: said(cluster).count(doubtful) >= 3)
        threading.Event().wait(2.0)
        for name in cluster.nodes:
            wires.restore(name)
        goes_on(run)
        assert not deaths(cluster)
        assert not run.describe().incidents
