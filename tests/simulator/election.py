# SPDX-License-Identifier: Apache-2.0
"""A candidature at the simulated etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from coordinator.store import (
    Absent,
    Created,
    Delete,
    Deposed,
    Disconnected,
    Elected,
    Election,
    ElectionEvent,
    GuardFailed,
    KeyValue,
    Lease,
    Put,
    StoreUnavailable,
    WatchEvent,
    errors,
    keys,
)
from tests.simulator.store import FakeStore

_AGAIN = 0.5  # seconds


class FakeElection(Election):
    """The lowest create revision leads; each candidate looks whenever one comes or goes."""

    def __init__(
        self,
        store: FakeStore,
        candidate: str,
        value: bytes,
        lease: Lease,
        sink: Callable[[ElectionEvent], None],
    ) -> None:
        # Not the real one's: that one makes a thread.
        self._fake = store
        self._key = keys.election(candidate)
        self._value = value
        self._lease = lease
        self._sink = sink
        self._guard: Created | None = None
        self._elected = False
        self._closed = False
        self._watch = store.watch([keys.ELECTION], self._heard)

    def start(self) -> None:
        self._watch.start()

    def leader(self) -> KeyValue | None:
        candidates = self._fake.list(keys.ELECTION).items.values()
        return min(candidates, key=lambda kv: kv.create_revision, default=None)

    def resign(self) -> None:
        self.close()
        guard = self._guard
        if guard is not None:
            with contextlib.suppress(GuardFailed):  # already gone
                self._fake.commit([guard], [Delete(self._key)])
        if self._elected:
            self._elected = False
            self._sink(Deposed("resigned"))

    def close(self) -> None:
        self._closed = True
        self._watch.close()

    def _heard(self, event: WatchEvent) -> None:
        if not isinstance(event, Disconnected):
            self._look()

    def _look(self) -> None:
        if self._closed:
            return
        try:
            if self._guard is None:
                self._guard = self._register()
            if self._guard is not None:
                self._compare(self._guard)
        except errors.LeaseLost as error:
            self._depose(str(error))
        except StoreUnavailable:
            self._fake.clock.after(_AGAIN, self._look)

    def _register(self) -> Created | None:
        put = Put(self._key, self._value, self._lease.id)
        try:
            return Created(self._key, self._fake.commit([Absent(self._key)], [put]))
        except GuardFailed as failed:
            current = failed.current[self._key]
        if current is not None and current.lease == self._lease.id:
            return Created(self._key, current.create_revision)  # whose answer was lost
        return None  # an earlier life's, or gone already: the watch tells when that is over

    def _compare(self, guard: Created) -> None:
        everyone = self._fake.list(keys.ELECTION).items
        own = everyone.get(self._key)
        if own is None or own.create_revision != guard.create_revision:
            self._depose("the own key is gone: the lease ended, or somebody deleted it")
            return
        first = min(one.create_revision for one in everyone.values())
        if first == own.create_revision and not self._elected:
            self._elected = True
            self._sink(Elected(guard))

    def _depose(self, reason: str) -> None:
        self._elected = False
        self._guard = None
        if not self._closed:
            self.close()
            self._sink(Deposed(reason))
