# SPDX-License-Identifier: Apache-2.0
"""One run of the simulator: begin, let things go wrong, let them be mended, look at the end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.model import JobState, Phase
from tests.simulator.checks import Recovery
from tests.simulator.cluster import Cluster
from tests.simulator.faults import HOUR, Faults, Kind
from tests.simulator.group import Violation
from tests.simulator.memo import decoded_once

_START = HOUR  # seconds until the job must run for the first time
_END = 4 * HOUR  # seconds after the last fault until it must run again
_LAST = 25  # lines of what came before a violation


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to. Times are virtual seconds, but ``real``."""

    nodes: int
    seed: int
    seconds: float
    """From the first RUNNING to the end of the faults."""
    steps: int
    step_seconds: float
    faults: dict[str, int]
    recoveries: tuple[Recovery, ...]
    end: str
    """How it ended: RUNNING again, or WAITING or LOST with the reason."""
    fingerprint: str
    commits: int
    probes: int
    expired: int
    real: float
    phases: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def effective(self) -> float:
        """The share of the time that went into steps that count."""
        return self.steps * self.step_seconds / self.seconds


def run(
    nodes: int,
    hours: float,
    seed: int,
    kinds: Sequence[Kind],
    *,
    repair: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Simulate so many hours of faults, or until Ctrl-C. Raises Violation, and says what came
    before it.

    ``repair`` scales how long machines are away; ``tell`` hears how far it is.
    """
    real = time.monotonic()
    with decoded_once():
        cluster = Cluster(nodes, seed)
        faults = Faults(cluster, tuple(kinds), repair)
        faults.hold = True
        try:
            outcome = _run(cluster, faults, hours, tell)
        except Violation as error:
            before = "\n  ".join(faults.log[-_LAST:])
            raise Violation(
                f"seed {seed}, {nodes} nodes, at {cluster.clock.now():.3f} s: {error}\n  {before}"
            ) from error
    seconds, steps, end = outcome
    checks = cluster.checks
    done = tuple(checks.recoveries[1:])  # the first is the job's start
    return Outcome(
        nodes=nodes,
        seed=seed,
        seconds=seconds,
        steps=steps,
        step_seconds=cluster.times.step,
        faults=faults.counts,
        recoveries=done,
        end=end,
        fingerprint=checks.fingerprint,
        commits=cluster.etcd.commits,
        probes=cluster.probes,
        expired=cluster.etcd.lessor.expired,
        real=time.monotonic() - real,
        phases=_phases(done),
    )


def _run(
    cluster: Cluster, faults: Faults, hours: float, tell: Callable[[str], None]
) -> tuple[float, int, str]:
    checks = cluster.checks
    if not cluster.run_until(lambda: bool(checks.recoveries), _START):
        raise Violation(f"the job has not begun: {cluster.status()}")
    began, before = checks.recoveries[0].running, checks.highest
    tell(f"the job runs after {began - checks.recoveries[0].began:.0f} s")
    faults.hold = False
    until = cluster.clock.now() + hours * HOUR
    hour = 0
    stopped = False
    try:
        while cluster.clock.now() < until and not _over(cluster):
            cluster.run_until(lambda: _over(cluster), min(HOUR, until - cluster.clock.now()))
            hour += 1
            tell(
                f"hour {hour}: step {checks.highest}, {sum(faults.counts.values())} faults, "
                f"{len(checks.recoveries) - 1} recoveries, {cluster.etcd.commits} writes"
            )
    except KeyboardInterrupt:
        stopped = True
    seconds, steps = cluster.clock.now() - began, checks.highest - before
    if stopped:
        return seconds, steps, "stopped before its end"
    faults.end()
    well = cluster.run_until(
        lambda: _over(cluster) or (cluster.running and checks.open is None), _END
    )
    status = cluster.status()
    if _over(cluster):
        return seconds, steps, f"{status.state.name}: {status.reason}"
    if not well:
        raise Violation(f"there is no end to it: {status}")
    cluster.run_until(lambda: cluster.status().state is JobState.RUNNING, 60.0)
    status = cluster.status()
    if status.state is not JobState.RUNNING:
        raise Violation(f"the job makes steps, its status is {status}")
    return seconds, steps, status.state.name


def _over(cluster: Cluster) -> bool:
    generation = cluster.checks.generation
    return generation is not None and generation.phase is Phase.LOST


def _phases(recoveries: Sequence[Recovery]) -> dict[str, tuple[float, ...]]:
    return {
        "detect": tuple(one.paused - one.began for one in recoveries),
        "pause": tuple(one.restoring - one.paused for one in recoveries),
        "restore": tuple(one.running - one.restoring for one in recoveries),
        "first step": tuple(one.step - one.running for one in recoveries),
        "whole": tuple(one.step - one.began for one in recoveries),
    }


def report(outcome: Outcome) -> str:
    """For people."""
    lines = [
        f"{outcome.nodes} nodes, {outcome.seconds / HOUR:.1f} h, seed {outcome.seed}: "
        f"{outcome.end}",
        "",
        "faults                                count",
    ]
    lines += [f"  {name:36}{count:5}" for name, count in sorted(outcome.faults.items())]
    lines += [
        f"  {'all':36}{sum(outcome.faults.values()):5}",
        "",
        f"recoveries: {len(outcome.recoveries)}, over "
        f"{sum(one.generations for one in outcome.recoveries)} generations",
        "  seconds        median     mean      90%     longest",
    ]
    for name, values in outcome.phases.items():
        if values:
            at = sorted(values)
            high = at[min(len(at) - 1, math.ceil(0.9 * len(at)) - 1)]
            lines.append(
                f"  {name:12}{statistics.median(at):9.1f}{statistics.fmean(at):9.1f}"
                f"{high:9.1f}{at[-1]:12.1f}"
            )
    lines += [
        "",
        f"steps: {outcome.steps} of {outcome.step_seconds:g} s; effective training time "
        f"{100 * outcome.effective:.2f} %",
        f"etcd: {outcome.commits} writes by clients, {outcome.expired} leases expired; "
        f"{outcome.probes} probes",
        f"fingerprint {outcome.fingerprint}; {outcome.real:.0f} s of real time",
    ]
    return "\n".join(lines)
