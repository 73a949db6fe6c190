# SPDX-License-Identifier: Apache-2.0
"""A trainer's life on a node, from its start to the job's end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from coordinator.model import Phase, StepPhase, TrainerState, Warm
from coordinator.store import Delete, Store, keys
from protos.node_pb2 import ProbeRequest
from protos.node_pb2_grpc import NodeServiceStub
from tests.integration.workerd.support import Leader, Workerd, marked, wait_for

StartWorkerd = Callable[..., Workerd]
MakeLeader = Callable[..., Leader]


def warm(lead: Leader, node: str) -> str:
    """Wait until a spare is warm; its trainer's instance."""

    def found() -> str | None:
        record = lead.node(node)
        if record is None or record.warm != Warm(lead.job, 1):
            return None
        return record.trainers[0].instance

    return wait_for(found, f"{node} is warm")


def finished(lead: Leader, node: str) -> tuple[int, str] | None:
    """The final step and digest of a node's first rank."""
    progress = lead.progress(node)
    if progress is None or progress.ranks[0].phase is not StepPhase.DONE:
        return None
    return progress.ranks[0].step, progress.ranks[0].digest


def test_from_start_to_progress(workerd: StartWorkerd, leader: MakeLeader) -> None:
    address = workerd("n0", "--label", "rack=r1").listening()
    lead = leader()
    record = lead.node("n0")
    assert record is not None
    assert (record.control_address, record.labels) == (address, (("rack", "r1"),))
    with grpc.insecure_channel(address) as channel:
        reply = NodeServiceStub(channel).Probe(ProbeRequest(), timeout=10)
    assert (reply.node, reply.incarnation) == ("n0", record.incarnation)
    assert reply.boot_id == record.boot_id != ""

    acks = lead.run("n0")
    rank = acks["n0"].ranks[0]
    assert (rank.phase, rank.step, rank.initial_digest) == (StepPhase.EMPTY, -1, "d0")
    assert rank.offer is not None
    lead.steps_on("n0")
    placed = lead.trainers("n0", TrainerState.PLACED)
    assert [(one.instance, one.since) for one in placed] == [(rank.instance, 1)]


def test_a_later_generation_stops_and_goes_on(workerd: StartWorkerd, leader: MakeLeader) -> None:
    workerd("n0").listening()
    lead = leader()
    first = lead.run("n0")["n0"].ranks[0]
    lead.steps_on("n0")
    second = lead.run("n0")["n0"].ranks[0]
    assert second.instance == first.instance
    assert second.phase is StepPhase.COMPUTING
    assert second.step > 0
    lead.steps_on("n0")


def test_a_hot_spare_is_placed_as_the_process_that_it_is(
    workerd: StartWorkerd, leader: MakeLeader
) -> None:
    workerd("n0").listening()
    workerd("n1").listening()
    lead = leader()
    lead.run("n0")
    lead.keep_warm("n1")
    spare = warm(lead, "n1")
    lead.steps_on("n0")

    acks = lead.run("n1")  # slot 0 goes from n0 to n1; nobody holds a state but n0, which is gone
    assert acks["n1"].ranks[0].instance == spare
    assert [one.instance for one in lead.trainers("n1", TrainerState.PLACED)] == [spare]
    wait_for(lambda: not lead.trainers("n0", TrainerState.PLACED), "n0's trainer has ended")
    wait_for(lambda: lead.progress("n0") is None, "n0 has cleared its place")


def test_two_ranks_on_a_node(workerd: StartWorkerd, leader: MakeLeader) -> None:
    workerd("n0", "--devices", "cpu:2").listening()
    lead = leader(replicas=2, ranks_per_node=2)
    ranks = lead.run("n0")["n0"].ranks
    assert [one.rank for one in ranks] == [0, 1]
    assert [one.offer is not None for one in ranks] == [True, False]
    lead.steps_on("n0")


def test_a_node_with_too_few_devices_says_so(workerd: StartWorkerd, leader: MakeLeader) -> None:
    workerd("n0").listening()
    lead = leader(replicas=2, ranks_per_node=2)
    lead.keep_warm("n0")

    def unhealthy() -> str:
        record = lead.node("n0")
        return record.unhealthy if record is not None else ""

    assert "needs 2 devices" in wait_for(unhealthy, "n0 is unhealthy")
    assert lead.trainers("n0", *TrainerState) == []


def test_the_jobs_end_releases_everybody(
    workerd: StartWorkerd, leader: MakeLeader, folder: Path
) -> None:
    workerd("n0").listening()
    workerd("n1").listening()
    lead = leader(environment={"FAKE_TOTAL": "20"})
    lead.run("n0")
    lead.keep_warm("n1")
    warm(lead, "n1")

    assert wait_for(lambda: finished(lead, "n0"), "the rank is done") == (20, "final")
    lead.phase(Phase.FINISHED)
    wait_for(lambda: not (_running(lead, "n0") or _running(lead, "n1")), "all have left")
    # Their own exit, not workerd's doing.
    for node in ("n0", "n1"):
        assert "ended: code 0\n" in (folder / f"{node}.log").read_text()
    progress = lead.progress("n0")
    assert progress is not None, "the digest stays until the leader takes the place away"


def test_the_end_recorded_together_with_the_place_taken_away(
    workerd: StartWorkerd, leader: MakeLeader, store: Store
) -> None:
    one = workerd("n0")
    one.listening()
    lead = leader(environment={"FAKE_TOTAL": "5"})
    lead.run("n0")
    wait_for(lambda: finished(lead, "n0"), "the rank is done")
    store.commit([], [Delete(keys.assignment("n0")), lead.record_of(Phase.FINISHED)])
    wait_for(lambda: not _running(lead, "n0"), "the trainer has left")
    assert "ended: code 0\n" in one.logged()


def test_a_stopped_job_ends_placed_and_spare_trainers(
    workerd: StartWorkerd, leader: MakeLeader, prefix: str
) -> None:
    workerd("n0").listening()
    workerd("n1").listening()
    mark = f"TEST_MARK={prefix}"
    lead = leader(environment={"TEST_MARK": prefix, "FAKE_CHILDREN": "2"})
    lead.run("n0")
    lead.keep_warm("n1")
    warm(lead, "n1")
    assert len(marked(mark)) == 6
    lead.phase(Phase.STOPPED)
    wait_for(lambda: not marked(mark), "no process of the job is left")
    wait_for(lambda: not _running(lead, "n0"), "n0 says so")


def _running(lead: Leader, node: str) -> bool:
    states = (TrainerState.STARTING, TrainerState.WARM, TrainerState.PLACED)
    return bool(lead.trainers(node, *states))
