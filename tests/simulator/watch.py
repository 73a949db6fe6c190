# SPDX-License-Identifier: Apache-2.0
"""A watch of the simulated etcd, with the promises of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.store import Change as Told
from coordinator.store import (
    Changed,
    Disconnected,
    KeyValue,
    Listed,
    Reconnected,
    StoreRequestError,
    Watch,
    WatchEvent,
)
from tests.simulator.clock import Due
from tests.simulator.etcd import Change
from tests.simulator.store import FakeStore

_FIRST = 0.002  # seconds until the listing is there


class FakeWatch(Watch):
    """A listing, then every change; after a compaction the differences."""

    def __init__(
        self,
        store: FakeStore,
        ranges: Sequence[str],
        sink: Callable[[WatchEvent], None],
        *,
        apart: bool = False,
    ) -> None:
        # Not the real one's: that one makes a thread.
        if not ranges:
            raise StoreRequestError("a watch needs a range")
        self._fake = store
        self._names = list(dict.fromkeys(ranges))
        self._whole = [store.prefix + one for one in self._names]
        self._sink = sink
        self._apart = apart
        self._known: dict[str, KeyValue] | None = None
        self._next = 0
        self._cluster = 0
        self._told_connected = True
        self._watching = False
        self._closed = False
        self._pending: list[tuple[int, list[Change]]] = []
        self._pump: Due | None = None

    def start(self) -> None:
        self._fake.streams[self] = None
        if self._fake.reachable:
            self._fake.clock.after(_FIRST, self.found)
        else:
            self.lost("no connection", _FIRST)

    def close(self) -> None:
        self._closed = True
        self._stop()
        self._fake.streams.pop(self, None)

    def _is_closed(self) -> bool:
        return self._closed

    def _stop(self) -> None:
        self._pending.clear()
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        if self._watching:
            self._watching = False
            self._fake.etcd.unwatch(self, self._whole)

    # ---- the connection

    def lost(self, reason: str, after: float) -> None:
        """What was not delivered yet will be read again."""
        self._stop()
        self._fake.clock.after(after, lambda: self._tell_lost(reason))

    def _tell_lost(self, reason: str) -> None:
        if not self._closed and not self._watching and self._told_connected:
            self._told_connected = False
            self._emit(Disconnected(f"etcd {self._fake.endpoints}: {reason}"))

    def found(self) -> None:
        """List, or go on where it was."""
        if self._closed or self._watching or not self._fake.reachable:
            return
        etcd = self._fake.etcd
        stale = (
            self._known is None
            or self._cluster != etcd.cluster
            or self._next <= etcd.compacted
            or self._next > etcd.revision + 1
        )
        if stale:
            self._list()
        if self._is_closed():
            return
        self._watching = True
        etcd.watch(self, self._whole)
        if not self._told_connected:
            self._told_connected = True
            self._emit(Reconnected())
        if not stale:
            for revision, changes in list(etcd.since(self._next)):
                mine = [one for one in changes if self._covers(one.key)]
                if mine:
                    self._tell(revision, mine)
        self._next = etcd.revision + 1

    def _covers(self, key: str) -> bool:
        return any(key.startswith(one) if one.endswith("/") else key == one for one in self._whole)

    def _list(self) -> None:
        before = self._known
        snapshot, self._cluster = self._fake.list_ranges(self._names)
        after = dict(snapshot.items)
        self._known, self._next = after, snapshot.revision + 1
        if before is None:
            self._emit(Listed(snapshot.revision, snapshot.items))
            return
        told = tuple(
            Told(key, after.get(key), before.get(key))
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        )
        if told:
            self._emit(Changed(snapshot.revision, told))

    # ---- changes

    def feed(self, revision: int, changes: list[Change], delay: float) -> None:
        """They are on their way."""
        self._pending.append((revision, changes))
        if self._pump is None:
            self._pump = self._fake.clock.after(delay, self._hand_over)

    def _hand_over(self) -> None:
        self._pump = None
        pending, self._pending = self._pending, []
        for revision, changes in pending:
            self._tell(revision, changes)

    def _tell(self, revision: int, changes: Sequence[Change]) -> None:
        if self._closed:
            return
        assert self._known is not None
        told = []
        for change in changes:
            key = self._fake.relative(change.key)
            before = self._known.pop(key, None)
            now = None if change.new is None else self._fake._relative(change.new)
            if now is not None:
                self._known[key] = now
            told.append(Told(key, now, before))
        self._next = revision + 1
        for part in self._parts(told):
            self._emit(Changed(revision, tuple(part)))

    def _parts(self, told: list[Told]) -> list[list[Told]]:
        """One event's changes each: of all ranges, or of one."""
        if not self._apart:
            return [told]
        parts = (
            [
                one
                for one in told
                if one.key == name or (name[-1:] in ("", "/") and one.key.startswith(name))
            ]
            for name in self._names
        )
        return [part for part in parts if part]

    def _emit(self, event: WatchEvent) -> None:
        if not self._closed:
            self._sink(event)
