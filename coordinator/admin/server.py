# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a coordinator: Admin, health, reflection."""

from __future__ import annotations

from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.admin.service import SERVER_OPTIONS, AdminService
from coordinator.controller.loop import Leadership
from coordinator.store import Store
from protos import admin_pb2, admin_pb2_grpc

_STREAMS = 16
_CALLS = 16
_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class CannotListen(Exception):
    """The address to listen on is taken, or isn't this machine's."""


class AdminServer:
    """Binds when it is made, so that its address can be published before it answers.

    Raises :class:`CannotListen`.
    """

    def __init__(self, store: Store, leading: Leadership, listen: str) -> None:
        host = listen.rpartition(":")[0]
        # Event streams and calls share the threads: streams can't take them all.
        self._threads = futures.ThreadPoolExecutor(_STREAMS + _CALLS, thread_name_prefix="admin")
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise CannotListen(f"can't listen on {listen}: {error}") from error
        if not port:
            raise CannotListen(f"can't listen on {listen}")
        self.address = f"{host}:{port}"
        """host:port at which it answers."""
        self._service = AdminService(store, leading, self.address, _STREAMS)
        self._health = health.HealthServicer()
        admin_pb2_grpc.add_AdminServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()
        for name in ("", _SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace: float) -> None:
        """Refuse new calls, let running ones end within ``grace`` seconds."""
        self._health.enter_graceful_shutdown()
        self._service.close()
        self._server.stop(grace).wait()
        self._threads.shutdown(wait=True, cancel_futures=True)
