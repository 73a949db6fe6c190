# SPDX-License-Identifier: Apache-2.0
"""Asks suspected nodes directly whether they live.

The only place with asyncio: one loop on one thread holds as many connections as there are
suspects. It decides nothing; each answer goes as a :class:`Probed` into its owner's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.model import Verdict
from protos import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

_STOP_WITHIN = 5.0

# No keepalive: a probe is over before a ping could tell more than its deadline does.
_OPTIONS: list[tuple[str, int]] = [
    # A probe has its own connection: one that already stands may be dead without knowing it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Probed:
    """What one probe said of one incarnation of a node."""

    node: str
    incarnation: str
    verdict: Verdict
    detail: str


async def ask(node: str, incarnation: str, address: str, timeout: float) -> Probed:
    """Ask the workerd at an address which incarnation lives there, within so many seconds.

    Refused, reset, silent, or anybody else answering: dead. Raises nothing but cancellation.
    """

    def dead(detail: str) -> Probed:
        return Probed(node, incarnation, Verdict.DEAD, detail)

    if not address:
        return dead("no address is known at which to ask it")
    try:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            reply = await stub.Probe(node_pb2.ProbeRequest(), timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return dead(f"no answer from {address} in {timeout:g} s")
        return dead(f"{error.code().name} from {address}: {error.details()}")
    except ValueError as error:  # an address that gRPC can't read
        return dead(f"{address!r} is no address: {error}")
    if (reply.node, reply.incarnation) != (node, incarnation):
        return dead(f"{address} answers as node {reply.node}, incarnation {reply.incarnation}")
    return Probed(node, incarnation, Verdict.ALIVE, f"{address} answers")


class Prober:
    """Runs probes on a thread of its own until it is closed."""

    def __init__(self, sink: Callable[[Probed], None]) -> None:
        self._sink = sink
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        """Start one probe; its :class:`Probed` reaches the sink within ``timeout`` seconds."""
        self._loop.call_soon_threadsafe(self._start, node, incarnation, address, timeout)

    def close(self) -> None:
        """End all probes, without a verdict, and the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_WITHIN)
        if self._thread.is_alive():
            log.error("the prober's thread did not end in %g s", _STOP_WITHIN)

    def _start(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        task = self._loop.create_task(self._probe(node, incarnation, address, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        self._sink(await ask(node, incarnation, address, timeout))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.close()
