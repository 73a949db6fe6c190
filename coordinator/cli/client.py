# SPDX-License-Identifier: Apache-2.0
"""Calls to whichever coordinator answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import grpc

from coordinator.admin import BEGINS_AT, FIRST_KEPT, UNTIL_NOW
from protos import admin_pb2, admin_pb2_grpc

R = TypeVar("R")

_Code = grpc.StatusCode
_AGAIN = frozenset({_Code.UNAVAILABLE, _Code.RESOURCE_EXHAUSTED})
OLDEST = -1
"""In place of a revision: the oldest that is kept."""

_PAUSE = 0.5
_TRY = 10.0
"""Seconds that one try at one coordinator may take."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
]


class CallFailed(Exception):
    """No coordinator did what it was asked; the message says why, for the operator."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Client:
    """``addresses`` are tried in turn, for ``patience`` seconds in all, until one answers.

    What is repeated so is safe to repeat: reads, a submission with its request id, a stop.
    """

    def __init__(self, addresses: Sequence[str], patience: float) -> None:
        self._channels = [
            (address, grpc.insecure_channel(address, options=_OPTIONS)) for address in addresses
        ]
        self._patience = patience
        self._pause = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        for _, channel in self._channels:
            channel.close()

    def call(self, ask: Callable[[admin_pb2_grpc.AdminStub, float], R]) -> R:
        """The first answer. Raises :class:`CallFailed`."""
        deadline = time.monotonic() + self._patience
        while True:
            for address, channel in list(self._channels):
                left = max(0.1, min(_TRY, deadline - time.monotonic()))
                try:
                    return ask(admin_pb2_grpc.AdminStub(channel), left)
                except grpc.RpcError as error:
                    failed = _failure(address, error)
                    if failed.code not in _AGAIN and failed.code is not _Code.DEADLINE_EXCEEDED:
                        raise failed from None
                    self._prefer_another()
            if time.monotonic() + _PAUSE >= deadline:
                raise failed
            self._pause.wait(_PAUSE)

    def events(self, from_revision: int, job: str, *, follow: bool) -> Iterator[admin_pb2.Event]:
        """Every event from a revision on, over the ends of coordinators; none lost, none twice.

        ``from_revision`` 0: from now on; :data:`OLDEST`: all that is kept. Without ``follow`` it
        ends where the call began. Raises :class:`CallFailed`, when nobody has answered for the
        patience, or etcd no longer keeps the revision.
        """
        revision, seen = max(from_revision, int(from_revision == OLDEST)), 0
        failing_since: float | None = None
        while True:
            address, channel = self._channels[0]
            stream = admin_pb2_grpc.AdminStub(channel).WatchEvents(
                admin_pb2.WatchEventsRequest(from_revision=revision, job=job),
                metadata=() if follow else (UNTIL_NOW,),
            )
            try:
                revision = revision or int(_header(stream.initial_metadata(), BEGINS_AT))
                again = seen  # of this revision they are sent once more
                for event in stream:
                    failing_since = None
                    if event.revision == revision and again:
                        again -= 1
                        continue
                    seen = seen + 1 if event.revision == revision else 1
                    revision, again = event.revision, 0
                    yield event
                if not follow:
                    return
            except grpc.RpcError as error:
                failed = _failure(address, error)
                first = _header(stream.trailing_metadata(), FIRST_KEPT)
                if failed.code is _Code.OUT_OF_RANGE and from_revision == OLDEST and not seen:
                    revision = int(first)
                    continue
                if failed.code not in _AGAIN:
                    raise failed from None
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self._patience:
                    raise failed from None
                self._prefer_another()
                self._pause.wait(_PAUSE)
            finally:
                stream.cancel()

    def _prefer_another(self) -> None:
        self._channels.append(self._channels.pop(0))


def _header(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str:
    """A value of a call's metadata; "0" where there is none."""
    return next((str(value) for key, value in metadata or () if key == name), "0")


def _failure(address: str, error: grpc.RpcError) -> CallFailed:
    raised: object = error
    code, details = _Code.UNKNOWN, str(error)
    if isinstance(raised, grpc.Call):  # all that gRPC itself raises are both
        code, details = raised.code(), raised.details() or ""
    if code in _AGAIN or code is _Code.DEADLINE_EXCEEDED:
        details = f"coordinator {address}: {details}"
    return CallFailed(code, details or code.name)
