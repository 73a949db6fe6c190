# SPDX-License-Identifier: Apache-2.0
"""NodeService: which incarnation lives here, answered from memory."""

from __future__ import annotations

from concurrent import futures

import grpc

from protos.node_pb2 import ProbeReply, ProbeRequest
from protos.node_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server

_THREADS = 4
_OPTIONS = (
    # A port that another process has is an error, not something to share.
    ("grpc.so_reuseport", 0),
    # The prober pings often, to notice a dead peer soon.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ListenError(Exception):
    """The address can't be listened on; the text says why."""


class ProbeServer(NodeServiceServicer):
    """Serves NodeService. Raises :class:`ListenError` if the address is taken or wrong."""

    def __init__(self, address: str, reply: ProbeReply) -> None:
        self._reply = reply
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

    def close(self) -> None:
        """Stop serving, at once."""
        self._server.stop(grace=None).wait()
