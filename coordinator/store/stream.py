# SPDX-License-Identifier: Apache-2.0
"""One two-way gRPC stream whose owner can wait for an answer with a deadline, and be woken."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import grpc

from coordinator.store.errors import StoreUnavailable

_Q = TypeVar("_Q")
_R = TypeVar("_R")
_Q_contra = TypeVar("_Q_contra", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)
_RANDOM = secrets.SystemRandom()


class _Call(Protocol[_R_co]):
    def __iter__(self) -> Iterator[_R_co]: ...
    def cancel(self) -> bool: ...


class _Method(Protocol[_Q_contra, _R_co]):
    def __call__(
        self,
        request_iterator: Iterator[_Q_contra],
        *,
        metadata: tuple[tuple[str, str], ...],
    ) -> _Call[_R_co]: ...


class StreamEnded(Exception):
    """The stream is over; ``error`` is gRPC's, None if the server just ended it."""

    def __init__(self, error: grpc.RpcError | None) -> None:
        super().__init__(str(error))
        self.error = error


class Stream(Generic[_Q, _R]):
    """A stream that belongs to one thread; only :meth:`wake` may come from others.

    gRPC's iterator blocks without a deadline, so a helper thread moves the answers into a queue.
    It ends, like gRPC's own thread that takes the requests, when the stream is closed.
    Raises :class:`StoreUnavailable` if the store is closed.
    """

    def __init__(
        self, method: _Method[_Q, _R], metadata: tuple[tuple[str, str], ...], name: str
    ) -> None:
        self._requests: queue.SimpleQueue[_Q | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_R | StreamEnded | None] = queue.SimpleQueue()
        try:
            self._call = method(iter(self._requests.get, None), metadata=metadata)
        except ValueError as error:  # what gRPC says of a closed channel
            raise StoreUnavailable(f"{name}: {error}", retryable=False) from error
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(StreamEnded(None))
        except grpc.RpcError as error:
            self._answers.put(StreamEnded(error))
        finally:
            self._requests.put(None)

    def send(self, request: _Q) -> None:
        """Queue a request."""
        self._requests.put(request)

    def receive(self, timeout: float) -> _R | None:
        """Return the next answer, None after ``timeout`` seconds or :meth:`wake`.

        Raises :class:`StreamEnded`.
        """
        try:
            answer = self._answers.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if isinstance(answer, StreamEnded):
            raise answer
        return answer

    def wake(self) -> None:
        """Let :meth:`receive` return, now or the next time. From any thread."""
        self._answers.put(None)

    def close(self) -> None:
        """End the stream and its threads."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(timeout=2.0)


class Backoff:
    """Growing waits with jitter between tries: 50 ms to 1 s."""

    _FIRST, _LAST = 0.05, 1.0

    def __init__(self) -> None:
        self._next = self._FIRST

    def reset(self) -> None:
        """Begin again: a try succeeded."""
        self._next = self._FIRST

    def next(self) -> float:
        """Return the seconds to wait before the next try."""
        wait = self._next
        self._next = min(self._LAST, wait * 2)
        return jittered(wait, 0.5)


def jittered(seconds: float, share: float) -> float:
    """Return ``seconds`` less a random part of it, at most ``share`` of it."""
    return seconds * (1.0 - _RANDOM.random() * share)
