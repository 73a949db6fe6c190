# SPDX-License-Identifier: Apache-2.0
"""A second failure while the first is being recovered, and several at once.

``docs/protocol.md`` has the table of which failure in which phase these cover.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from coordinator.model import JobSpec, JobState, Phase
from tests.cluster.hold import ANCHOR, OTHER, VICTIM, recovery
from tests.cluster.support import LEASE_TTL, RECOVERY, Run, running, spec, wait_until

Reference = Callable[[JobSpec], list[str]]
Failure = Callable[[Run], None]

pytestmark = pytest.mark.timeout(300)

PATIENT = "--pause=120"
"""A survivor that a test holds up is not to be given up for it, however slow the machine."""


def _survivors_trainer(run: Run) -> None:
    run.cluster.kill_trainer(run.spec.name, OTHER)


def _survivors_node(run: Run) -> None:
    run.cluster.kill_node(run.node_of(OTHER))


def _survivors_workerd(run: Run) -> None:
    run.cluster.kill_workerd(run.node_of(OTHER))


def _replacement(run: Run) -> None:
    run.cluster.kill_node(run.node_of(VICTIM))


def _replacements_trainer(run: Run) -> None:
    (pid,) = run.cluster.trainers(run.node_of(VICTIM)).values()
    os.kill(pid, signal.SIGKILL)


def _other_spare(run: Run) -> None:
    placed = {run.node_of(slot) for slot in range(3)}
    run.cluster.kill_node(
        next(name for name, one in run.cluster.nodes.items() if one.alive and name not in placed)
    )


def _victim_comes_back(run: Run) -> None:
    run.cluster.start_node(next(name for name, one in run.cluster.nodes.items() if not one.alive))


def _etcd_for_a_moment(run: Run) -> None:
    run.cluster.restart_etcd()


def _etcd_for_long(run: Run) -> None:
    run.cluster.etcd.kill()
    # longer than any lease lives, and than a workerd or a leader trusts its own
    threading.Event().wait(LEASE_TTL + 1.0)
    run.cluster.etcd.start()


def _leader(run: Run) -> None:
    run.cluster.kill_leader()


FAILURES: list[Failure] = [
    _survivors_trainer,
    _survivors_node,
    _survivors_workerd,
    _replacement,
    _replacements_trainer,
    _other_spare,
    _victim_comes_back,
    _etcd_for_a_moment,
    _etcd_for_long,
    _leader,
]


@pytest.mark.parametrize("phase", [Phase.PAUSE, Phase.RESTORE], ids=lambda phase: phase.name)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: one.__name__.strip("_"))
def test_a_second_failure_in_the_middle(
    reference: Reference, failure: Failure, phase: Phase
) -> None:
    job = spec(spares=2)
    wanted = reference(job)
    with running(5, PATIENT) as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        run.wait_step(20)
        anchor = _instance(run)
        with recovery(run, phase):
            failure(run)
        assert run.finish() == wanted
        incidents = run.describe().incidents
        assert all(one.closed and one.lost_steps <= 1 for one in incidents)
        assert _instance(run) == anchor, "it was never to blame"


def test_a_survivor_that_never_acknowledges_is_lost_itself(reference: Reference) -> None:
    job = spec(spares=2)
    wanted = reference(job)
    with running(5, "--pause=3") as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        run.wait_step(20)
        node, silent = run.node_of(ANCHOR), cluster.trainer(job.name, ANCHOR)
        with recovery(run, Phase.PAUSE):
            run.wait_incident()
        assert run.node_of(ANCHOR) != node
        wait_until(lambda: silent not in cluster.trainers(node).values())
        assert run.finish() == wanted


def test_a_node_dies_right_after_a_recovery(reference: Reference) -> None:
    job = spec(spares=2)
    wanted = reference(job)
    with running(5) as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        first = run.wait_step(20).generation.generation
        cluster.kill_node(run.node_of(VICTIM))
        run.wait(
            lambda one: (
                one.generation.generation > first and one.generation.phase == Phase.RUNNING.value
            ),
            RECOVERY,
            "it runs again",
        )
        cluster.kill_node(run.node_of(OTHER))
        assert run.finish() == wanted


def test_all_but_one_node_die_at_once(reference: Reference) -> None:
    job = spec(spares=2)
    wanted = reference(job)
    with running(5) as cluster:
        run = Run(cluster, job)
        run.wait_spare(2)
        run.wait_step(20)
        cluster.kill_node(*(run.node_of(slot) for slot in (OTHER, VICTIM)))
        assert run.finish() == wanted
        assert all(one.lost_steps <= 1 for one in run.describe().incidents)


def test_with_the_last_holder_the_job_is_lost_and_says_what_is_missing() -> None:
    with running(5) as cluster:
        run = Run(cluster, spec(spares=2))
        run.wait_spare(2)
        run.wait_step(20)
        cluster.kill_node(*(run.node_of(slot) for slot in (ANCHOR, OTHER, VICTIM)))
        lost = run.wait_state(JobState.LOST)
        assert lost.status.reason == "no living trainer holds shard positions 0 any more"


def _instance(run: Run) -> str:
    """Which trainer the anchor's is."""
    return next(one for one in run.describe().slots if one.slot == ANCHOR).ranks[0].instance
