# SPDX-License-Identifier: Apache-2.0
"""The Admin calls over whichever coordinator answers, and waiting for what they say."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc

from coordinator.cli.localcluster.processes import ClusterError
from coordinator.model import JobSpec
from coordinator.model.convert import to_record
from protos import admin_pb2, admin_pb2_grpc, job_pb2

T = TypeVar("T")

# Another coordinator may answer; this one is being replaced.
_TRY_ANOTHER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
]
# A step's progress is no event: conditions on it are looked at this often, in seconds.
_LOOK = 0.25


class Admin:
    """``addresses`` says which coordinators there are now; the first that answers serves a call."""

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        self._channels: dict[str, grpc.Channel] = {}
        self._happened = threading.Condition()
        self._events: list[admin_pb2.Event] = []
        self._closing = threading.Event()
        self._watch: grpc.RpcContext | None = None
        self._watcher = threading.Thread(target=self._follow, name="admin-events", daemon=True)

    def start(self) -> None:
        """Begin to follow the events."""
        self._watcher.start()

    def close(self) -> None:
        """Give the connections back."""
        self._closing.set()
        watch = self._watch
        if watch is not None:
            watch.cancel()
        if self._watcher.is_alive():
            self._watcher.join(5.0)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def submit(self, spec: JobSpec, timeout: float = 20.0) -> None:
        """Submit a job. Raises grpc.RpcError when it is refused."""
        request = admin_pb2.SubmitJobRequest(
            spec=to_record(spec, job_pb2.JobSpec()),
            request_id=f"{spec.name}-{time.monotonic_ns()}",
        )
        self._call(lambda stub, left: stub.SubmitJob(request, timeout=left), timeout)

    def stop(self, job: str, reason: str, timeout: float = 20.0) -> None:
        """Stop a job."""
        request = admin_pb2.StopJobRequest(job=job, reason=reason)
        self._call(lambda stub, left: stub.StopJob(request, timeout=left), timeout)

    def drain(self, node: str, reason: str, timeout: float = 20.0) -> None:
        """Give a node's place to another one."""
        request = admin_pb2.DrainNodeRequest(node=node, reason=reason)
        self._call(lambda stub, left: stub.DrainNode(request, timeout=left), timeout)

    def scale(self, job: str, replicas: int, timeout: float = 20.0) -> None:
        """Let a job run with so many replicas."""
        request = admin_pb2.ScaleJobRequest(job=job, replicas=replicas)
        self._call(lambda stub, left: stub.ScaleJob(request, timeout=left), timeout)

    def describe(self, job: str, timeout: float = 20.0) -> admin_pb2.JobDescription:
        """All about a job."""
        request = admin_pb2.DescribeJobRequest(job=job)
        return self._call(lambda stub, left: stub.DescribeJob(request, timeout=left), timeout)

    def nodes(self, timeout: float = 20.0) -> dict[str, admin_pb2.NodeDescription]:
        """Every node that lives or is held against something, by name."""
        request = admin_pb2.ListNodesRequest()
        answer = self._call(lambda stub, left: stub.ListNodes(request, timeout=left), timeout)
        return {one.node.node: one for one in answer.nodes}

    def events(self) -> list[admin_pb2.Event]:
        """What has happened since :meth:`start`."""
        with self._happened:
            return list(self._events)

    def wait_for(
        self,
        look: Callable[[], T],
        until: Callable[[T], bool],
        timeout: float,
        what: str,
        said: Callable[[T], object] = lambda seen: seen,
    ) -> T:
        """Look after every event until a condition holds, and return what was seen then.

        Raises :class:`ClusterError` with ``what`` and what was seen last after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._happened:
                known = len(self._events)
            seen = look()
            if until(seen):
                return seen
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(f"not within {timeout:g} s: {what}. Seen last:\n{said(seen)}")
            with self._happened:
                if len(self._events) == known:
                    self._happened.wait(min(left, _LOOK))

    def wait_nodes(
        self,
        until: Callable[[dict[str, admin_pb2.NodeDescription]], bool],
        timeout: float,
        what: str,
    ) -> dict[str, admin_pb2.NodeDescription]:
        """Wait for a condition on the nodes; see :meth:`wait_for`."""
        return self.wait_for(self.nodes, until, timeout, what, _nodes_in_short)

    def wait_job(
        self,
        job: str,
        until: Callable[[admin_pb2.JobDescription], bool],
        timeout: float,
        what: str,
    ) -> admin_pb2.JobDescription:
        """Wait for a condition on a job; see :meth:`wait_for`."""
        return self.wait_for(lambda: self.describe(job), until, timeout, what, _job_in_short)

    # ---- calls

    def _call(self, call: Callable[[admin_pb2_grpc.AdminStub, float], T], timeout: float) -> T:
        deadline = time.monotonic() + timeout
        while True:
            failed: grpc.RpcError | None = None
            for address in self._addresses():
                left = max(0.1, deadline - time.monotonic())
                try:
                    return call(self._stub(address), min(left, 5.0))
                except grpc.RpcError as error:
                    if error.code() not in _TRY_ANOTHER:
                        raise
                    failed = error
            if time.monotonic() >= deadline:
                raise ClusterError(f"no coordinator answers within {timeout:g} s: {failed}")
            self._closing.wait(0.05)

    def _stub(self, address: str) -> admin_pb2_grpc.AdminStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.insecure_channel(address, options=_OPTIONS)
        return admin_pb2_grpc.AdminStub(channel)

    def _follow(self) -> None:
        last = 0
        while not self._closing.is_set():
            for address in self._addresses():
                with contextlib.suppress(grpc.RpcError):
                    for event in self._stream(address, last):
                        last = max(last, event.revision)
                        with self._happened:
                            self._events.append(event)
                            self._happened.notify_all()
            self._closing.wait(0.1)

    def _stream(self, address: str, last: int) -> Iterator[admin_pb2.Event]:
        request = admin_pb2.WatchEventsRequest(from_revision=last + 1 if last else 0)
        watch = self._stub(address).WatchEvents(request)
        self._watch = watch
        if self._closing.is_set():
            watch.cancel()
        yield from watch


def _nodes_in_short(seen: dict[str, admin_pb2.NodeDescription]) -> str:
    return "\n".join(
        f"{name}: {'alive' if one.alive else 'gone'}, slot of {one.assignment.job or 'nothing'}, "
        f"warm for {one.node.warm.job or 'nothing'}, {one.node.unhealthy or 'healthy'}"
        for name, one in sorted(seen.items())
    )


def _job_in_short(seen: admin_pb2.JobDescription) -> str:
    return f"{seen.status}{seen.progress}{seen.incidents}"
