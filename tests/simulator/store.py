# SPDX-License-Identifier: Apache-2.0
"""One client's way to the simulated etcd: a ``Store`` like the real one, without threads.

A call is carried out at once, or fails at once: it takes no virtual time. What etcd tells comes
later, by the clock, and never inside a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from coordinator.store import (
    Compacted,
    Delete,
    Election,
    ElectionEvent,
    Guard,
    GuardFailed,
    KeyValue,
    Lease,
    LeaseEvent,
    Put,
    Snapshot,
    Store,
    StoreRequestError,
    StoreTimeout,
    StoreUnavailable,
    Watch,
    WatchEvent,
    Write,
    errors,
)
from coordinator.store.values import holds
from tests.simulator.etcd import FakeEtcd, Refused


class Stream(Protocol):
    """What hangs on a connection."""

    def lost(self, reason: str, after: float) -> None:
        """etcd can't be reached any more; that is noticed after so many seconds."""

    def found(self) -> None:
        """It can again."""


class FakeStore(Store):
    """A cluster's part of a simulated etcd, for one process."""

    def __init__(self, etcd: FakeEtcd, *, prefix: str, timeout: float = 5.0) -> None:
        # Not the real one's: that one makes a channel.
        self.prefix = prefix.rstrip("/") + "/"
        self.timeout = timeout
        self.endpoints = "simulated"
        self.etcd = etcd
        self.clock = etcd.clock
        self.streams: dict[Stream, None] = {}
        self.answers_to_lose = 0
        """So many writes will be carried out without the client getting to know."""
        self._cut = False
        self._closed = False
        etcd.clients[self] = None

    def close(self) -> None:
        self._closed = True
        self.etcd.clients.pop(self, None)
        self.disconnected("closed", 0.0)
        self.streams.clear()

    # ---- the connection

    @property
    def reachable(self) -> bool:
        """Whether etcd answers this client."""
        return self.etcd.up and not self._cut and not self._closed

    def cut(self, after: float) -> None:
        """The line to etcd is cut; that is noticed after so many seconds."""
        self._cut = True
        self.disconnected("no answer", after)

    def mend(self) -> None:
        """It is there again."""
        self._cut = False
        if self.reachable:
            self.reconnected()

    def disconnected(self, reason: str, after: float) -> None:
        """etcd can't be reached."""
        for stream in list(self.streams):
            stream.lost(reason, after)

    def reconnected(self) -> None:
        """It can again: each stream finds out by itself."""
        for stream in list(self.streams):
            wait = self.etcd.random.uniform(0.02, 1.0)
            self.clock.after(wait, lambda stream=stream: self._found(stream))  # type: ignore[misc]

    def _found(self, stream: Stream) -> None:
        if self.reachable and stream in self.streams:
            stream.found()

    def _check(self, operation: str, key: str, *, write: bool = False) -> None:
        what = f"etcd {self.endpoints}: {operation} {key!r}"
        if self._closed:
            raise StoreUnavailable(f"{what}: the store is closed", retryable=False)
        if self.etcd.frozen or (self._cut and self.etcd.up):
            raise StoreTimeout(f"{what}: DEADLINE_EXCEEDED", outcome_unknown=write)
        if not self.etcd.up:
            raise StoreUnavailable(f"{what}: UNAVAILABLE: connection refused")

    # ---- reads

    def read(self, keys: Sequence[str]) -> Snapshot:
        self._check("read", ",".join(keys[:3]))
        items = self.etcd.items
        found = {}
        for key in keys:
            value = items.get(self.prefix + key)
            if value is not None:
                found[key] = self._relative(value)
        return Snapshot(self.etcd.revision, found)

    def list(self, prefix: str, *, revision: int = 0) -> Snapshot:
        self._check("list", prefix)
        start = self.prefix + prefix
        try:
            items = self.etcd.snapshot(revision)
        except Compacted as error:
            raise Compacted(f"etcd {self.endpoints}: list {prefix!r}: {error}") from error
        except StoreRequestError as error:
            raise StoreRequestError(f"etcd {self.endpoints}: list {prefix!r}: {error}") from error
        found = [self._relative(items[key]) for key in sorted(items) if key.startswith(start)]
        return Snapshot(revision or self.etcd.revision, {one.key: one for one in found})

    def below(self, prefix: str) -> tuple[Sequence[str], int]:
        found = self.list(prefix)
        names = {key[len(prefix) :].partition("/")[0] for key in found.items}
        return sorted(names), found.revision

    def list_ranges(self, ranges: Sequence[str]) -> tuple[Snapshot, int]:
        self._check("list", ",".join(ranges[:3]))
        found: dict[str, KeyValue] = {}
        for one in ranges:
            if one == "" or one.endswith("/"):
                found.update(self.list(one).items)
            else:
                found.update(self.read([one]).items)
        return Snapshot(self.etcd.revision, found), self.etcd.cluster

    def _relative(self, value: KeyValue) -> KeyValue:
        return KeyValue(
            value.key[len(self.prefix) :],
            value.value,
            value.create_revision,
            value.mod_revision,
            value.lease,
        )

    def relative(self, key: bytes | str) -> str:
        assert isinstance(key, str)
        return key.removeprefix(self.prefix)

    # ---- writes

    def commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        key = ",".join(w.key for w in writes[:3]) or ",".join(g.key for g in guards[:3])
        whole = (
            [self._whole_guard(one) for one in guards],
            [self._whole_write(one) for one in writes],
        )
        try:
            self._check("commit", key, write=True)
        except StoreTimeout:
            if self.etcd.frozen:
                self.etcd.send_late(lambda: self._late(*whole))
            raise
        what = f"etcd {self.endpoints}: commit {key!r}"
        try:
            revision = self.etcd.commit(*whole)
        except errors.LeaseLost as error:
            raise errors.LeaseLost(f"{what}: {error}") from error
        except StoreRequestError as error:
            if "in one transaction" in str(error):
                raise
            raise StoreRequestError(f"{what}: {error}") from error
        except Refused as refused:
            raise self._failed(what, guards, refused) from refused
        if self.answers_to_lose:
            self.answers_to_lose -= 1
            raise StoreUnavailable(f"{what}: the answer was lost", outcome_unknown=True)
        return revision

    def _late(self, guards: Sequence[Guard], writes: Sequence[Write]) -> None:
        try:
            self.etcd.commit(guards, writes)
        except (Refused, errors.StoreError):
            return  # nobody waits for the answer any more

    def _failed(self, what: str, guards: Sequence[Guard], refused: Refused) -> GuardFailed:
        current = {
            guard.key: None if now is None else self._relative(now)
            for guard in guards
            for now in [refused.current[self.prefix + guard.key]]
        }
        failed = [guard for guard in guards if not holds(guard, current[guard.key])]
        why = "; ".join(_why(guard, current[guard.key]) for guard in failed)
        return GuardFailed(
            f"{what}: at revision {refused.revision} {why}",
            failed=failed,
            current=current,
            revision=refused.revision,
        )

    def _whole_guard(self, guard: Guard) -> Guard:
        kind = type(guard)
        values = [getattr(guard, name) for name in guard.__slots__[1:]]
        return kind(self.prefix + guard.key, *values)

    def _whole_write(self, write: Write) -> Write:
        if isinstance(write, Put):
            return Put(self.prefix + write.key, write.value, write.lease)
        return Delete(self.prefix + write.key)

    # ---- leases

    def grant(self, ttl: float) -> tuple[int, int]:
        self._check("grant", "")
        lease = self.etcd.lessor.grant(ttl)
        return lease.id, lease.ttl

    def revoke(self, lease_id: int) -> None:
        self._check("revoke", f"{lease_id:x}")
        self.etcd.lessor.revoke(lease_id)

    def time_to_live(self, lease_id: int) -> int:
        self._check("time_to_live", f"{lease_id:x}")
        lease = self.etcd.lessor.leases.get(lease_id)
        if lease is None:
            return -1
        return lease.ttl if lease.keeper else max(0, int(lease.expires - self.clock.now()))

    # ---- what goes on

    def watch(
        self, ranges: Sequence[str], sink: Callable[[WatchEvent], None], *, apart: bool = False
    ) -> Watch:
        from tests.simulator.watch import FakeWatch

        return FakeWatch(self, ranges, sink, apart=apart)

    def lease(self, ttl: float, sink: Callable[[LeaseEvent], None]) -> Lease:
        from tests.simulator.lease import FakeLease

        return FakeLease(self, ttl, sink)

    def election(
        self, candidate: str, value: bytes, lease: Lease, sink: Callable[[ElectionEvent], None]
    ) -> Election:
        from tests.simulator.election import FakeElection

        return cast(Election, FakeElection(self, candidate, value, lease, sink))


def _why(guard: Guard, current: KeyValue | None) -> str:
    if current is None:
        return f"{guard} failed: there is no such key"
    return f"{guard} failed: created {current.create_revision}, changed {current.mod_revision}"
