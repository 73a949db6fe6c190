# SPDX-License-Identifier: Apache-2.0
"""A long run in which anything is killed at any moment, every third time two things together."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.jobs import JobRun, pause
from benchmarks.table import Row
from coordinator.cli.localcluster import LocalCluster
from coordinator.model import JobSpec

_KILLS: Final = 200
_REPLICAS: Final = 3
_SPARES: Final = 2
_STEPS: Final = 300 * _KILLS  # more than are done, at their pace, until the last kill
_TTL: Final = 2.0
_END: Final = 1800.0

_Kill = Callable[["_Strikes"], bool]
"""Whether there was anything to kill."""


def rows() -> list[Row]:
    """200 kills, then the same run undisturbed.

    Whatever is killed: the job must run again with all its replicas and spares before the next
    time, no incident may cost more than one step, and the final state must be the same.
    """
    chance = random.Random(200)  # noqa: S311 - moments, not secrets
    with LocalCluster(nodes=_REPLICAS + _SPARES, lease_ttl=_TTL) as cluster:
        run = JobRun(cluster, _spec(cluster, _SPARES))
        run.wait_running()
        done: dict[str, int] = {}
        while sum(done.values()) < _KILLS:
            pause(chance.random())
            strikes = _Strikes(run, chance)
            for number in range(1 if chance.random() < 2 / 3 else 2):
                if number:
                    pause(1.5 * chance.random())  # in the middle of a recovery, or just after
                name, strike = chance.choice(sorted(_ALL.items()))
                if strike(strikes):
                    done[name] = done.get(name, 0) + 1
            for mend in strikes.mends:
                mend()
            run.wait_whole()
            print(f"{sum(done.values())} kills, step {run.step()}", flush=True)
        (cluster.folder / "hurry").touch()
        disturbed = run.finish(_END)
        lost = [float(one.lost_steps) for one in cluster.admin.describe("kills").incidents]
    with LocalCluster(nodes=_REPLICAS, lease_ttl=_TTL) as cluster:
        (cluster.folder / "hurry").touch()
        undisturbed = JobRun(cluster, _spec(cluster, 0)).finish(_END)
    identical = bool(disturbed) and disturbed == undisturbed
    return [
        Row.of("kills.identical", [float(identical)], "", versus="undisturbed", against=1.0),
        Row.of("kills.incidents", [float(len(lost))], ""),
        Row.of("kills.lost", lost, "steps"),
        *(Row.of(f"kills.{name}", [float(count)], "") for name, count in sorted(done.items())),
    ]


def _spec(cluster: LocalCluster, spares: int) -> JobSpec:
    script = Path(__file__).with_name("soak_job.py")
    return JobSpec(
        name="kills",
        command=(sys.executable, str(script), str(_STEPS), str(cluster.folder / "hurry")),
        environment=(("OMP_NUM_THREADS", "1"),),
        replicas=_REPLICAS,
        spares=spares,
        seed=3,
        restarts=10 * _KILLS,
    )


@dataclass
class _Strikes:
    """What is killed together. One replica's node and trainer are always left alone."""

    run: JobRun
    chance: random.Random
    mends: list[Callable[[], None]] = field(default_factory=list)
    hit: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        nodes = self.run.nodes()
        self.targets = self.chance.sample(sorted(nodes), len(nodes))[1:]

    def node(self) -> str:
        """A placed node that hasn't been hit yet."""
        placed = [one for one in self.targets if one not in self.hit]
        name = self.chance.choice(placed)
        self.hit.add(name)
        return name


def _trainer(strikes: _Strikes) -> bool:
    strikes.run.kill_trainers(strikes.node())
    return True


def _node(strikes: _Strikes) -> bool:
    name = strikes.node()
    strikes.run.cluster.kill_node(name)
    strikes.mends.append(partial(strikes.run.cluster.start_node, name))
    return True


def _workerd(strikes: _Strikes) -> bool:
    name = strikes.node()
    strikes.run.cluster.kill_workerd(name)
    strikes.mends.append(partial(strikes.run.cluster.start_node, name))
    return True


def _spare(strikes: _Strikes) -> bool:
    cluster, placed = strikes.run.cluster, strikes.run.nodes()
    living = [name for name, one in cluster.nodes.items() if one.alive and name not in placed]
    if not living:
        return False
    name = strikes.chance.choice(sorted(living))
    cluster.kill_node(name)
    strikes.mends.append(partial(cluster.start_node, name))
    return True


def _leader(strikes: _Strikes) -> bool:
    cluster = strikes.run.cluster
    if not all(one.alive for one in cluster.coordinators.values()):
        return False  # the other one is needed
    strikes.mends.append(partial(cluster.start_coordinator, cluster.kill_leader()))
    return True


def _etcd(strikes: _Strikes) -> bool:
    strikes.run.cluster.restart_etcd()
    return True


_ALL: Final[dict[str, _Kill]] = {
    "trainer": _trainer,
    "node": _node,
    "workerd": _workerd,
    "spare": _spare,
    "leader": _leader,
    "etcd": _etcd,
}
