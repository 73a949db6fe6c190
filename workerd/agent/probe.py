# SPDX-License-Identifier: Apache-2.0
"""NodeService: which incarnation lives here, from memory, and whether another node answers.

The coordinator holds a connection to it for as long as the node has a place, and pings it.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from concurrent import futures

import grpc

from protos.node_pb2 import ProbeReply, ProbeRequest, ReachReply, ReachRequest
from protos.node_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server

_REACHES = 8
"""Tries to reach others at a time."""
_THREADS = 4 + _REACHES
_LONGEST = 5.0
"""Seconds that one try may take."""
_OPTIONS = (
    # A port that another process has is an error, not something to share.
    ("grpc.so_reuseport", 0),
    # The prober pings often, to notice a dead peer soon.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
_NOBODY = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN})


class ListenError(Exception):
    """The address can't be listened on; the text says why."""


class CannotTry(Exception):
    """This node has no way to try: that says nothing about the other one."""


class ProbeServer(NodeServiceServicer):
    """Serves NodeService. Raises :class:`ListenError` if the address is taken or wrong."""

    def __init__(self, address: str, reply: ProbeReply) -> None:
        self._reply = reply
        self._reaches = threading.Semaphore(_REACHES)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="probe"), options=_OPTIONS
        )
        add_NodeServiceServicer_to_server(self, self._server)
        host = address.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from error
        if port == 0:
            raise ListenError(f"cannot listen on {address}")
        self.address = f"{host}:{port}"
        self._server.start()

    def say(self, reply: ProbeReply) -> None:
        """Answer with this from now on."""
        self._reply = reply

    def Probe(self, request: ProbeRequest, context: grpc.ServicerContext) -> ProbeReply:
        """The incarnation that lives here."""
        return self._reply

    def Reach(self, request: ReachRequest, context: grpc.ServicerContext) -> ReachReply:
        """Whether a kernel accepts connections at one of some addresses."""
        if not self._reaches.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many are being tried")
        try:
            return reach(request.addresses, min(request.timeout_ms / 1000, _LONGEST))
        except CannotTry as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            self._reaches.release()
        raise AssertionError("abort raises")

    def close(self) -> None:
        """Stop serving, at once."""
        self._server.stop(grace=None).wait()


def reach(addresses: Sequence[str], timeout: float) -> ReachReply:
    """Try to connect to all addresses at the same time; nothing is sent.

    ``timeout``: in seconds. Raises :class:`CannotTry` when that doesn't depend on who is there.
    """
    said: list[str] = []
    refused = False
    with selectors.DefaultSelector() as trying:
        try:
            for address in dict.fromkeys(addresses):
                trying.register(_connecting(address), selectors.EVENT_WRITE, address)
            deadline = time.monotonic() + timeout
            while trying.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in trying.select(left):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        return _reply(ReachReply.ACCEPTED, f"{key.data} accepts connections")
                    trying.unregister(one)
                    one.close()
                    if code != errno.ECONNREFUSED and code not in _NOBODY:
                        raise CannotTry(f"{key.data}: {errno.errorcode.get(code, code)}")
                    refused = refused or code == errno.ECONNREFUSED
                    said.append(f"{key.data}: {errno.errorcode[code]}")
            said += [f"{key.data}: silent for {timeout:g} s" for key in trying.get_map().values()]
        finally:
            for key in list(trying.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    return _reply(ReachReply.REFUSED if refused else ReachReply.SILENT, "; ".join(said))


def _connecting(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        one = socket.socket(family, kind, protocol)
    except (OSError, ValueError, OverflowError) as error:
        raise CannotTry(f"{address}: {error}") from error
    try:
        one.setblocking(False)
        code = one.connect_ex(where)
    except OSError as error:
        one.close()
        raise CannotTry(f"{address}: {error}") from error
    if code not in (0, errno.EINPROGRESS, errno.ECONNREFUSED, *_NOBODY):
        one.close()
        raise CannotTry(f"{address}: {errno.errorcode.get(code, code)}")
    return one


def _reply(answer: ReachReply.Answer.ValueType, detail: str) -> ReachReply:
    return ReachReply(answer=answer, detail=detail)
