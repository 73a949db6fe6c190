# SPDX-License-Identifier: Apache-2.0
"""Planned changes: over real coordinators, asked where they don't lead, on a real etcd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from coordinator.model import Cause, JobSpec, JobState, NodeFlags, Phase
from coordinator.store import keys
from protos import admin_pb2, admin_pb2_grpc
from tests.integration.coordinator.cluster import Cluster
from tests.integration.coordinator.processes import SOON, Coordinator

DEMO = JobSpec(name="demo", command=("train",), replicas=2, spares=1, restarts=1)
Code = grpc.StatusCode
Call = Callable[[admin_pb2_grpc.AdminStub], Any]


@pytest.fixture
def follower(cluster: Cluster) -> Coordinator:
    """One that doesn't lead, while another does."""
    cluster.launch("c0", "c1")
    leader = cluster.leader()
    return next(one for one in cluster.coordinators.values() if one is not leader)


def cordon(node: str, reason: str = "", dry_run: bool = False) -> Call:
    request = admin_pb2.CordonNodeRequest(node=node, reason=reason, dry_run=dry_run)
    return lambda stub: stub.CordonNode(request, timeout=SOON)


def uncordon(node: str, dry_run: bool = False) -> Call:
    request = admin_pb2.UncordonNodeRequest(node=node, dry_run=dry_run)
    return lambda stub: stub.UncordonNode(request, timeout=SOON)


def drain(node: str, reason: str = "", dry_run: bool = False) -> Call:
    request = admin_pb2.DrainNodeRequest(node=node, reason=reason, dry_run=dry_run)
    return lambda stub: stub.DrainNode(request, timeout=SOON)


def substitute(node: str, reason: str = "", dry_run: bool = False) -> Call:
    request = admin_pb2.ReplaceNodeRequest(node=node, reason=reason, dry_run=dry_run)
    return lambda stub: stub.ReplaceNode(request, timeout=SOON)


def pause(job: str = "demo", reason: str = "", dry_run: bool = False) -> Call:
    request = admin_pb2.PauseRecoveryRequest(job=job, reason=reason, dry_run=dry_run)
    return lambda stub: stub.PauseRecovery(request, timeout=SOON)


def resume(job: str = "demo", dry_run: bool = False) -> Call:
    request = admin_pb2.ResumeRecoveryRequest(job=job, dry_run=dry_run)
    return lambda stub: stub.ResumeRecovery(request, timeout=SOON)


def scale(replicas: int, job: str = "demo", dry_run: bool = False) -> Call:
    request = admin_pb2.ScaleJobRequest(job=job, replicas=replicas, dry_run=dry_run)
    return lambda stub: stub.ScaleJob(request, timeout=SOON)


def explain(job: str = "demo") -> Call:
    request = admin_pb2.ExplainJobRequest(job=job)
    return lambda stub: stub.ExplainJob(request, timeout=SOON)


def ask(at: Coordinator, call: Call) -> Any:
    with at.stub() as stub:
        return call(stub)


def flags(cluster: Cluster, node: str) -> NodeFlags:
    found = cluster.load(keys.flags(node))
    return NodeFlags() if found is None else found


def test_a_cordoned_node_takes_no_place_until_it_is_uncordoned(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1")
    first = ask(follower, cordon("n0", "a fan rattles"))
    assert first.changed
    again = ask(follower, cordon("n0", "another reason"))
    assert (again.changed, again.revision) == (False, first.revision)
    assert flags(cluster, "n0").cordoned == "a fan rattles"
    cluster.submit(DEMO, follower)
    cluster.wait(
        lambda: "n0: cordoned: a fan rattles" in cluster.status().reason, "it says who is kept off"
    )
    told = ask(follower, explain())
    assert [one.kind for one in told.actions] == ["wait"]
    assert [(one.node, one.note) for one in told.nodes] == [("n0", "cordoned: a fan rattles")]
    tried = ask(follower, uncordon("n0", dry_run=True))
    assert tried.changed
    assert [one.what for one in tried.plan] == ["write generation 1 PAUSE"]
    assert flags(cluster, "n0").cordoned
    assert ask(follower, uncordon("n0")).changed
    assert not ask(follower, uncordon("n0")).changed
    cluster.runs()
    # what it has it keeps
    ask(follower, cordon("n0"))
    cluster.wait(lambda: cluster.status().step > 5, "it trains on", play=True)
    assert cluster.generation().generation == 1
    # and a dead incarnation stays dead when its node is uncordoned
    cluster.nodes["n0"].kill()
    cluster.wait(lambda: flags(cluster, "n0").dead, "it is dead")
    ask(follower, uncordon("n0"))
    assert flags(cluster, "n0").dead
    assert not flags(cluster, "n0").cordoned


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1", "n2", "n3")
    cluster.submit(DEMO, follower)
    cluster.runs()
    cluster.wait(lambda: cluster.load(keys.spare("n2")), "n2 is the spare", play=True)
    cluster.wait(lambda: not ask(follower, explain()).actions, "nothing is due", play=True)
    answer = ask(follower, cordon("n2", "a fan", dry_run=True))
    assert answer.changed
    assert answer.revision > 0
    assert [(one.kind, one.node, one.reason) for one in answer.plan] == [
        ("spare", "n2", "cordoned: a fan"),
        ("spare", "n3", "a hot spare for job demo"),
    ]
    assert cluster.load(keys.flags("n2")) is None
    assert ask(follower, pause(dry_run=True)).changed
    assert not cluster.load(keys.job_spec("demo")).recovery_paused


def test_a_drained_node_is_replaced_once_another_is_warm(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1")
    cluster.submit(DEMO, follower)
    before = cluster.runs()
    assert ask(follower, drain("n1", "a new rack")).changed
    assert not ask(follower, drain("n1", "another reason")).changed
    cluster.wait(
        lambda: "n1 (slot 1) is draining: a new rack" in cluster.status().reason,
        "the status says what it waits for",
        play=True,
    )
    assert cluster.status().state is JobState.RUNNING
    (told,) = ask(follower, explain()).actions
    assert (told.kind, told.job) == ("wait", "demo")
    assert "no node is free for it" in told.reason
    cluster.add_nodes("n2")
    after = cluster.runs(after=before.generation)
    assert cluster.slot(1).node == "n2"
    cluster.wait(lambda: cluster.incidents()[0].closed, "the incident is over", play=True)
    (incident,) = cluster.incidents()
    assert (incident.cause, incident.nodes) == (Cause.PLANNED, ("n1",))
    assert incident.lost_steps == 0
    assert after.hold == ""
    cluster.wait(lambda: cluster.load(keys.assignment("n1")) is None, "n1 is empty", play=True)
    cluster.wait(lambda: not ask(follower, explain()).actions, "all is done", play=True)
    # it stays off until it is uncordoned
    assert cluster.load(keys.spare("n1")) is None
    assert flags(cluster, "n1").draining == "a new rack"
    ask(follower, uncordon("n1"))
    cluster.wait(lambda: cluster.load(keys.spare("n1")), "it is a spare", play=True)


def test_a_dry_run_of_a_drain_says_who_takes_over(follower: Coordinator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, follower)
    cluster.runs()
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
    cluster.wait(lambda: cluster.status().step > 1, "it has committed", play=True)
    cluster.wait(
        lambda: any("slot 1: n1 -> hot spare n2" in one.reason for one in plan_of(follower)),
        "the plan names the replacement",
        play=True,
    )
    assert cluster.load(keys.flags("n1")) is None
    assert cluster.generation().hold == ""


def plan_of(follower: Coordinator) -> Any:
    return ask(follower, drain("n1", dry_run=True)).plan


def test_a_replaced_node_becomes_a_spare(follower: Coordinator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, follower)
    before = cluster.runs()
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, substitute("n2"))
    assert "'n2' has no place in a job" in refused(caught, Code.FAILED_PRECONDITION)
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, substitute("n2", dry_run=True))
    refused(caught, Code.FAILED_PRECONDITION)
    assert ask(follower, substitute("n0", "a doubt")).changed
    cluster.runs(after=before.generation)
    assert cluster.slot(0).node == "n2"
    cluster.wait(lambda: cluster.load(keys.spare("n0")), "n0 is the spare now", play=True)
    assert flags(cluster, "n0") == NodeFlags()
    assert all(one.lost_steps == 0 for one in cluster.incidents())


def test_a_drain_goes_on_under_the_next_leader(follower: Coordinator, cluster: Cluster) -> None:
    """It falls when the ranks have been asked to stop, and they have not yet."""
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, follower)
    before = cluster.runs()
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
    cluster.wait(lambda: cluster.status().step > 1, "it has committed", play=True)
    ask(follower, drain("n1", "a new rack"))
    cluster.wait(lambda: cluster.generation().hold, "the ranks are to stop")
    old = cluster.leader()
    old.kill()
    cluster.leader(besides=old.name)
    assert cluster.generation().generation == before.generation
    cluster.runs(after=before.generation)
    assert cluster.slot(1).node == "n2"
    assert [one.lost_steps for one in cluster.incidents()] == [0]


def test_a_job_is_scaled_down_and_up(follower: Coordinator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(replace(DEMO, replicas=3, spares=0, min_replicas=2), follower)
    before = cluster.runs()
    cluster.wait(lambda: cluster.status().step > 1, "it has committed", play=True)
    for wrong in (0, 1, 4):
        for dry_run in (False, True):
            with pytest.raises(grpc.RpcError) as caught:
                ask(follower, scale(wrong, dry_run=dry_run))
            message = refused(caught, Code.FAILED_PRECONDITION)
            assert message == (
                f"replicas = {wrong}: job 'demo' can run with 2 (its min_replicas) to 3 replicas"
            )
    (told,) = ask(follower, scale(2, dry_run=True)).plan
    assert "the job shrinks to 2 of 3 replicas" in told.reason
    assert not ask(follower, scale(3)).changed
    assert ask(follower, scale(2)).changed
    assert not ask(follower, scale(2)).changed
    smaller = cluster.runs(after=before.generation)
    assert smaller.absent_replicas == (2,)
    cluster.wait(lambda: cluster.load(keys.assignment("n2")) is None, "n2 is free", play=True)
    cluster.wait(lambda: cluster.status().replicas == 2, "the status says so", play=True)
    cluster.wait(lambda: not ask(follower, explain()).actions, "all is done", play=True)
    assert ask(follower, scale(3)).changed
    larger = cluster.runs(after=smaller.generation)
    assert larger.absent_replicas == ()
    cluster.wait(lambda: all(one.closed for one in cluster.incidents()), "all is over", play=True)
    assert [(one.cause, one.lost_steps) for one in cluster.incidents()] == [(Cause.PLANNED, 0)] * 2


def test_a_job_without_a_minimum_is_not_scaled(follower: Coordinator, cluster: Cluster) -> None:
    cluster.submit(DEMO, follower)
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, scale(1))
    message = refused(caught, Code.FAILED_PRECONDITION)
    assert message == (
        "replicas = 1: job 'demo' can run with 2 replicas only: its min_replicas is not set lower"
    )


def test_a_paused_job_is_left_alone_until_it_is_resumed(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, follower)
    before = cluster.runs()
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
    assert ask(follower, pause(reason="the switch flaps")).changed
    assert not ask(follower, pause(reason="again")).changed
    cluster.wait(
        lambda: cluster.status().reason.endswith("recovery is paused (the switch flaps)"),
        "the status says so",
        play=True,
    )
    assert cluster.status().state is JobState.RUNNING
    cluster.nodes["n1"].kill()
    cluster.wait(
        lambda: "would declare n1" in cluster.status().reason, "it says what it would do", play=True
    )
    assert cluster.status().state is JobState.WAITING
    told = ask(follower, explain())
    assert told.recovery_paused == "the switch flaps"
    assert [one.kind for one in told.actions if one.job] == ["blocked"]
    assert "n1" in {one.node for one in told.nodes}
    assert not flags(cluster, "n1").dead
    tried = ask(follower, resume(dry_run=True))
    assert [(one.kind, one.node) for one in tried.plan] == [("death", "n1")]
    assert cluster.generation().generation == before.generation
    assert ask(follower, resume()).changed
    assert not ask(follower, resume()).changed
    cluster.runs(after=before.generation)
    assert cluster.slot(1).node == "n2"
    with follower.stub() as stub:
        request = admin_pb2.WatchEventsRequest(from_revision=1, job="demo")
        kinds = []
        for event in stub.WatchEvents(request, timeout=SOON):
            kinds.append(event.kind)
            if event.kind == "recovery.resumed":
                break
    assert "recovery.paused" in kinds


def test_a_paused_job_stays_paused_over_a_change_of_the_leader_and_can_be_stopped(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1")
    cluster.submit(DEMO, follower)
    before = cluster.runs()
    ask(follower, pause(reason="careful"))
    cluster.leader().kill()
    cluster.leader(besides=next(n for n in ("c0", "c1") if n != follower.name))
    cluster.nodes["n1"].kill()
    cluster.wait(
        lambda: "would declare n1" in cluster.status().reason, "it says what it would do", play=True
    )
    assert cluster.generation().generation == before.generation
    with follower.stub() as stub:
        stub.StopJob(admin_pb2.StopJobRequest(job="demo", reason="enough"), timeout=SOON)
    cluster.wait(lambda: cluster.generation().phase is Phase.STOPPED, "it is stopped")
    cluster.wait(lambda: cluster.status().state is JobState.STOPPED, "and says so")
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, resume())
    assert "'demo' has ended: STOPPED" in refused(caught, Code.FAILED_PRECONDITION)


def refused(caught: pytest.ExceptionInfo[grpc.RpcError], code: grpc.StatusCode) -> str:
    raised: object = caught.value
    assert isinstance(raised, grpc.Call)
    assert raised.code() is code, raised.details()
    return raised.details() or ""


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (drain("nope"), Code.NOT_FOUND, "there is no node 'nope'"),
        (substitute("nope"), Code.NOT_FOUND, "there is no node 'nope'"),
        (cordon("nope"), Code.NOT_FOUND, "there is no node 'nope'"),
        (cordon("nope", dry_run=True), Code.NOT_FOUND, "there is no node 'nope'"),
        (uncordon("nope"), Code.NOT_FOUND, "there is no node 'nope'"),
        (pause("nope"), Code.NOT_FOUND, "there is no job 'nope'"),
        (pause("nope", dry_run=True), Code.NOT_FOUND, "there is no job 'nope'"),
        (resume("nope"), Code.NOT_FOUND, "there is no job 'nope'"),
        (scale(1, "nope"), Code.NOT_FOUND, "there is no job 'nope'"),
        (explain("nope"), Code.NOT_FOUND, "there is no job 'nope'"),
        (cordon("A B"), Code.INVALID_ARGUMENT, "node 'A B': must be"),
        (uncordon("", dry_run=True), Code.INVALID_ARGUMENT, "node ''"),
        (explain(""), Code.INVALID_ARGUMENT, "job ''"),
        (cordon("n0", "x" * 1001), Code.INVALID_ARGUMENT, "reason: has 1001 characters"),
        (pause("demo", "x" * 1001), Code.INVALID_ARGUMENT, "at most 1000"),
    ],
)
def test_what_can_t_be_is_refused_by_name(
    follower: Coordinator, call: Call, code: grpc.StatusCode, says: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, call)
    assert says in refused(caught, code)


def test_without_a_leader_nothing_is_explained(follower: Coordinator, cluster: Cluster) -> None:
    cluster.submit(DEMO, follower)
    cluster.leader().kill()
    with pytest.raises(grpc.RpcError) as caught:
        ask(follower, explain())
    assert "leader" in refused(caught, Code.UNAVAILABLE)
