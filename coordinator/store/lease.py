# SPDX-License-Identifier: Apache-2.0
"""A lease that is kept alive, and a deadline that this process may rely on without etcd."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.store import errors
from coordinator.store.errors import StoreError
from coordinator.store.stream import Backoff, Stream, StreamEnded, jittered
from protos.etcd import rpc_pb2

if TYPE_CHECKING:
    from coordinator.store.connection import Store

_log = logging.getLogger(__name__)
_IDLE = 60.0


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The lease lives at least until ``deadline`` (seconds of :func:`time.monotonic`)."""

    lease_id: int
    deadline: float


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """etcd says that there is no such lease any more. The last event."""

    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseDeadlinePassed:
    """No renewal was answered in time: the lease may be gone, or etcd just out of reach.

    Sent once each time; a renewal may still follow.
    """

    lease_id: int


LeaseEvent = LeaseRenewed | LeaseLost | LeaseDeadlinePassed


class Lease:
    """Grants a lease and keeps it alive from a thread of its own until :meth:`close`.

    ``ttl``: the seconds asked for; etcd may give more. ``sink`` is called on that thread.
    Raises :class:`StoreError` if the grant fails. Not being able to reach etcd never loses the
    lease: only etcd's answer does.
    """

    def __init__(self, store: Store, ttl: float, sink: Callable[[LeaseEvent], None]) -> None:
        asked = time.monotonic()
        lease_id, granted = store.grant(ttl)
        self._begin(store, lease_id, granted, asked + granted, sink)

    @classmethod
    def resume(
        cls, store: Store, lease_id: int, ttl: int, sink: Callable[[LeaseEvent], None]
    ) -> Lease:
        """Go on with a lease that exists; ``ttl`` is what it was granted, in seconds.

        Raises :class:`coordinator.store.errors.LeaseLost` if it does not exist any more, and the
        other :class:`StoreError`.
        """
        asked = time.monotonic()
        left = store.time_to_live(lease_id)
        if left <= 0:
            raise errors.LeaseLost(f"etcd {store.endpoints}: lease {lease_id:x} does not exist")
        lease = cls.__new__(cls)
        lease._begin(store, lease_id, ttl, asked + left, sink)
        return lease

    def _begin(
        self,
        store: Store,
        lease_id: int,
        ttl: int,
        deadline: float,
        sink: Callable[[LeaseEvent], None],
    ) -> None:
        self._store = store
        self._id = lease_id
        self._ttl = ttl
        self._deadline = deadline
        self._sink = sink
        self._passed = False
        self._stream: Stream[rpc_pb2.LeaseKeepAliveRequest, rpc_pb2.LeaseKeepAliveResponse] | None
        self._stream = None
        self._sent: float | None = None  # when the request went out that is not yet answered
        # A resumed lease may be near its end; a new one has time.
        self._next = time.monotonic() + jittered(min(ttl, deadline - time.monotonic()) / 3, 0.2)
        self._backoff = Backoff()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="store-lease", daemon=True)
        self._thread.start()

    @property
    def id(self) -> int:
        """The lease's id."""
        return self._id

    @property
    def ttl(self) -> int:
        """The TTL in seconds that etcd gave."""
        return self._ttl

    def deadline(self) -> float:
        """Until when the lease certainly lives, in seconds of :func:`time.monotonic`.

        Counted from when the renewal was *sent*, so that etcd's own count ends later, unless the
        lease is revoked.
        """
        return self._deadline

    def close(self, revoke: bool) -> None:
        """Stop renewing; with ``revoke`` end the lease now, else it ends with its TTL or goes on
        under :meth:`resume`. Returns within the store's timeout; a revocation that fails is
        logged: the TTL does the same, later.
        """
        with self._lock:
            self._closing.set()
            if self._stream is not None:
                self._stream.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._store.timeout + 3.0)
        if revoke:
            try:
                self._store.revoke(self._id)
            except StoreError as error:
                _log.warning("lease %x was not revoked: %s", self._id, error)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    if self._turn():
                        return
                except StoreError as error:
                    self._drop(str(error))
                except Exception:  # noqa: BLE001 - logged, and tried again
                    # A thread that ends in silence would let the lease end.
                    _log.exception("lease %x: unexpected error", self._id)
                    self._drop("unexpected error")
        finally:
            self._close_stream()

    def _turn(self) -> bool:
        """Do what is due and wait for the next thing; whether the lease is lost."""
        now = time.monotonic()
        if now >= self._deadline and not self._passed:
            self._passed = True
            self._sink(LeaseDeadlinePassed(self._id))
        if self._sent is not None and now >= self._sent + self._patience():
            self._drop("no answer to a renewal")
        elif self._sent is None and now >= self._next:
            self._renew()
        until = self._next if self._sent is None else self._sent + self._patience()
        if not self._passed:
            until = min(until, self._deadline)
        wait = min(_IDLE, max(0.0, until - time.monotonic()))
        if self._stream is None:
            self._closing.wait(wait)
            return False
        try:
            answer = self._stream.receive(wait)
        except StreamEnded as ended:
            if ended.error is not None:
                raise self._store.calls.error(ended.error, "keep alive", f"{self._id:x}") from None
            self._drop("etcd ended the stream")
            return False
        return answer is not None and self._answered(answer)

    def _patience(self) -> float:
        """How long to wait for an answer before trying another stream, perhaps another member."""
        return min(2.0, max(0.5, self._ttl / 5))

    def _renew(self) -> None:
        if self._stream is None:
            metadata = self._store.calls.metadata(self._patience())
            stream = Stream[rpc_pb2.LeaseKeepAliveRequest, rpc_pb2.LeaseKeepAliveResponse](
                self._store.calls.lease.LeaseKeepAlive, metadata, "store-lease"
            )
            with self._lock:
                self._stream = stream
        self._sent = time.monotonic()
        self._stream.send(rpc_pb2.LeaseKeepAliveRequest(ID=self._id))

    def _answered(self, answer: rpc_pb2.LeaseKeepAliveResponse) -> bool:
        if answer.TTL <= 0:
            self._sink(
                LeaseLost(self._id, f"etcd has no lease {self._id:x}: it ended or was revoked")
            )
            return True
        if self._sent is None:
            return False
        self._ttl = answer.TTL
        self._deadline = self._sent + answer.TTL
        self._passed = False
        self._sent = None
        self._next = time.monotonic() + jittered(answer.TTL / 3, 0.2)
        self._backoff.reset()
        self._sink(LeaseRenewed(self._id, self._deadline))
        return False

    def _drop(self, reason: str) -> None:
        _log.info("lease %x: %s; trying again", self._id, reason)
        self._close_stream()
        self._sent = None
        self._next = time.monotonic() + self._backoff.next()

    def _close_stream(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
