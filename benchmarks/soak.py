# SPDX-License-Identifier: Apache-2.0
"""Kills in a row, at random moments and of random kinds: recoveries, digest, leaks."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.jobs import JobRun, pause
from benchmarks.table import Row
from coordinator.cli.localcluster import LocalCluster
from coordinator.model import JobSpec

_KILLS: Final = 20
_STEPS: Final = 8000
_TTL: Final = 2.0
_SETTLE: Final = 20.0
_NODES: Final = 4


def rows() -> list[Row]:
    """20 kills, then the same run undisturbed.

    The node of slot 0 is spared, so that a trainer and a workerd live through all of them: their
    threads and descriptors after the last recovery are compared with those after the first.
    """
    chance = random.Random(20)  # noqa: S311 - moments, not secrets
    with LocalCluster(nodes=_NODES, lease_ttl=_TTL) as cluster:
        run = JobRun(cluster, _spec(cluster, "soak", spares=1))
        run.wait_running()
        spared = run.node_of(0)
        before: dict[str, int] = {}
        seconds = []
        for number in range(_KILLS):
            pause(2.0 * chance.random())
            mend = chance.choice((_trainer, _node, _workerd, _leader))(run, chance)
            incident = run.wait_recovered()
            seconds.append((incident.marks[-1].time_ns - incident.marks[0].time_ns) / 1e9)
            mend()
            run.wait_running()
            if number == 0:
                before = _counts(run, spared, {})
        after = _counts(run, spared, before)
        (cluster.folder / "hurry").touch()
        disturbed = run.finish(600.0)
    with LocalCluster(nodes=_NODES - 1, lease_ttl=_TTL) as cluster:
        (cluster.folder / "hurry").touch()
        undisturbed = JobRun(cluster, _spec(cluster, "soak", spares=0)).finish(600.0)
    identical = bool(disturbed) and disturbed == undisturbed
    return [
        Row.of("soak.kills", [float(run.incidents)], "", versus="kills", against=float(_KILLS)),
        Row.of("soak.recovery", seconds, "s"),
        Row.of("soak.identical", [float(identical)], "", versus="undisturbed", against=1.0),
        *(
            Row.of(f"soak.leaked.{what}", [float(after[what] - before[what])], "")
            for what in sorted(before)
        ),
    ]


def _spec(cluster: LocalCluster, name: str, spares: int) -> JobSpec:
    script = Path(__file__).with_name("soak_job.py")
    return JobSpec(
        name=name,
        command=(sys.executable, str(script), str(_STEPS), str(cluster.folder / "hurry")),
        environment=(("OMP_NUM_THREADS", "1"),),
        replicas=_NODES - 1,
        spares=spares,
        seed=3,
        restarts=2 * _KILLS,
    )


# A kill returns what brings back what it has taken.


def _trainer(run: JobRun, chance: random.Random) -> Callable[[], None]:
    run.kill_trainer(chance.randrange(1, _NODES - 1))
    return lambda: None


def _node(run: JobRun, chance: random.Random) -> Callable[[], None]:
    name, _ = run.kill_node(chance.randrange(1, _NODES - 1))
    return lambda: run.cluster.start_node(name)


def _workerd(run: JobRun, chance: random.Random) -> Callable[[], None]:
    name = run.node_of(chance.randrange(1, _NODES - 1))
    run.cluster.kill_workerd(name)
    return lambda: run.cluster.start_node(name)


def _leader(run: JobRun, chance: random.Random) -> Callable[[], None]:
    name = run.cluster.kill_leader()
    run.kill_trainer(chance.randrange(1, _NODES - 1))
    return lambda: run.cluster.start_coordinator(name)


def _counts(run: JobRun, node: str, target: dict[str, int]) -> dict[str, int]:
    """Processes of the cluster; threads and descriptors of one node's workerd and trainer.

    What a recovery needed is given back soon after it: waits for that, at most 20 s.
    """
    workerd = run.cluster.nodes[node].pid
    (trainer,) = run.cluster.trainers(node).values()
    counts: dict[str, int] = {}
    for _ in range(int(_SETTLE)):
        pause(1.0)
        new = {"processes": len(run.cluster.running())}
        for name, pid in (("workerd", workerd), ("trainer", trainer)):
            new[f"{name}_threads"] = len(os.listdir(f"/proc/{pid}/task"))
            new[f"{name}_descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        if target and all(new[name] <= target[name] for name in target):
            return new
        if not target and new == counts:
            return new
        counts = new
    return counts
