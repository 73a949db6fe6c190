# SPDX-License-Identifier: Apache-2.0
"""The connections that emulated nodes share: calls, watches and lease renewals, on asyncio.

A real node has a connection of its own with one watch stream and one keepalive stream on it. Here
up to :data:`NODES` nodes share each of them, and :data:`WIRES` such groups a connection. To etcd
every call, watcher, event and renewal is the same message as from a real node;
what it is spared is memory (a connection and two streams a node, some 100 KB) and system calls,
since messages of several nodes may travel in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from coordinator.store.txn import span
from protos.etcd import rpc_pb2, rpc_pb2_grpc

NODES = 64
"""Nodes on one watch stream. etcd buffers 128 answers a stream: with many more it would have to
send an event that all of them watch in several rounds, which it doesn't with real nodes."""

WIRES = 8
"""Watch streams on one connection."""

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
_PATIENCE = 60.0  # seconds that a call may take
_AGAIN = 0.25  # seconds before a stream is opened again


class Wire:
    """One group's calls and streams. A stream that etcd ends is opened again, as nodes do."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._kv: Any = rpc_pb2_grpc.KVStub(channel)
        self._leases: Any = rpc_pb2_grpc.LeaseStub(channel)
        self._watch: Any = rpc_pb2_grpc.WatchStub(channel)
        self._requests: asyncio.Queue[rpc_pb2.WatchRequest] = asyncio.Queue()
        self._renewals: asyncio.Queue[rpc_pb2.LeaseKeepAliveRequest] = asyncio.Queue()
        self._watched: dict[int, tuple[bytes, Callable[[], None]]] = {}
        self._creating: dict[int, asyncio.Future[None]] = {}
        self._held: set[int] = set()
        self._last = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.lost: set[int] = set()
        """Leases of which etcd said that they are gone."""
        self.broken = 0
        """Streams that etcd has ended."""

    def open(self) -> None:
        """Begin the two streams."""
        for work in (
            self._keep(self._watch.Watch, self._requests, self._hear_events),
            self._keep(self._leases.LeaseKeepAlive, self._renewals, self._hear_renewals),
        ):
            self._tasks.append(asyncio.ensure_future(work))

    def failed(self) -> BaseException | None:
        """What has ended a stream for good, if anything."""
        return next((one.exception() for one in self._tasks if one.done()), None)

    async def txn(self, request: rpc_pb2.TxnRequest) -> rpc_pb2.TxnResponse:
        """One transaction. Raises grpc.RpcError."""
        return await self._kv.Txn(request, timeout=_PATIENCE)  # type: ignore[no-any-return]

    async def grant(self, ttl: int) -> rpc_pb2.LeaseGrantResponse:
        """A lease of so many seconds. Raises grpc.RpcError."""
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl)
        return await self._leases.LeaseGrant(request, timeout=_PATIENCE)  # type: ignore[no-any-return]

    def renew(self, lease: int) -> None:
        """Send one renewal."""
        self._held.add(lease)
        self._renewals.put_nowait(rpc_pb2.LeaseKeepAliveRequest(ID=lease))

    def abandon(self, lease: int) -> None:
        """Its node is dead: it is renewed no more."""
        self._held.discard(lease)

    async def watch(self, keys: Sequence[bytes], listener: Callable[[], None]) -> list[int]:
        """Watch keys: ``listener`` is called when some have changed. Returns what :meth:`unwatch`
        takes, once etcd has the watchers.
        """
        made = []
        for key in keys:
            self._last += 1
            made.append(self._last)
            self._watched[self._last] = key, listener
            self._creating[self._last] = asyncio.get_running_loop().create_future()
            self._create(self._last, key)
        await asyncio.gather(*(self._creating[one] for one in made))
        for one in made:
            del self._creating[one]
        return made

    def unwatch(self, watches: Sequence[int]) -> None:
        """End watches."""
        for one in watches:
            self._watched.pop(one, None)
            cancel = rpc_pb2.WatchCancelRequest(watch_id=one)
            self._requests.put_nowait(rpc_pb2.WatchRequest(cancel_request=cancel))

    def _create(self, number: int, key: bytes) -> None:
        start, end = span(key)
        create = rpc_pb2.WatchCreateRequest(
            key=start, range_end=end, progress_notify=True, watch_id=number, fragment=True
        )
        self._requests.put_nowait(rpc_pb2.WatchRequest(create_request=create))

    async def _keep(
        self,
        begin: Callable[[], Any],
        queue: asyncio.Queue[Any],
        hear: Callable[[Any], Coroutine[Any, Any, None]],
    ) -> None:
        while True:
            call = begin()
            sending = asyncio.ensure_future(self._send(call, queue))
            try:
                await hear(call)
            except grpc.RpcError:
                self.broken += 1
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await asyncio.sleep(_AGAIN)
            if queue is self._requests:
                self._watch_again()
            else:
                for lease in tuple(self._held):
                    self.renew(lease)

    def _watch_again(self) -> None:
        """On a new stream: all watches, and all who may have missed something."""
        while not self._requests.empty():
            self._requests.get_nowait()
        for number, (key, listener) in self._watched.items():
            self._create(number, key)
            listener()

    async def _send(self, call: Any, queue: asyncio.Queue[Any]) -> None:
        while True:
            await call.write(await queue.get())

    async def _hear_events(self, call: Any) -> None:
        async for answer in call:
            creating = self._creating.get(answer.watch_id)
            if answer.created and creating is not None and not creating.done():
                creating.set_result(None)
            _, listener = self._watched.get(answer.watch_id, (b"", None))
            if answer.events and listener is not None:
                listener()

    async def _hear_renewals(self, call: Any) -> None:
        async for answer in call:
            if answer.TTL <= 0:
                self.lost.add(answer.ID)


def wires(address: str, nodes: int) -> list[Wire]:
    """As many as so many nodes need; call it inside the event loop."""
    made: list[Wire] = []
    for number in range(-(-nodes // NODES)):
        if number % WIRES == 0:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        made.append(Wire(channel))
        made[-1].open()
    return made
