# SPDX-License-Identifier: Apache-2.0
"""From a node's death to the decision, and what must not be taken for a death."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from benchmarks.jobs import JobRun, pause
from benchmarks.table import Row
from benchmarks.wires import WiredCluster, Wires
from coordinator.cli import demo
from coordinator.cli.localcluster import ClusterError, LocalCluster
from coordinator.cli.localcluster.processes import tied

_TIMES: Final = 20
_TTL: Final = 5.0
_LASTS: Final = 3.0
"""Seconds that what is no failure lasts: long for a ping, short for a lease."""
_PATIENCE: Final = 60.0
_NODES: Final = 4


def rows() -> list[Row]:
    """20 of each; without those that need cables to cut, with the reason, where that can't be."""
    wires = Wires([f"n{number}" for number in range(_NODES)] + ["c0", "c1"])
    with contextlib.ExitStack() as stack:
        stack.callback(wires.close)
        wired: WiredCluster | None = None
        try:
            wires.build()
            wired = WiredCluster(wires, nodes=_NODES, lease_ttl=_TTL)
        except OSError as error:
            print(f"no cables to cut here: {error}", flush=True)
        cluster = stack.enter_context(wired or LocalCluster(nodes=_NODES, lease_ttl=_TTL))
        spec = demo.job()
        command = (*spec.command[:-1], "10000000")
        run = JobRun(cluster, replace(spec, name="detection", command=command, restarts=1000))
        found = [_decided("killed", run, _kill, "1 s", 1.0)]
        if wired is not None:
            found.append(_decided("cut", run, _cut(wired), "2 s", 2.0))
        found += [_wrong("frozen", run, _frozen), _wrong("starved", run, _starved)]
        if wired is not None:
            found.append(_wrong("one_way", run, _one_way(wired)))
            found.append(_wrong("leader_cut_off", run, _cut_off(wired)))
        found.append(_wrong("etcd_outage", run, _etcd_outage))
        cluster.admin.stop("detection", "measured")
        return found


def _victim(run: JobRun, number: int) -> str:
    return run.node_of(number % run.spec.slots)


# ---- deaths


def _decided(
    name: str,
    run: JobRun,
    strike: Callable[[JobRun, str], Callable[[], None]],
    of: str,
    most: float,
) -> Row:
    chance = random.Random(name)  # noqa: S311 - moments, not secrets
    seconds = []
    for number in range(_TIMES):
        run.wait_whole()
        pause(chance.random())
        victim, before = _victim(run, number), len(_deaths(run))
        at = time.time_ns()  # noqa: TID251 - a death's record is wall-clock, on this machine
        mend = strike(run, victim)
        deadline = time.monotonic() + _PATIENCE
        while len(_deaths(run)) == before:
            if time.monotonic() > deadline:
                raise ClusterError(f"{victim} is not found dead")
            pause(0.05)
        seconds.append((_deaths(run)[before] - at) / 1e9)
        mend()
    run.wait_whole()
    return Row.of(f"detection.{name}", seconds, "s", versus=f"target of {of}", against=most)


def _deaths(run: JobRun) -> list[int]:
    return [one.time_ns for one in run.cluster.admin.events() if one.kind == "node.dead"]


def _kill(run: JobRun, victim: str) -> Callable[[], None]:
    run.cluster.kill_node(victim)
    return lambda: run.cluster.start_node(victim)


def _cut(cluster: WiredCluster) -> Callable[[JobRun, str], Callable[[], None]]:
    def strike(run: JobRun, victim: str) -> Callable[[], None]:
        cluster.wires.pull(victim)
        return lambda: cluster.wires.plug(victim)

    return strike


# ---- what is no death


def _wrong(
    name: str,
    run: JobRun,
    disturb: Callable[[JobRun, str], contextlib.AbstractContextManager[None]],
) -> Row:
    before = len(_deaths(run))
    for number in range(_TIMES):
        run.wait_whole()
        with disturb(run, _victim(run, number)):
            pause(_LASTS)
        pause(1.0)
    run.wait_whole()
    wrong = len(_deaths(run)) - before
    return Row.of(f"detection.wrong.{name}", [float(wrong)], f"of {_TIMES}")


@contextlib.contextmanager
def _frozen(run: JobRun, victim: str) -> Iterator[None]:
    """workerd stands still."""
    pid = run.cluster.nodes[victim].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _starved(run: JobRun, victim: str) -> Iterator[None]:
    """Every processor has eight others to serve."""
    burning = [
        subprocess.Popen(tied([sys.executable, "-c", "while True: pass"]))
        for _ in range(8 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for one in burning:
            one.kill()
        for one in burning:
            one.wait()


def _one_way(
    cluster: WiredCluster,
) -> Callable[[JobRun, str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def disturb(run: JobRun, victim: str) -> Iterator[None]:
        """What the victim answers the leader is lost."""
        port = cluster.admin.nodes()[victim].node.control_address.rpartition(":")[2]
        leader = cluster.wires.address(cluster.leader())
        cluster.wires.drop(victim, f"ip daddr {leader} tcp sport {port}")
        try:
            yield
        finally:
            cluster.wires.restore(victim)

    return disturb


def _cut_off(
    cluster: WiredCluster,
) -> Callable[[JobRun, str], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def disturb(run: JobRun, victim: str) -> Iterator[None]:
        """The leader reaches etcd, and no node."""
        leader = cluster.leader()
        cluster.wires.drop(leader, f"ip daddr != {cluster.wires.host}")
        try:
            yield
        finally:
            cluster.wires.restore(leader)

    return disturb


@contextlib.contextmanager
def _etcd_outage(run: JobRun, victim: str) -> Iterator[None]:
    """etcd is away for longer than a lease lives."""
    run.cluster.etcd.kill()
    try:
        pause(_TTL)
        yield
    finally:
        run.cluster.etcd.start()
