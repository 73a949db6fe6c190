# SPDX-License-Identifier: Apache-2.0
"""Failures of what recovers others (the leader, etcd, a pull's source), and half-dead things."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from coordinator.cli.localcluster import LocalCluster
from coordinator.cli.localcluster.processes import tree
from coordinator.model import Cause, JobSpec
from tests.cluster.sockets import has_port, receives_from, shut_down_connections
from tests.cluster.support import (
    END,
    LEASE_TTL,
    Run,
    marks,
    reached,
    running,
    spec,
    wait_until,
)

Reference = Callable[[JobSpec], list[str]]

pytestmark = pytest.mark.timeout(300)


def test_the_leader_dies_and_the_next_one_recovers_the_job(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        trainers = {rank: cluster.trainer(job.name, rank) for rank in range(3)}
        dead = cluster.kill_leader()
        cluster.kill_trainer(job.name, 1)
        incident = run.wait_incident()
        assert incident.cause == Cause.TRAINER_ENDED.value
        assert cluster.leader() != dead
        for rank in (0, 2):
            assert cluster.trainer(job.name, rank) == trainers[rank]
        assert run.finish() == wanted


def test_etcd_is_gone_for_a_while_and_training_goes_on(reference: Reference) -> None:
    job = spec(steps=300)
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        before = reached(run.wait_step(20))
        trainers = {rank: cluster.trainer(job.name, rank) for rank in range(3)}
        cluster.etcd.kill()
        # longer than any lease lives: nobody may be given up for it
        outage = time.monotonic() + LEASE_TTL + 2.0
        wait_until(lambda: _printed(cluster) > before + 60 and time.monotonic() > outage)
        cluster.etcd.start()
        run.wait(lambda one: reached(one) > before + 60, END, "progress after the outage")
        assert {rank: cluster.trainer(job.name, rank) for rank in range(3)} == trainers
        assert run.finish() == wanted
        assert list(run.describe().incidents) == []


def test_etcd_is_killed_and_a_trainer_meanwhile(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        victim = cluster.trainer(job.name, 1)
        cluster.etcd.kill()
        os.kill(victim, signal.SIGKILL)
        cluster.etcd.start()
        run.wait_incident()
        assert run.finish() == wanted


def test_the_source_of_a_pull_dies_while_it_serves(reference: Reference) -> None:
    width = 4096
    job = spec(steps=15, width=width, spares=2, PACE="0")
    wanted = reference(job)
    with running(5) as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        run.wait_step(5)
        survivors = [cluster.trainer(job.name, rank) for rank in (0, 1)]
        placed = {run.node_of(slot) for slot in range(3)}
        waiting = [
            pid for name in {*cluster.nodes} - placed for pid in cluster.trainers(name).values()
        ]
        cluster.kill_trainer(job.name, 2)
        pulls: list[tuple[int, int]] = []

        def pulling() -> bool:
            pulls.extend((pid, port) for pid in waiting if (port := receives_from(pid, 4 << 20)))
            return bool(pulls)

        try:
            wait_until(pulling, pause=0.0005)
            receiver, port = pulls[0]
            # It takes no more than what is in the sockets until the source is gone.
            os.kill(receiver, signal.SIGSTOP)
            whole = width * width * 4 * 3  # the widest layer, and the optimizer's two moments
            arrived = receives_from(receiver, whole)
            source = next(pid for pid in survivors if has_port(pid, port))
            os.kill(source, signal.SIGKILL)
            os.kill(receiver, signal.SIGCONT)
        except PermissionError:
            pytest.skip("this kernel lets nobody take another process's descriptors")
        assert not arrived, "the pull was over before its source died"
        run.wait_incident()
        assert run.finish() == wanted


def test_a_group_breaks_and_nobody_has_died(reference: Reference) -> None:
    job = spec(spares=0)
    wanted = reference(job)
    with running(3) as cluster:
        run = Run(cluster, job)
        generation = run.wait_step(20).generation.generation
        trainers = {rank: cluster.trainer(job.name, rank) for rank in range(3)}
        try:
            assert shut_down_connections(trainers[1]) > 0
        except PermissionError:
            pytest.skip("this kernel lets nobody take another process's descriptors")
        incident = run.wait_incident()
        assert incident.cause == Cause.GROUP_BROKEN.value
        assert incident.bytes_moved == 0
        assert run.describe().generation.generation > generation
        assert {rank: cluster.trainer(job.name, rank) for rank in range(3)} == trainers
        assert run.finish() == wanted


def test_a_frozen_node_is_replaced_and_does_no_harm_when_it_thaws(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(4) as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(20)
        frozen = run.node_of(1)
        old = cluster.trainer(job.name, 1)
        incarnation = cluster.admin.nodes()[frozen].node.incarnation
        pids = tree(cluster.nodes[frozen].pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            incident = run.wait_incident()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert incident.cause == Cause.NODE_LOST.value
        assert marks(incident)[0] == "detected"
        # it has been replaced: its trainer is ended, and it comes back as somebody else
        wait_until(lambda: old not in cluster.trainers(frozen).values())
        cluster.admin.wait_nodes(
            lambda nodes: (
                nodes[frozen].alive and nodes[frozen].node.incarnation not in ("", incarnation)
            ),
            END,
            f"{frozen} is back as a new incarnation",
        )
        assert run.finish() == wanted


def test_a_trainer_that_is_slow_to_answer_is_waited_for(reference: Reference) -> None:
    job = spec()
    wanted = reference(job)
    with running(3) as cluster:
        run = Run(cluster, job)
        run.wait_step(20)
        frozen = cluster.trainer(job.name, 1)
        os.kill(frozen, signal.SIGSTOP)
        try:
            at = _printed(cluster)
            threading.Event().wait(LEASE_TTL + 1.0)
            assert _printed(cluster) <= at + 1
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert run.finish() == wanted
        assert list(run.describe().incidents) == []


def _printed(cluster: LocalCluster) -> int:
    """The highest step that a trainer has printed: it needs neither etcd nor a coordinator."""
    last = 0
    for log in cluster.trainer_logs():
        lines = [line.split() for line in log.read_text().splitlines()]
        last = max([last, *(int(line[1]) for line in lines if line[:1] == ["step"])])
    return last
