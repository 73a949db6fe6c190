# SPDX-License-Identifier: Apache-2.0
"""How long a recovery takes, from SIGKILL to the first committed step after it, and its phases."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from benchmarks.jobs import JobRun, pause
from benchmarks.table import Row
from coordinator.cli import demo
from coordinator.cli.localcluster import LocalCluster
from protos import incident_pb2

_SAMPLES: Final = 10
_TTL: Final = 5.0
_TARGET: Final = 1.5
_STEPS: Final = 1_000_000
_PHASES: Final = ("detect", "pause", "pull", "regroup", "first_step")
_MARKS: Final = ("detected", "paused", "pulled", "regrouped", "first_step")


def process() -> list[Row]:
    """A trainer is killed; its node lives."""

    def kill(run: JobRun, rank: int) -> int:
        return run.kill_trainer(rank)

    return _rows("recovery.process", _measure(kill), _TARGET, f"target of {_TARGET:g} s")


def node() -> list[Row]:
    """A whole node is killed: workerd and its trainer."""

    def kill(run: JobRun, rank: int) -> int:
        name, at = run.kill_node(rank)
        run.cluster.start_node(name)
        return at

    target = _TTL + _TARGET
    return _rows("recovery.node", _measure(kill), target, f"target of TTL + {_TARGET:g} s")


def _measure(kill: Callable[[JobRun, int], int]) -> list[dict[str, float]]:
    chance = random.Random(1)  # noqa: S311 - moments, not secrets
    spec = demo.job()
    spec = replace(
        spec,
        name="recovery",
        command=(*spec.command[:-1], str(_STEPS)),
        restarts=2 * _SAMPLES,
    )
    samples = []
    with LocalCluster(nodes=spec.slots + 1, lease_ttl=_TTL) as cluster:
        run = JobRun(cluster, spec)
        for number in range(_SAMPLES):
            run.wait_running()
            pause(1.0 + chance.random())
            at = kill(run, number % spec.ranks)
            samples.append(_spans(run.wait_recovered(), at))
        cluster.admin.stop(spec.name, "measured")
    return samples


def _spans(incident: incident_pb2.Incident, killed_ns: int) -> dict[str, float]:
    """Seconds by phase; detection ends when the culprit is known."""
    last = {mark.phase: mark.time_ns for mark in incident.marks}
    before = killed_ns
    spans = {}
    for phase, mark in zip(_PHASES, _MARKS, strict=True):
        spans[phase] = (last[mark] - before) / 1e9
        before = last[mark]
    spans["total"] = (before - killed_ns) / 1e9
    return spans


def _rows(name: str, samples: list[dict[str, float]], target: float, versus: str) -> list[Row]:
    total = [one["total"] for one in samples]
    return [
        Row.of(name, total, "s", versus=versus, against=target),
        *(Row.of(f"{name}.{phase}", (one[phase] for one in samples), "s") for phase in _PHASES),
    ]
