# SPDX-License-Identifier: Apache-2.0
"""Nodes that are played: they register, answer probes, and write what they are told to."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from coordinator.controller import records
from coordinator.model import Device, DeviceKind, Node, Trainer, TrainerExit, TrainerState
from coordinator.store import Absent, Created, Lease, Put, Store, StoreError, keys
from protos import node_pb2, node_pb2_grpc
from tests.integration.coordinator.processes import SOON, TTL
from workerd.agent.probe import reach

_PAUSE = threading.Event()  # never set: between looks
_PINGED_OFTEN = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 0),
)


class _Probed(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def Probe(
        self, request: node_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> node_pb2.ProbeReply:
        return node_pb2.ProbeReply(node=self._node.name, incarnation=self._node.incarnation)

    def Reach(
        self, request: node_pb2.ReachRequest, context: grpc.ServicerContext
    ) -> node_pb2.ReachReply:
        return reach(request.addresses, request.timeout_ms / 1000)


_INCARNATIONS = itertools.count(1)


@dataclass
class FakeNode:
    """What a workerd with trainers writes, as far as the leader can see."""

    store: Store
    name: str
    devices: int = 1
    incarnation: str = ""
    lease: Lease | None = None
    guard: Created | None = None
    record: Node = Node()
    state: dict[str, int] = field(default_factory=dict)
    """The step of each trainer instance that holds a state."""
    held: int = 0
    """The generation in which it has stopped at a step's boundary."""
    stuck: bool = False
    """It acknowledges nothing."""
    server: grpc.Server | None = None

    def start(self) -> FakeNode:
        """Serve probes and register, as a new incarnation."""
        self.incarnation = f"i{next(_INCARNATIONS)}"
        self.state = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(2), options=_PINGED_OFTEN)
        node_pb2_grpc.add_NodeServiceServicer_to_server(_Probed(self), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.record = Node(
            node=self.name,
            incarnation=self.incarnation,
            version="test",
            control_address=f"127.0.0.1:{port}",
            data_address="127.0.0.1",
            devices=tuple(Device(DeviceKind.CPU, one) for one in range(self.devices)),
        )
        self.register()
        return self

    def register(self) -> None:
        """Under a new lease, with the same incarnation (rule 13)."""
        self.lease = Lease(self.store, TTL, lambda event: None)
        key = keys.node(self.name)
        put = Put(key, records.dump(self.record), self.lease.id)
        deadline = time.monotonic() + SOON
        while True:
            try:
                self.guard = Created(key, self.store.commit([Absent(key)], [put]))
                return
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                _PAUSE.wait(0.1)

    def lose_lease(self) -> None:
        """The lease ends; the process lives and answers probes."""
        assert self.lease is not None
        self.lease.close(revoke=True)
        self.lease = self.guard = None

    def kill(self) -> None:
        """As SIGKILL: the port refuses at once, the lease ends by itself."""
        if self.server is not None:
            self.server.stop(None).wait()
            self.server = None
        if self.lease is not None:
            self.lease.close(revoke=False)
            self.lease = self.guard = None
        self.state = {}

    @property
    def alive(self) -> bool:
        return self.guard is not None

    def write(self, key: str, value: Any) -> None:
        """On the node's lease, guarded by its own key; nothing when the lease has just gone."""
        if self.guard is None or self.lease is None:
            return
        with contextlib.suppress(StoreError):
            self.store.commit([self.guard], [Put(key, records.dump(value), self.lease.id)])

    def update(self, record: Node) -> None:
        if record != self.record:
            self.record = record
            self.write(keys.node(self.name), record)

    def end_trainer(self, instance: str, job: str, since: int) -> None:
        """A trainer's process has ended with code 3."""
        over = Trainer(
            instance=instance,
            state=TrainerState.ENDED,
            job=job,
            since=since,
            exit=TrainerExit(code=3, message="Traceback\nboom"),
        )
        self.state.pop(instance, None)
        kept = tuple(one for one in self.record.trainers if one.instance != instance)
        self.update(replace(self.record, trainers=(*kept, over)))
