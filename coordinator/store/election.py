# SPDX-License-Identifier: Apache-2.0
"""Who leads: etcd's election recipe, with a fence for every write of the leader."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.store import errors, keys
from coordinator.store.errors import GuardFailed, StoreError
from coordinator.store.stream import Backoff
from coordinator.store.values import Absent, Created, Delete, KeyValue, Put
from coordinator.store.watch import Changed, Listed, WatchEvent

if TYPE_CHECKING:
    from coordinator.store.connection import Store
    from coordinator.store.lease import Lease

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Elected:
    """This candidate leads. ``guard`` holds as long as it does: put it on every write."""

    guard: Created


@dataclass(frozen=True, slots=True)
class Deposed:
    """This candidate does not lead any more, or cannot stand. The last event."""

    reason: str


ElectionEvent = Elected | Deposed


class Election:
    """Stands once for ``candidate`` (a name that no other process uses) until it is over.

    The key ``election/<candidate>`` holds ``value`` and lives on ``lease``; the lowest create
    revision leads, and each candidate waits only for the one before it, so that a leader's end
    wakes one and not all. ``sink`` is called on the election's thread. After :class:`Deposed` the
    election is over: stand again with a new one, on a living lease.

    A leader that is cut off from etcd learns of its end late. That is harmless: its guard fails.
    """

    def __init__(
        self,
        store: Store,
        candidate: str,
        value: bytes,
        lease: Lease,
        sink: Callable[[ElectionEvent], None],
    ) -> None:
        self._store = store
        self._key = keys.election(candidate)
        self._value = value
        self._lease = lease
        self._sink = sink
        self._guard: Created | None = None
        self._elected = False
        self._events: queue.SimpleQueue[WatchEvent | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-election", daemon=True)

    def start(self) -> None:
        """Stand. May be called once."""
        self._thread.start()

    def leader(self) -> KeyValue | None:
        """Return the leader's key now, None if nobody leads. Raises :class:`StoreError`."""
        candidates = self._store.list(keys.ELECTION).items.values()
        return min(candidates, key=lambda kv: kv.create_revision, default=None)

    def resign(self) -> None:
        """Step down or stop standing: deletes the key, so that the next one leads at once.

        ``Deposed`` comes if it led. Raises :class:`StoreError` if the key could not be deleted;
        it then ends with its lease. Returns within a few of the store's timeouts.
        """
        self.close()
        guard = self._guard
        if guard is not None:
            with contextlib.suppress(GuardFailed):  # already gone
                self._store.commit([guard], [Delete(self._key)])
        if self._elected:
            self._elected = False
            self._sink(Deposed("resigned"))

    def close(self) -> None:
        """Stop without giving the key up: it ends with its lease. Sends no event."""
        self._closing.set()
        self._events.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._store.timeout + 3.0)

    # ---- the thread

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            try:
                self._stand()
                return
            except errors.LeaseLost as error:
                self._depose(str(error))
                return
            except StoreError as error:
                _log.info("election %s: %s; trying again", self._key, error)
            except Exception:  # noqa: BLE001 - logged, and tried again
                _log.exception("election %s: unexpected error", self._key)
            self._closing.wait(backoff.next())

    def _depose(self, reason: str) -> None:
        self._elected = False
        self._guard = None
        if not self._closing.is_set():
            self._sink(Deposed(reason))

    def _stand(self) -> None:
        """Register, then wait for each predecessor; returns when the election is over."""
        while self._guard is None and not self._closing.is_set():
            self._guard = self._register()
        while not self._closing.is_set():
            guard = self._guard
            assert guard is not None
            everyone = self._store.list(keys.ELECTION).items
            own = everyone.get(self._key)
            if own is None or own.create_revision != guard.create_revision:
                self._depose("the own key is gone: the lease ended, or somebody deleted it")
                return
            before = [kv for kv in everyone.values() if kv.create_revision < own.create_revision]
            if before:
                self._await_end(guard, max(before, key=lambda kv: kv.create_revision))
                continue
            if not self._elected:
                self._elected = True
                self._sink(Elected(guard))
            self._await_end(guard, None)

    def _register(self) -> Created | None:
        """Create the own key; None if an earlier life's key was in the way and is gone now."""
        put = Put(self._key, self._value, self._lease.id)
        try:
            return Created(self._key, self._store.commit([Absent(self._key)], [put]))
        except GuardFailed as failed:
            current = failed.current[self._key]
        if current is None:
            return None
        if current.lease == self._lease.id:
            # Ours, from a try whose answer was lost.
            return Created(self._key, current.create_revision)
        _log.info("election %s: waiting for an earlier candidate of that name", self._key)
        self._await_end(Created(self._key, current.create_revision), None)
        return None

    def _await_end(self, own: Created, predecessor: KeyValue | None) -> None:
        """Wait until the own key or the predecessor's is gone, or :meth:`close`."""
        awaited = {own.key: own.create_revision}
        if predecessor is not None:
            awaited[predecessor.key] = predecessor.create_revision
        self._events = queue.SimpleQueue()
        if self._closing.is_set():
            return
        watch = self._store.watch(list(awaited), self._events.put)
        watch.start()
        try:
            while not self._closing.is_set():
                event = self._events.get()
                if isinstance(event, Listed):
                    now = {k: kv.create_revision for k, kv in event.items.items()}
                    if now != awaited:
                        return
                elif isinstance(event, Changed):
                    for change in event.changes:
                        created = change.kv.create_revision if change.kv else 0
                        if created != awaited[change.key]:
                            return
        finally:
            watch.close()
