# SPDX-License-Identifier: Apache-2.0
"""The Admin service: reads are answered here, writes by the leader, wherever it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.admin import BEGINS_AT, FIRST_KEPT, UNTIL_NOW, history, planned, reads, writes
from coordinator.admin.events import describe
from coordinator.admin.refusal import Refused, refusals
from coordinator.controller.leader import Seen
from coordinator.controller.loop import Leadership, NotLeading
from coordinator.store import Created, Store
from protos import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)

_Code = grpc.StatusCode
R = TypeVar("R", bound=Message)
Q = TypeVar("Q", bound=Message)

_FORWARDED = "hotspare-forwarded"
_DEADLINE = 10.0
"""Seconds that a write may take at the leader when the caller has set no deadline."""

_LOOK = 5.0
"""Seconds that the leader may take to show what it sees: it may be writing."""

_CHANNEL: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # Who watches events and has vanished must not hold its stream for hours.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class AdminService(admin_pb2_grpc.AdminServicer):
    """Answers operators. ``streams`` is how many may watch events at once: each holds a thread."""

    def __init__(self, store: Store, leading: Leadership, address: str, streams: int) -> None:
        self._store = store
        self._leading = leading
        self._address = address
        self._sender = ((_FORWARDED, address),)
        self._streams = threading.BoundedSemaphore(streams)
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def close(self) -> None:
        """Let event streams end, and drop the connections to leaders."""
        self._closing.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    # ---- reads

    def DescribeJob(
        self, request: admin_pb2.DescribeJobRequest, context: grpc.ServicerContext
    ) -> admin_pb2.JobDescription:
        return _answer(context, lambda: reads.describe_job(self._store, request.job))

    def ListJobs(
        self, request: admin_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListJobsResponse:
        return _answer(context, lambda: reads.list_jobs(self._store))

    def ListNodes(
        self, request: admin_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ListNodesResponse:
        return _answer(context, lambda: reads.list_nodes(self._store))

    def WatchEvents(
        self, request: admin_pb2.WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.Event]:
        if not self._streams.acquire(blocking=False):
            context.abort(
                _Code.RESOURCE_EXHAUSTED, "too many watch events here; ask another coordinator"
            )
        try:
            with refusals():
                yield from self._events(request, context)
            if self._closing.is_set():
                raise Refused(_Code.UNAVAILABLE, "this coordinator ends; ask another one")
        except Refused as refused:
            if isinstance(refused.__cause__, history.NotKept):
                context.set_trailing_metadata(((FIRST_KEPT, str(refused.__cause__.first)),))
            context.abort(refused.code, refused.message)
        finally:
            self._streams.release()

    def _events(
        self, request: admin_pb2.WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.Event]:
        if request.from_revision < 0:
            raise Refused(
                _Code.INVALID_ARGUMENT,
                f"from_revision = {request.from_revision}: must be 0 (from now on) or a revision",
            )

        def listening() -> bool:
            return context.is_active() and not self._closing.is_set()

        for step in history.follow(
            self._store,
            request.from_revision,
            listening,
            lambda start: context.send_initial_metadata(((BEGINS_AT, str(start)),)),
            only_past=UNTIL_NOW in context.invocation_metadata(),
        ):
            for one in describe(step.key, step.before, step.after):
                if request.job and one.job != request.job:
                    continue
                # Wall time for people; of the past only what the record itself says.
                now = time.time_ns() if step.live else 0  # noqa: TID251
                yield admin_pb2.Event(
                    revision=step.revision,
                    time_ns=one.time_ns or now,
                    kind=one.kind,
                    job=one.job,
                    node=one.node,
                    message=one.message,
                )

    # ---- what the leader alone can do

    def SubmitJob(
        self, request: admin_pb2.SubmitJobRequest, context: grpc.ServicerContext
    ) -> admin_pb2.SubmitJobResponse:
        def here(leading: Created) -> admin_pb2.SubmitJobResponse:
            wall_ns = time.time_ns()  # noqa: TID251 - for people
            return writes.submit(self._store, leading, request, wall_ns)

        return self._by_leader(request, context, here, lambda stub: stub.SubmitJob)

    def StopJob(
        self, request: admin_pb2.StopJobRequest, context: grpc.ServicerContext
    ) -> admin_pb2.StopJobResponse:
        def here(leading: Created) -> admin_pb2.StopJobResponse:
            return writes.stop(self._store, leading, request)

        return self._by_leader(request, context, here, lambda stub: stub.StopJob)

    def CordonNode(
        self, request: admin_pb2.CordonNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.cordon(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.CordonNode)

    def UncordonNode(
        self, request: admin_pb2.UncordonNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.uncordon(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.UncordonNode)

    def DrainNode(
        self, request: admin_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.drain(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.DrainNode)

    def ReplaceNode(
        self, request: admin_pb2.ReplaceNodeRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.replace_node(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.ReplaceNode)

    def PauseRecovery(
        self, request: admin_pb2.PauseRecoveryRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.pause_recovery(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.PauseRecovery)

    def ResumeRecovery(
        self, request: admin_pb2.ResumeRecoveryRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.resume_recovery(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.ResumeRecovery)

    def ScaleJob(
        self, request: admin_pb2.ScaleJobRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ChangeResponse:
        here = self._change(lambda: planned.scale(request), dry_run=request.dry_run)
        return self._by_leader(request, context, here, lambda stub: stub.ScaleJob)

    def ExplainJob(
        self, request: admin_pb2.ExplainJobRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ExplainJobResponse:
        def here(leading: Created) -> admin_pb2.ExplainJobResponse:
            return planned.explain_job(self._seen(), request.job)

        return self._by_leader(request, context, here, lambda stub: stub.ExplainJob)

    def _change(
        self, wanted: Callable[[], planned.OfNode | planned.OfJob], *, dry_run: bool
    ) -> Callable[[Created], admin_pb2.ChangeResponse]:
        def here(leading: Created) -> admin_pb2.ChangeResponse:
            if dry_run:
                return planned.try_out(self._seen(), wanted())
            return planned.carry_out(self._store, leading, wanted())

        return here

    def _seen(self) -> Seen:
        try:
            return self._leading.see(_LOOK)
        except NotLeading as error:
            raise Refused(_Code.UNAVAILABLE, f"{error}; try again") from error

    def _by_leader(
        self,
        request: Q,
        context: grpc.ServicerContext,
        here: Callable[[Created], R],
        of: Callable[[admin_pb2_grpc.AdminStub], Callable[..., R]],
    ) -> R:
        """Answer ``here`` as the leader, else by the leader's own method, which ``of`` names."""
        return _answer(context, lambda: self._led(request, context, here, of))

    def _led(
        self,
        request: Q,
        context: grpc.ServicerContext,
        here: Callable[[Created], R],
        of: Callable[[admin_pb2_grpc.AdminStub], Callable[..., R]],
    ) -> R:
        guard = self._leading.guard
        if guard is not None:
            return here(guard)
        sender = dict(context.invocation_metadata()).get(_FORWARDED)
        if sender is not None:
            raise Refused(
                _Code.UNAVAILABLE,
                f"{self._address} doesn't lead, though {sender!r} takes it for the leader",
            )
        leader = reads.leader(self._store)
        if leader is None or leader.admin == self._address:
            raise Refused(_Code.UNAVAILABLE, "no coordinator leads at the moment; try again")
        timeout = min(context.time_remaining() or _DEADLINE, _DEADLINE)
        try:
            call = of(admin_pb2_grpc.AdminStub(self._channel(leader.admin)))
            return call(request, timeout=timeout, metadata=self._sender)
        except grpc.RpcError as error:
            raise _from_leader(leader, error) from error

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if self._closing.is_set():
                raise Refused(_Code.UNAVAILABLE, "this coordinator ends; ask another one")
            if address not in self._channels:
                for old in self._channels.values():  # there is one leader at a time
                    old.close()
                channel = grpc.insecure_channel(address, options=_CHANNEL)
                self._channels = {address: channel}
            return self._channels[address]


def _from_leader(leader: reads.LeaderAddress, error: grpc.RpcError) -> Refused:
    raised: object = error
    code, details = _Code.UNKNOWN, str(error)
    if isinstance(raised, grpc.Call):  # all that gRPC itself raises are both
        code, details = raised.code(), raised.details() or ""
    if code in (_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED):
        return Refused(
            _Code.UNAVAILABLE, f"no answer from the leader {leader.id} at {leader.admin}: {details}"
        )
    return Refused(code, details)


def _answer(context: grpc.ServicerContext, call: Callable[[], R]) -> R:
    try:
        with refusals():
            return call()
    except Refused as refused:
        context.abort(refused.code, refused.message)
