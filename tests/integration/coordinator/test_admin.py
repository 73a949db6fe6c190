# SPDX-License-Identifier: Apache-2.0
"""The Admin service, as an operator's program meets it."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.admin import BEGINS_AT, FIRST_KEPT, UNTIL_NOW
from coordinator.model import JobSpec, Phase, to_record
from coordinator.store import Put, keys
from protos import admin_pb2, admin_pb2_grpc, job_pb2
from tests.integration.coordinator.cluster import Cluster
from tests.integration.coordinator.processes import SOON, Coordinator

DEMO = JobSpec(name="demo", command=("train",), replicas=2, spares=1, restarts=1)
ADMIN = "hotspare.v1.Admin"
Code = grpc.StatusCode


def request(spec: JobSpec, request_id: str = "") -> admin_pb2.SubmitJobRequest:
    return admin_pb2.SubmitJobRequest(
        spec=to_record(spec, job_pb2.JobSpec()), request_id=request_id
    )


def refused(caught: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    raised: object = caught.value
    assert isinstance(raised, grpc.Call)
    return raised.code(), raised.details() or ""


@pytest.fixture
def one(cluster: Cluster) -> Coordinator:
    (coordinator,) = cluster.launch("c1")
    cluster.leader()
    return coordinator


@pytest.fixture
def follower(cluster: Cluster) -> Coordinator:
    """One that doesn't lead, while another does."""
    cluster.launch("c0", "c1")
    leader = cluster.leader()
    return next(one for one in cluster.coordinators.values() if one is not leader)


def test_a_submission_is_recorded_once(one: Coordinator, cluster: Cluster) -> None:
    first, again = uuid.uuid4().hex, uuid.uuid4().hex
    with one.stub() as stub:
        answer = stub.SubmitJob(request(DEMO, first), timeout=SOON)
        assert answer.job == "demo"
        assert stub.SubmitJob(request(DEMO, first), timeout=SOON) == answer
        with pytest.raises(grpc.RpcError) as other_request:
            stub.SubmitJob(request(DEMO, again), timeout=SOON)
        with pytest.raises(grpc.RpcError) as other_content:
            stub.SubmitJob(request(replace(DEMO, replicas=3), first), timeout=SOON)
        with pytest.raises(grpc.RpcError) as no_request:
            stub.SubmitJob(request(DEMO), timeout=SOON)
    for caught in (other_request, other_content, no_request):
        assert refused(caught)[0] is Code.ALREADY_EXISTS
    job = cluster.load(keys.job_spec("demo"))
    assert (job.spec, job.spec_revision, job.request_id) == (DEMO, 1, first)
    assert job.submitted_ns > 0
    stored = cluster.store.get(keys.job_spec("demo"))
    assert stored is not None
    assert stored.create_revision == answer.revision


def test_all_that_is_wrong_with_a_job_is_said_at_once(one: Coordinator) -> None:
    with one.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.SubmitJob(request(JobSpec(name="A B", replicas=0, seed=-1)), timeout=SOON)
    code, message = refused(caught)
    assert code is Code.INVALID_ARGUMENT
    lines = message.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["name", "command", "replicas", "seed"]
    assert "from 1 to" in lines[2]


def test_more_errors_than_a_status_holds(one: Coordinator) -> None:
    wrong = tuple((f"A-{number}", "1") for number in range(500))
    with one.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.SubmitJob(request(replace(DEMO, environment=wrong)), timeout=SOON)
    code, message = refused(caught)
    assert code is Code.INVALID_ARGUMENT
    assert message.splitlines()[-1].endswith(" more")


def test_a_follower_forwards_what_only_the_leader_may_do(
    follower: Coordinator, cluster: Cluster
) -> None:
    request_id = uuid.uuid4().hex
    with follower.stub() as stub:
        first = stub.SubmitJob(request(DEMO, request_id), timeout=SOON)
        assert stub.SubmitJob(request(DEMO, request_id), timeout=SOON) == first
        with pytest.raises(grpc.RpcError) as wrong:
            stub.SubmitJob(request(JobSpec()), timeout=SOON)
        assert refused(wrong)[0] is Code.INVALID_ARGUMENT
        stub.StopJob(admin_pb2.StopJobRequest(job="demo", reason="why not"), timeout=SOON)
        with pytest.raises(grpc.RpcError) as missing:
            stub.StopJob(admin_pb2.StopJobRequest(job="nope"), timeout=SOON)
        assert refused(missing)[0] is Code.NOT_FOUND
    assert cluster.load(keys.job_spec("demo")).stop == "why not"


def test_without_a_leader_writes_are_unavailable_and_reads_are_not(
    follower: Coordinator, cluster: Cluster
) -> None:
    cluster.leader().kill()
    with follower.stub() as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.SubmitJob(request(DEMO), timeout=SOON)
        code, message = refused(caught)
        assert code is Code.UNAVAILABLE
        assert "leader" in message
        stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=SOON)

        def submitted() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return bool(stub.SubmitJob(request(DEMO, "once"), timeout=SOON).revision)
            return False

        cluster.wait(submitted, "the follower leads and takes it")


def test_stopping(one: Coordinator, cluster: Cluster) -> None:
    with one.stub() as stub:
        stub.SubmitJob(request(DEMO), timeout=SOON)
        first = stub.StopJob(admin_pb2.StopJobRequest(job="demo"), timeout=SOON)
        again = stub.StopJob(admin_pb2.StopJobRequest(job="demo", reason="late"), timeout=SOON)
        assert again == first
        assert cluster.load(keys.job_spec("demo")).stop == "an operator asked for it"


def test_a_job_that_has_ended_by_itself_can_t_be_stopped(
    one: Coordinator, cluster: Cluster
) -> None:
    cluster.add_nodes("n0", "n1")
    with one.stub() as stub:
        stub.SubmitJob(request(DEMO), timeout=SOON)
        cluster.runs()
        cluster.finish()
        cluster.wait(lambda: cluster.status().state.ended, "the end")
        with pytest.raises(grpc.RpcError) as caught:
            stub.StopJob(admin_pb2.StopJobRequest(job="demo"), timeout=SOON)
    code, message = refused(caught)
    assert code is Code.FAILED_PRECONDITION
    assert "FINISHED" in message


def test_what_is_asked_of_a_job(follower: Coordinator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1", "n2")
    with follower.stub() as stub:
        assert not stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=SOON).jobs
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeJob(admin_pb2.DescribeJobRequest(job="demo"), timeout=SOON)
        assert refused(caught)[0] is Code.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            stub.DescribeJob(admin_pb2.DescribeJobRequest(job="../x"), timeout=SOON)
        assert refused(caught)[0] is Code.INVALID_ARGUMENT
        stub.SubmitJob(request(DEMO), timeout=SOON)
        stub.SubmitJob(request(replace(DEMO, name="demo-2")), timeout=SOON)
        before = cluster.runs()
        cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
        cluster.nodes["n0"].kill()
        cluster.runs(after=before.generation)
        cluster.wait(lambda: cluster.incidents()[0].closed, "the incident", play=True)
        one = stub.DescribeJob(admin_pb2.DescribeJobRequest(job="demo"), timeout=SOON)
        assert one.job.spec.name == "demo"
        assert one.status.state == job_pb2.JobStatus.RUNNING
        assert one.generation.generation == 2
        assert [slot.node for slot in one.slots] == ["n2", "n1"]
        assert set(one.progress) == {"n1", "n2"}
        assert [incident.id for incident in one.incidents] == ["demo.2"]
        listed = stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=SOON)
        assert [job.job for job in listed.jobs] == ["demo", "demo-2"]
        assert listed.revision > 0


def test_what_is_asked_of_nodes(one: Coordinator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1", "n2", "n3")
    with one.stub() as stub:
        stub.SubmitJob(request(DEMO), timeout=SOON)
        cluster.runs()
        cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
        cluster.nodes["n0"].kill()
        cluster.runs(after=1)
        found = stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=SOON)
    nodes = {node.node.node: node for node in found.nodes}
    assert list(nodes) == ["n0", "n1", "n2", "n3"]
    assert not nodes["n0"].alive
    assert len(nodes["n0"].flags.dead) == 1
    assert nodes["n1"].assignment.slot == 1
    assert nodes["n2"].assignment.slot == 0
    assert all(nodes[name].alive for name in ("n1", "n2", "n3"))


# ---- events


class Following:
    """Collects events on a thread."""

    def __init__(self, coordinator: Coordinator, from_revision: int = 0, job: str = "") -> None:
        self.events: list[admin_pb2.Event] = []
        self._channel = grpc.insecure_channel(coordinator.address)
        self._call = admin_pb2_grpc.AdminStub(self._channel).WatchEvents(
            admin_pb2.WatchEventsRequest(from_revision=from_revision, job=job)
        )
        headers = {str(key): str(value) for key, value in self._call.initial_metadata()}
        self.begins_at = int(headers[BEGINS_AT])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            self.events.extend(self._call)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def close(self) -> None:
        self._call.cancel()
        self._thread.join(SOON)
        self._channel.close()


def past(stub: admin_pb2_grpc.AdminStub, from_revision: int) -> Iterator[admin_pb2.Event]:
    yield from stub.WatchEvents(
        admin_pb2.WatchEventsRequest(from_revision=from_revision),
        timeout=SOON,
        metadata=(UNTIL_NOW,),
    )


def test_events_tell_a_job_s_life_and_are_the_same_live_and_later(
    one: Coordinator, cluster: Cluster
) -> None:
    live = Following(one)
    cluster.add_nodes("n0", "n1", "n2")
    with one.stub() as stub:
        stub.SubmitJob(request(DEMO), timeout=SOON)
        cluster.runs()
        cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
        cluster.nodes["n0"].kill()
        cluster.runs(after=1)
        cluster.wait(lambda: cluster.incidents()[0].closed, "the incident", play=True)
        slot = cluster.slot(1)
        cluster.nodes["n1"].end_trainer(slot.ranks[0].instance, "demo", slot.ranks[0].since)
        cluster.runs(after=2)
        cluster.wait(lambda: cluster.incidents()[1].closed, "the incident", play=True)
        cluster.finish()
        cluster.wait(lambda: cluster.generation().phase is Phase.FINISHED, "the end")
        cluster.wait(lambda: "job.finished" in live.kinds(), "the event of it")
        later = list(past(stub, live.begins_at))
    live.close()
    for kind in (
        *("node.joined", "job.submitted", "node.placed", "job.phase", "node.spare"),
        *("node.left", "node.dead", "incident.opened", "incident.closed", "trainer.ended"),
        "job.finished",
    ):
        assert kind in live.kinds()
    closed = next(event for event in live.events if event.kind == "incident.closed")
    assert "detected 0.000 s, paused " in closed.message
    assert closed.time_ns > 0
    assert [event.revision for event in live.events] == sorted(
        event.revision for event in live.events
    )
    told = [(event.revision, event.kind, event.message) for event in later]
    assert told[: len(live.events)] == [
        (event.revision, event.kind, event.message) for event in live.events
    ]


def test_events_of_one_job_only(one: Coordinator, cluster: Cluster) -> None:
    live = Following(one, job="demo-2")
    with one.stub() as stub:
        stub.SubmitJob(request(DEMO), timeout=SOON)
        stub.SubmitJob(request(replace(DEMO, name="demo-2")), timeout=SOON)
    cluster.wait(lambda: "job.waiting" in live.kinds(), "its events")
    live.close()
    assert {event.job for event in live.events} == {"demo-2"}


def test_events_that_are_compacted_away(own_etcd: Cluster) -> None:
    cluster = own_etcd
    (one,) = cluster.launch("c0")
    cluster.leader()
    for number in range(5):
        last = cluster.store.commit([], [Put(keys.flags("n0"), b"{}" + b" " * number)])
    cluster.etcd.compact(last)
    with one.stub() as stub:
        with pytest.raises(grpc.RpcError) as caught:
            list(past(stub, 1))
        assert refused(caught)[0] is Code.OUT_OF_RANGE
        raised: object = caught.value
        assert isinstance(raised, grpc.Call)
        trailer = {str(key): str(value) for key, value in raised.trailing_metadata() or ()}
        assert trailer[FIRST_KEPT] == str(last + 1)
        list(past(stub, last + 1))


@pytest.mark.parametrize(
    ("revision", "code"), [(-1, Code.INVALID_ARGUMENT), (10**9, Code.OUT_OF_RANGE)]
)
def test_events_from_a_revision_that_can_t_be(
    one: Coordinator, revision: int, code: grpc.StatusCode
) -> None:
    with one.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(past(stub, revision))
    assert refused(caught)[0] is code


def test_too_many_streams_leave_room_for_calls(one: Coordinator) -> None:
    streams = [Following(one) for _ in range(16)]
    with one.stub() as stub:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.WatchEvents(admin_pb2.WatchEventsRequest(), timeout=SOON))
        assert refused(caught)[0] is Code.RESOURCE_EXHAUSTED
        stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=SOON)
    for stream in streams:
        stream.close()


def test_sigterm_ends_streams_as_unavailable(one: Coordinator) -> None:
    with one.stub() as stub:
        stream = stub.WatchEvents(admin_pb2.WatchEventsRequest())
        stream.initial_metadata()
        assert one.terminate() == 0
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
    assert refused(caught)[0] is Code.UNAVAILABLE


# ---- what every gRPC service should have


def test_health(follower: Coordinator) -> None:
    with grpc.insecure_channel(follower.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", ADMIN):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SOON)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(one: Coordinator) -> None:
    ask: Any = reflection_pb2.ServerReflectionRequest
    with grpc.insecure_channel(one.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        wanted = [ask(list_services=""), ask(file_containing_symbol=ADMIN)]
        services, file = stub.ServerReflectionInfo(iter(wanted), timeout=SOON)
    assert ADMIN in {service.name for service in services.list_services_response.service}
    assert file.file_descriptor_response.file_descriptor_proto


def test_without_etcd_calls_are_unavailable(own_etcd: Cluster) -> None:
    (coordinator,) = own_etcd.launch("c0")
    own_etcd.leader()
    own_etcd.etcd.kill()
    with coordinator.stub() as stub:
        for call in (
            lambda: stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=SOON),
            lambda: stub.SubmitJob(request(DEMO), timeout=SOON),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert refused(caught)[0] is Code.UNAVAILABLE
