# SPDX-License-Identifier: Apache-2.0
"""Some hours of small simulated clusters, with more faults than any real one has.

``make simulate`` takes larger ones for longer; a failure there or here names its seed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from coordinator.model import Contact, JobSpec, JobState, Line, Phase
from coordinator.plan import evidence, recover
from tests.simulator import mix
from tests.simulator.cluster import Cluster
from tests.simulator.faults import Faults
from tests.simulator.group import Violation
from tests.simulator.memo import decoded_once
from tests.simulator.run import Outcome, report, run
from tests.simulator.times import Times

HOLDER = JobSpec(
    name="job", command=("train",), replicas=4, shard_positions=2, spares=2, restarts=1000
)

SLOW = Times(reduced=0.4, agreed=0.6, skew=0.2, update=0.1)
"""Ranks that take long to agree: many stops come to them meanwhile."""


def begun(
    seed: int = 0, spec: JobSpec = HOLDER, nodes: int = 10, times: Times | None = None
) -> tuple[Cluster, Faults]:
    """A small cluster whose job runs, with hot spares."""
    cluster = Cluster(nodes, seed, spec=spec, times=times)
    assert cluster.run_until(lambda: bool(cluster.checks.recoveries), 3600)
    cluster.clock.run_until(cluster.clock.now() + 200)
    return cluster, Faults(cluster, ())


def recovered(cluster: Cluster, recoveries: int, seconds: float = 600.0) -> None:
    """Wait for as many recoveries after the job's start."""
    checks = cluster.checks
    assert cluster.run_until(lambda: len(checks.recoveries) > recoveries, seconds), cluster.status()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_goes_wrong_is_mended(seed: int) -> None:
    outcome = run(40, 1.0, seed, mix.storm(30), repair=0.2)
    assert outcome.end == "RUNNING"
    assert len(outcome.recoveries) > 3
    assert outcome.steps > 20


def test_the_published_mix() -> None:
    outcome = run(100, 4.0, 7, mix.published(1000), repair=0.2)
    assert outcome.end == "RUNNING"
    assert 0.2 < outcome.effective < 1.0
    assert "effective training time" in report(outcome)
    assert sum(count for _, _, count in mix.CAUSES) == 419


def test_the_same_seed_gives_the_same_run() -> None:
    def once(seed: int) -> Outcome:
        return run(20, 0.3, seed, mix.storm(40), repair=0.2)

    first, second, other = once(3), once(3), once(4)
    assert first.fingerprint == second.fingerprint
    assert first.recoveries == second.recoveries
    assert first.fingerprint != other.fingerprint


def test_a_crash_costs_its_detection_and_one_step() -> None:
    with decoded_once():
        cluster, faults = begun()
        before = cluster.checks.highest
        owner = cluster.nodes[cluster.checks.owner(3)]
        cluster.checks.fault(owner.name, "crash")
        owner.crash()
        recovered(cluster, 1)
        (recovery,) = cluster.checks.recoveries[1:]
        assert recovery.generations == 1
        assert 0.5 < recovery.paused - recovery.began < 2, "three pings, and no lease"
        assert recovery.resume_step >= before
        assert recovery.step - recovery.began < 40
        assert not faults.counts


def test_a_verdict_on_a_frozen_node_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = evidence.weigh

    def hasty(contact: Contact, *more: Any) -> evidence.Weighed:
        line = Line.REFUSED if contact.line is Line.FROZEN else contact.line
        return weigh(replace(contact, line=line), *more)

    def freeze() -> None:
        cluster, _ = begun()
        generation = cluster.checks.generation
        owner = cluster.nodes[cluster.checks.owner(3)]
        owner.hush()
        cluster.clock.run_until(cluster.clock.now() + 2.5)
        owner.mend()
        cluster.clock.run_until(cluster.clock.now() + 30)
        assert cluster.checks.generation == generation

    with decoded_once():
        freeze()
        monkeypatch.setattr(evidence, "weigh", hasty)
        with pytest.raises(Violation, match="can be reached, and is declared dead"):
            freeze()


def test_all_leases_may_end_while_the_leader_changes() -> None:
    """A new leader finds no node's record, and has to know where to ask them."""
    with decoded_once():
        cluster, _ = begun()
        generation = cluster.checks.generation
        cluster.etcd.compact(cluster.etcd.revision)
        for node in cluster.nodes.values():
            node.store.cut(after=1.5)
        cluster.clock.run_until(cluster.clock.now() + 4)
        leader = cluster.leader
        assert leader is not None
        leader.crash()
        assert cluster.run_until(lambda: cluster.leader is not None, 30)
        cluster.clock.run_until(cluster.clock.now() + 15)
        assert not any("/nodes/" in key for key in cluster.etcd.items)
        for node in cluster.nodes.values():
            node.store.mend()
        cluster.clock.run_until(cluster.clock.now() + 60)
        assert cluster.checks.generation == generation, "nobody has died"
        assert cluster.running
        assert cluster.status().state is JobState.RUNNING


def test_a_job_is_lost_only_with_the_last_holder_of_a_position() -> None:
    spec = JobSpec(
        name="job", command=("train",), replicas=2, shard_positions=2, spares=1, restarts=9
    )
    with decoded_once():
        cluster, _ = begun(spec=spec, nodes=5)
        for slot in (1, 3):
            cluster.nodes[cluster.checks.owner(slot)].crash()
        checks = cluster.checks

        def lost() -> bool:
            return checks.generation is not None and checks.generation.phase is Phase.LOST

        assert cluster.run_until(lost, 600), cluster.status()
        assert checks.generation is not None
        assert "shard positions 1" in checks.generation.reason


def stopped_in_the_middle(cluster: Cluster) -> None:
    """Many stops come to a group that nothing disturbs, some while its ranks agree.

    Each time a workerd stands still: its node is given up while its trainer goes on.
    """
    for number in range(12):
        cluster.clock.run_until(cluster.clock.now() + 60 + 1.7 * number)
        node = cluster.nodes[cluster.checks.owner(number % cluster.spec.slots)]
        node.hush()
        recovered(cluster, number + 1)
        node.mend()


def test_who_has_agreed_rolls_forward() -> None:
    with decoded_once():
        cluster, _ = begun(times=SLOW)
        stopped_in_the_middle(cluster)
        assert cluster.rolled_forward > 0


def test_a_resume_step_that_is_too_low_is_noticed() -> None:
    with (
        decoded_once(),
        patch.object(recover, "resume_step", lambda held: min(one.step for one in held)),
    ):
        cluster, _ = begun(times=SLOW)
        with pytest.raises(AssertionError, match="the protocol was violated"):
            stopped_in_the_middle(cluster)


def test_training_goes_on_while_etcd_is_away() -> None:
    with decoded_once():
        cluster, _ = begun()
        generation, before = cluster.checks.generation, cluster.checks.highest
        cluster.etcd.kill()
        cluster.clock.run_until(cluster.clock.now() + 120)
        cluster.etcd.start()
        cluster.clock.run_until(cluster.clock.now() + 120)
        assert cluster.checks.generation == generation
        assert cluster.checks.highest >= before + 30
