# SPDX-License-Identifier: Apache-2.0
"""Serves a stopped trainer's state to the ranks that have none."""

from __future__ import annotations

import dataclasses
import hmac
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Final, NoReturn

import grpc

from protos import shards_pb2, shards_pb2_grpc
from workerd.shards.errors import Ended, ReadersRemain
from workerd.shards.manifest import Served
from workerd.shards.memory import PIECE, host_runs, nbytes
from workerd.shards.stream import TOKEN_BYTES, Outgoing
from workerd.shards.wire import OPTIONS, ShardIdentity

_CALLS: Final = 8
"""Calls at once. More would only share the same link; they are asked to come again."""
_SMALL: Final = 64 << 10
"""Tensors up to this size are gathered, and sent together."""


class _Offer:
    """What is served for one generation, and who is reading it."""

    def __init__(self, identity: ShardIdentity, served: Served) -> None:
        self.identity = identity
        self.served = served
        self.ended = False
        self.readers = 0
        self.calls: set[grpc.ServicerContext] = set()


class ShardServer(shards_pb2_grpc.ShardsServicer):
    """One gRPC server on a port of its own; thread-safe."""

    def __init__(self, host: str) -> None:
        """Raises OSError when no port of `host` can be bound."""
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._last: ShardIdentity | None = None
        """Of the latest offer, also when it has ended."""
        self._ended = 0
        self._pool = ThreadPoolExecutor(_CALLS, "shards-server")
        self._server = grpc.server(
            self._pool,
            options=[*OPTIONS, ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_CALLS,
        )
        shards_pb2_grpc.add_ShardsServicer_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            self._pool.shutdown()
            raise OSError(f"cannot listen on {host}: {error}") from error
        self.address = f"{host}:{port}"
        """host:port"""
        self._server.start()

    def offer(self, identity: ShardIdentity, served: Served) -> None:
        """Serve `served` from now on to exactly those who ask for `identity`.

        Nothing that it refers to may change before `end` has returned. Raises ValueError for a
        generation that has ended, or while an earlier one has not.
        """
        with self._changed:
            if identity.generation <= self._ended:
                raise ValueError(f"generation {identity.generation} has ended here")
            if self._offer is not None:
                raise ValueError(f"{self._offer.identity} is still offered")
            self._offer = _Offer(identity, served)
            self._last = identity

    def end(self, generation: int, timeout: float) -> None:
        """End whatever is served for `generation` or an earlier one, now and later.

        Returns once no reader is left in that state's memory. Raises ReadersRemain when one still
        is after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._ended = max(self._ended, generation)
            offer = self._offer
            if offer is None or offer.identity.generation > generation:
                return
            offer.ended = True
            calls = list(offer.calls)
        for call in calls:
            call.cancel()
        with self._changed:
            while offer.readers:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ReadersRemain(f"{offer.readers} still read {offer.identity}")
                self._changed.wait(left)
            # What it refers to must not be kept in memory by a server that waits.
            if self._offer is offer:
                self._offer = None

    def close(self) -> None:
        """End everything and give back the port and every thread."""
        with self._changed:
            if self._offer is not None:
                self._offer.ended = True
            self._ended = 1 << 63
        self._server.stop(None).wait()
        self._pool.shutdown()

    def GetManifest(
        self, request: shards_pb2.ManifestRequest, context: grpc.ServicerContext
    ) -> shards_pb2.Manifest:
        offer = self._admit(request.shard, context)
        try:
            with self._reading(offer):
                return offer.served.manifest(lambda: _check(offer))
        except Ended:
            _refuse(context)
        finally:
            self._leave(offer, context)

    def Pull(
        self, request: shards_pb2.PullRequest, context: grpc.ServicerContext
    ) -> shards_pb2.PullResponse:
        offer = self._admit(request.shard, context)
        try:
            names = list(request.tensors or offer.served.tensors)
            unknown = [name for name in names if name not in offer.served.tensors]
            if unknown:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no such tensor: {unknown[0]}")
            if len(request.token) != TOKEN_BYTES:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not {TOKEN_BYTES} bytes of token")
            with self._stream(offer, request, context) as stream:
                return shards_pb2.PullResponse(bytes=self._send(offer, names, stream))
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except OSError as error:
            if not offer.ended:
                context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"the stream to {request.address!r}: {error}"
                )
            _refuse(context)
        except Ended:
            _refuse(context)
        finally:
            self._leave(offer, context)

    @contextmanager
    def _stream(
        self, offer: _Offer, request: shards_pb2.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[Outgoing]:
        """The connection to a receiver. It ends with the call, and with the offer."""
        with closing(Outgoing(request.address, request.token)) as stream:
            if not context.add_callback(stream.shut):
                raise Ended(str(offer.identity))
            yield stream

    def _send(self, offer: _Offer, names: list[str], stream: Outgoing) -> int:
        small, sent = bytearray(), 0
        for name in names:
            tensor = offer.served.tensors[name]
            size = nbytes(tensor)
            if small and (size > _SMALL or len(small) + size > PIECE):
                sent += self._pass(offer, small, stream)
                small = bytearray()
            runs = host_runs(tensor, PIECE)
            while True:
                with self._reading(offer):
                    run = next(runs, None)
                    if run is None:
                        break
                    if size <= _SMALL:
                        small += run
                        continue
                sent += self._pass(offer, run, stream)
        return sent + self._pass(offer, small, stream)

    def _pass(self, offer: _Offer, run: bytearray | memoryview, stream: Outgoing) -> int:
        left = memoryview(run)
        while left:
            # A reader is in the memory only here, never while it waits for the network.
            with self._reading(offer):
                left = left[stream.offer(left) :]
            if left:
                stream.wait()
        return len(run)

    @contextmanager
    def _reading(self, offer: _Offer) -> Iterator[None]:
        with self._changed:
            _check(offer)
            offer.readers += 1
        try:
            yield
        finally:
            with self._changed:
                offer.readers -= 1
                self._changed.notify_all()

    def _admit(self, request: shards_pb2.ShardRequest, context: grpc.ServicerContext) -> _Offer:
        asked = ShardIdentity.of(request)
        with self._changed:
            offer, last = self._offer, self._last
            past = asked.generation <= self._ended
            foreign = last is not None and (
                (asked.job, asked.instance) != (last.job, last.instance)
            )
            if not past and not foreign:
                if offer is None or asked.generation > offer.identity.generation:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
                # The nonce is a secret of the members: no early end tells how much of it is right.
                held = offer.identity
                same = hmac.compare_digest(asked.nonce.encode(), held.nonce.encode())
                if same and dataclasses.replace(asked, nonce=held.nonce) == held:
                    offer.calls.add(context)
                    return offer
        _refuse(context)

    def _leave(self, offer: _Offer, context: grpc.ServicerContext) -> None:
        with self._changed:
            offer.calls.discard(context)


def _check(offer: _Offer) -> None:
    if offer.ended:
        raise Ended(str(offer.identity))


def _refuse(context: grpc.ServicerContext) -> NoReturn:
    context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        "not this rank's job, generation, step, shard position or instance",
    )
    raise AssertionError("abort returned")
