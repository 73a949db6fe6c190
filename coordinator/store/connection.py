# SPDX-License-Identifier: Apache-2.0
"""The connection to etcd: reads, guarded transactions, lease calls.

etcd3's client makes the channel and the stubs. The requests are built here: its own methods leave
out the revisions, limits and paging that are needed, and drop the header and the error's text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from coordinator.store import keys
from coordinator.store.calls import Calls, Tls
from coordinator.store.election import Election, ElectionEvent
from coordinator.store.errors import (
    Compacted,
    GuardFailed,
    LeaseLost,
    StoreRequestError,
    StoreUnavailable,
)
from coordinator.store.lease import Lease, LeaseEvent
from coordinator.store.txn import MAX_OPERATIONS, build, key_value, span
from coordinator.store.values import Guard, KeyValue, Snapshot, Write, holds
from coordinator.store.watch import Watch, WatchEvent
from protos.etcd import kv_pb2, rpc_pb2

_T = TypeVar("_T")

_PAGE = 500  # keys in one answer


class Store:
    """One cluster's part of etcd. Thread-safe.

    ``endpoints``: ``host:port`` each. ``prefix``: the cluster's; keys given to and returned by
    the store are relative to it. ``timeout``: seconds that an operation may take with all its
    tries. ``credentials``: for TLS. ``user`` and ``password``: a token is fetched with the first
    call and again whenever etcd refuses it. ``keepalive``: seconds between pings on a connection;
    below 5 only where etcd runs with a lower ``--grpc-keepalive-min-time``.

    Making one needs no etcd. Raises :class:`StoreRequestError` for a malformed endpoint or prefix
    and :class:`StoreUnavailable` if no host name can be resolved.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str,
        timeout: float = 5.0,
        credentials: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        keepalive: float = 6.0,
    ) -> None:
        if not prefix.strip("/"):
            raise StoreRequestError("the cluster's prefix is empty")
        self.prefix = prefix.rstrip("/") + "/"
        self.timeout = timeout
        self.calls = Calls(
            endpoints,
            timeout=timeout,
            tls=credentials,
            user=user,
            password=password,
            keepalive=keepalive,
        )
        self.endpoints = self.calls.endpoints

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back. Calls in progress end with :class:`StoreUnavailable`."""
        self.calls.close()

    # ---- reads

    def get(self, key: str) -> KeyValue | None:
        """Return the key as it is now, None if it does not exist. Raises :class:`StoreError`."""
        return self.read([key]).items.get(key)

    def read(self, keys: Sequence[str]) -> Snapshot:
        """Return all of ``keys`` as they were at one revision; those that are missing are absent.

        Raises :class:`StoreError`.
        """
        return self._whole("read", ",".join(keys[:3]), lambda: self._read(keys))

    def _read(self, wanted: Sequence[str]) -> Snapshot:
        revision = 0
        items: dict[str, KeyValue] = {}
        for start in range(0, max(1, len(wanted)), MAX_OPERATIONS):
            part = wanted[start : start + MAX_OPERATIONS]
            ranges = [rpc_pb2.RangeRequest(key=self.full(k), revision=revision) for k in part]
            request = rpc_pb2.TxnRequest(
                success=[rpc_pb2.RequestOp(request_range=r) for r in ranges]
            )
            answer = self.calls.retried(
                "read", ",".join(part[:3]), lambda: self.calls.kv.Txn, request
            )
            revision = revision or answer.header.revision
            for response in answer.responses:
                items.update(self._items(response.response_range.kvs))
        return Snapshot(revision, items)

    def list(self, prefix: str, *, revision: int = 0) -> Snapshot:
        """Return every key that starts with ``prefix``, in order, all as of one revision.

        ``revision`` 0 is the present. Raises :class:`Compacted` if ``revision`` is no longer kept
        and else :class:`StoreError`.
        """
        start = self.full(prefix)
        spans = [(start, keys.prefix_end(start))]
        if revision:
            return self._list(spans, revision)[0]
        return self._whole("list", prefix, lambda: self._list(spans, 0)[0])

    def list_ranges(self, ranges: Sequence[str]) -> tuple[Snapshot, int]:
        """Return all keys of some ranges as of one revision, and etcd's cluster id.

        A range is a key, or a prefix that ends in ``/``; "" is all. Raises :class:`StoreError`.
        """
        spans = [span(self.full(text)) for text in ranges]
        return self._whole("list", ",".join(ranges[:3]), lambda: self._list(spans, 0))

    def below(self, prefix: str) -> tuple[Sequence[str], int]:
        """Return what is there one level below a prefix, in order, and as of which revision.

        Each name is that of a key up to its next ``/``; one small question for each. ``prefix``
        ends in ``/``. Raises :class:`StoreError`.
        """
        return self._whole("list", prefix, lambda: self._below(prefix))

    def _below(self, prefix: str) -> tuple[Sequence[str], int]:
        start, end = span(self.full(prefix))
        names: set[str] = set()
        revision = 0
        while True:
            request = rpc_pb2.RangeRequest(
                key=start, range_end=end, limit=1, keys_only=True, revision=revision
            )
            answer = self.calls.retried("list", prefix, lambda: self.calls.kv.Range, request)
            revision = revision or answer.header.revision
            if not answer.kvs:
                return sorted(names), revision
            name, slash, _ = self.relative(answer.kvs[0].key)[len(prefix) :].partition("/")
            names.add(name)
            start = self.full(prefix + name)
            start = keys.prefix_end(start + b"/") if slash else start + b"\0"

    def _list(self, spans: Sequence[tuple[bytes, bytes]], revision: int) -> tuple[Snapshot, int]:
        items: dict[str, KeyValue] = {}
        cluster = 0
        for start, end in spans:
            for answer in self._pages(start, end, revision):
                revision = revision or answer.header.revision
                cluster = answer.header.cluster_id
                items.update(self._items(answer.kvs))
        return Snapshot(revision, items), cluster

    def _pages(self, start: bytes, end: bytes, revision: int) -> Iterator[rpc_pb2.RangeResponse]:
        limit = _PAGE
        while True:
            request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
            try:
                answer = self.calls.retried(
                    "list", self.relative(start), lambda: self.calls.kv.Range, request
                )
            except StoreRequestError as error:
                # The values are too large for one message: smaller pages.
                if limit == 1 or "message larger than max" not in str(error):
                    raise
                limit = max(1, limit // 8)
                continue
            yield answer
            if not answer.more:
                return
            start = answer.kvs[-1].key + b"\0"
            revision = revision or answer.header.revision

    def _whole(self, operation: str, key: str, read: Callable[[], _T]) -> _T:
        """Repeat a read of several requests at one revision that is compacted in between."""
        for _ in range(3):
            try:
                return read()
            except Compacted:
                continue
        raise StoreUnavailable(
            f"etcd {self.endpoints}: {operation} {key!r}: "
            "the history is compacted faster than it can be read"
        )

    # ---- writes

    def commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        """Carry out all of ``writes`` if all of ``guards`` hold; return the revision.

        It is sent again only where the first try was certainly not carried out (no connection, a
        member without a leader, a refused token). When the answer is lost, the outcome is not
        known and :class:`StoreUnavailable` is raised with ``outcome_unknown``. If the guards
        include what the writes change (``Absent`` or ``Unchanged`` of a key that is put), the
        caller may just repeat the commit: it cannot be carried out twice, and
        :class:`GuardFailed` shows in ``current`` whether the first one was.

        Raises :class:`GuardFailed` (nothing written), :class:`LeaseLost` (a put names a lease
        that is gone), :class:`StoreRequestError` (too many or too large) and the other
        :class:`StoreError`.
        """
        request, guarded = build(self.full, guards, writes)
        key = ",".join(w.key for w in writes[:3]) or ",".join(g.key for g in guards[:3])
        answer = self.calls.retried("commit", key, lambda: self.calls.kv.Txn, request, write=True)
        revision = answer.header.revision
        if answer.succeeded:
            return revision
        current: dict[str, KeyValue | None] = dict.fromkeys(guarded)
        for response in answer.responses:
            current.update(self._items(response.response_range.kvs))
        failed = [guard for guard in guards if not holds(guard, current[guard.key])]
        raise GuardFailed(
            f"etcd {self.endpoints}: commit {key!r}: at revision {revision} "
            + "; ".join(_why(guard, current[guard.key]) for guard in failed),
            failed=failed,
            current=current,
            revision=revision,
        )

    # ---- leases

    def grant(self, ttl: float) -> tuple[int, int]:
        """Return a new lease's id and the TTL in seconds that etcd really gives it.

        Raises :class:`StoreError`. A grant whose answer is lost is sent again: the first lease
        then just ends unused.
        """
        request = rpc_pb2.LeaseGrantRequest(TTL=max(1, math.ceil(ttl)))
        answer = self.calls.retried("grant", "", lambda: self.calls.lease.LeaseGrant, request)
        if answer.error:
            raise StoreRequestError(f"etcd {self.endpoints}: grant: {answer.error}")
        return answer.ID, answer.TTL

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys. An unknown lease is no error. Raises StoreError."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease_id)
        try:
            self.calls.retried(
                "revoke", f"{lease_id:x}", lambda: self.calls.lease.LeaseRevoke, request
            )
        except LeaseLost:
            return

    def time_to_live(self, lease_id: int) -> int:
        """Return the seconds left to a lease; 0 or less if there is none. Raises StoreError."""
        request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id)
        return self.calls.retried(
            "time_to_live", f"{lease_id:x}", lambda: self.calls.lease.LeaseTimeToLive, request
        ).TTL

    # ---- what goes on: each has a thread of its own

    def watch(
        self, ranges: Sequence[str], sink: Callable[[WatchEvent], None], *, apart: bool = False
    ) -> Watch:
        """Return a watch of ``ranges``; its ``start`` begins it."""
        return Watch(self, ranges, sink, apart=apart)

    def lease(self, ttl: float, sink: Callable[[LeaseEvent], None]) -> Lease:
        """Grant a lease and keep it alive. Raises :class:`StoreError` if the grant fails."""
        return Lease(self, ttl, sink)

    def election(
        self, candidate: str, value: bytes, lease: Lease, sink: Callable[[ElectionEvent], None]
    ) -> Election:
        """Return a candidature; its ``start`` begins it."""
        return Election(self, candidate, value, lease, sink)

    # ---- for the streams of this package

    def full(self, key: str) -> bytes:
        """Return etcd's key for a relative one."""
        return (self.prefix + key).encode(errors="surrogateescape")

    def relative(self, key: bytes) -> str:
        """Return the relative key for one of etcd's."""
        return key.decode(errors="surrogateescape").removeprefix(self.prefix)

    def key_value(self, kv: kv_pb2.KeyValue) -> KeyValue:
        """Return etcd's key-value with its relative key."""
        return key_value(self.relative(kv.key), kv)

    def _items(self, kvs: Sequence[kv_pb2.KeyValue]) -> Mapping[str, KeyValue]:
        found = [self.key_value(kv) for kv in kvs]
        return {kv.key: kv for kv in found}


def _why(guard: Guard, current: KeyValue | None) -> str:
    if current is None:
        return f"{guard} failed: there is no such key"
    return f"{guard} failed: created {current.create_revision}, changed {current.mod_revision}"
