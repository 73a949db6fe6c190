# SPDX-License-Identifier: Apache-2.0
"""An etcd on virtual time: revisions, history, compaction, guarded transactions, leases, outages.

Clients reach it through :class:`tests.simulator.store.FakeStore`, which is a
:class:`coordinator.store.Store`. ``tests/contract`` holds both to the same tests.

What it takes from the real one: the limits of a transaction; a revision only where something
changes; leases of at least two seconds, looked at every half a second, at most 1,000 of them
revoked a second; every lease has its full TTL again when etcd has a new leader. What it leaves
out: members, disks, users, the size of messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.store import Delete, Guard, KeyValue, Put, StoreRequestError, Write, errors
from coordinator.store.values import holds
from tests.simulator.clock import Clock
from tests.simulator.lessor import Lessor

ELECTION = 1.0
"""Seconds that etcd takes to find itself a new leader."""
NOTICED = 1.5
"""Seconds after which a client notices that a frozen etcd, or a cut line, doesn't answer."""
_MAX_REQUEST = 1_572_864  # bytes
_MAX_OPERATIONS = 128
_DELAY = 0.001  # seconds from a write to a watcher that hears of it, at least
_FAN_OUT = 0.00001  # seconds from one watcher of a write to the next one
_COST = 0.0001  # seconds that a write takes etcd, one after the other


class Watcher(Protocol):
    """Who hears of changes."""

    def feed(self, revision: int, changes: list[Change], delay: float) -> None:
        """Some keys have changed at a revision; tell it after ``delay``."""


class Client(Protocol):
    """Who has a connection."""

    def disconnected(self, reason: str, after: float) -> None:
        """It is broken; the client notices after so many seconds."""

    def reconnected(self) -> None:
        """etcd is there again."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key before and after; None: it is not there."""

    key: str
    new: KeyValue | None
    old: KeyValue | None


class Refused(Exception):
    """Guards of a transaction don't hold."""

    def __init__(self, current: dict[str, KeyValue | None], revision: int) -> None:
        super().__init__(f"at revision {revision}")
        self.current = current
        self.revision = revision


class FakeEtcd:
    """All keys are whole ones here, with the cluster's prefix."""

    def __init__(self, clock: Clock, seed: int = 0, *, quiet: bool = False) -> None:
        self.clock = clock
        self.random = random.Random(f"etcd {seed}")
        self.quiet = quiet
        """Whether renewals that change nothing happen unseen; see ``FakeLease``."""
        self.clients: dict[Client, None] = {}
        self.up = True
        self.frozen = False
        self.commits = 0
        self._watchers: dict[str, dict[Watcher, None]] = {}
        self._prefixes: dict[Watcher, tuple[str, ...]] = {}
        self._busy = 0.0
        self._outage = 0
        self._in_flight: list[Callable[[], object]] = []
        self._begin()

    def _begin(self) -> None:
        self.cluster = self.random.getrandbits(60)
        self.revision = 1
        self.compacted = 0
        self.items: dict[str, KeyValue] = {}
        self.lessor = Lessor(self.clock, self.random, self._ended)
        self._log: list[tuple[Change, ...]] = []
        self._log_from = 2  # the revision of the log's first entry

    # ---- what may happen to it

    def kill(self) -> None:
        """It is gone, at once and for everybody."""
        self.frozen = False
        self._in_flight.clear()
        self._stop("connection refused", after=0.01)

    def freeze(self) -> None:
        """It stands still; clients notice when it doesn't answer in time."""
        self.frozen = True
        self._stop("no answer", after=NOTICED)

    def _stop(self, reason: str, after: float) -> None:
        self.up = False
        self._outage += 1
        self.lessor.stop()
        for client in list(self.clients):
            client.disconnected(reason, after)

    def start(self) -> None:
        """It is there again, as it was, and with a new leader: leases begin anew."""
        if self.up:
            return
        self.frozen = False
        self._go_on(anew=True)

    def thaw(self) -> None:
        """It goes on where it stood; what was sent meanwhile may arrive."""
        if self.up:
            return
        self.frozen = False
        arrived, self._in_flight = self._in_flight, []
        self._go_on(anew=False)
        for run in arrived:
            if self.random.random() < 0.5:
                run()

    def _go_on(self, *, anew: bool) -> None:
        self.up = True
        self.lessor.go_on(anew=anew)
        for client in list(self.clients):
            client.reconnected()

    def restart(self) -> None:
        """Kill it and start it."""
        self.kill()
        self.start()

    def await_ready(self) -> None:
        """It is, as soon as it has started."""

    def change_leader(self) -> None:
        """For the time of an election nobody answers; then every lease has its whole TTL again."""
        self.kill()
        outage = self._outage
        self.clock.after(ELECTION, lambda: self.start() if outage == self._outage else None)

    def set_up_anew(self) -> None:
        """While it is down: all that it had is lost."""
        self.lessor.stop()
        self._begin()

    def compact(self, revision: int) -> None:
        """Forget what was before a revision."""
        if not self.compacted < revision <= self.revision:
            raise StoreRequestError(f"compaction at {revision}, now is {self.revision}")
        del self._log[: revision + 1 - self._log_from]
        self._log_from = revision + 1
        self.compacted = revision

    def send_late(self, run: Callable[[], object]) -> None:
        """A request to an etcd that is frozen: it may be carried out when it goes on."""
        self._in_flight.append(run)

    # ---- reads

    def snapshot(self, revision: int = 0) -> dict[str, KeyValue]:
        """All keys as of a revision; 0 is now."""
        if not revision or revision == self.revision:
            return self.items
        if revision > self.revision:
            raise StoreRequestError(f"{revision} is a future revision")
        if revision < self.compacted:
            raise errors.Compacted(f"revision {revision} is compacted")
        then = dict(self.items)
        for changes in reversed(self._log[revision + 1 - self._log_from :]):
            for change in changes:
                if change.old is None:
                    then.pop(change.key, None)
                else:
                    then[change.key] = change.old
        return then

    def since(self, revision: int) -> Iterable[tuple[int, tuple[Change, ...]]]:
        """What has changed from a revision on, which must not be compacted."""
        return enumerate(self._log[max(0, revision - self._log_from) :], revision)

    # ---- writes

    def commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        """Carry out a transaction; its revision. Raises Refused, LeaseLost, StoreRequestError."""
        for what, count in (("guards", len(guards)), ("writes", len(writes))):
            if count > _MAX_OPERATIONS:
                raise StoreRequestError(
                    f"{count} {what} in one transaction: etcd takes at most {_MAX_OPERATIONS}"
                )
        puts = [one for one in writes if isinstance(one, Put)]
        if sum(len(one.value) for one in puts) > _MAX_REQUEST:
            raise StoreRequestError("INVALID_ARGUMENT: etcdserver: request is too large")
        put_keys = [one.key for one in puts]
        deleted = {one.key for one in writes if isinstance(one, Delete)}
        if len(set(put_keys)) < len(put_keys) or deleted & set(put_keys):
            raise StoreRequestError("INVALID_ARGUMENT: duplicate key given in txn request")
        current = {guard.key: self.items.get(guard.key) for guard in guards}
        if not all(holds(guard, current[guard.key]) for guard in guards):
            raise Refused(current, self.revision)
        for one in puts:
            if one.lease and one.lease not in self.lessor.leases:
                raise errors.LeaseLost("NOT_FOUND: etcdserver: requested lease not found")
        self.commits += 1
        return self._apply(writes)

    def _apply(self, writes: Sequence[Write]) -> int:
        revision = self.revision + 1
        changes = []
        for write in writes:
            old = self.items.get(write.key)
            if isinstance(write, Put):
                created = old.create_revision if old else revision
                new = KeyValue(write.key, write.value, created, revision, write.lease)
                self.items[write.key] = new
            elif old is None:
                continue
            else:
                new = None
                del self.items[write.key]
            changes.append(Change(write.key, new, old))
            self._bind(write.key, old.lease if old else 0, new.lease if new else 0)
        if not changes:
            return self.revision
        self.revision = revision
        self._log.append(tuple(changes))
        self._publish(revision, changes)
        return revision

    def _bind(self, key: str, before: int, after: int) -> None:
        if before == after:
            return
        leases = self.lessor.leases
        if before in leases:
            leases[before].keys.discard(key)
        if after:
            leases[after].keys.add(key)

    def _ended(self, keys: set[str]) -> None:
        self._apply([Delete(key) for key in sorted(keys)])

    def service(self) -> float:
        """Seconds until a write that is sent now has been carried out: one after the other."""
        self._busy = max(self._busy, self.clock.now()) + _COST
        return self._busy - self.clock.now()

    # ---- watches

    def watch(self, watcher: Watcher, ranges: Iterable[str]) -> None:
        """Tell it of every change of these keys, and of those below prefixes ending in ``/``."""
        prefixes = []
        for one in ranges:
            if one.endswith("/"):
                prefixes.append(one)
            else:
                self._watchers.setdefault(one, {})[watcher] = None
        if prefixes:
            self._prefixes[watcher] = tuple(prefixes)

    def unwatch(self, watcher: Watcher, ranges: Iterable[str]) -> None:
        """Don't any more."""
        self._prefixes.pop(watcher, None)
        for one in ranges:
            watching = self._watchers.get(one)
            if watching is not None:
                watching.pop(watcher, None)
                if not watching:
                    del self._watchers[one]

    def _publish(self, revision: int, changes: list[Change]) -> None:
        told: dict[Watcher, list[Change]] = {}
        for change in changes:
            for watcher, prefixes in self._prefixes.items():
                if change.key.startswith(prefixes):
                    told.setdefault(watcher, []).append(change)
            for watcher in self._watchers.get(change.key, ()):
                told.setdefault(watcher, []).append(change)
        for number, (watcher, about) in enumerate(told.items()):
            watcher.feed(revision, about, _DELAY + number * _FAN_OUT)
