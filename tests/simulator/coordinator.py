# SPDX-License-Identifier: Apache-2.0
"""A simulated coordinator process: the production controller, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from coordinator.controller.loop import Controller, Leadership
from coordinator.prober import Contacted, Probed, Prober, Witnessed
from coordinator.store import (
    Election,
    ElectionEvent,
    Guard,
    Lease,
    LeaseEvent,
    Watch,
    WatchEvent,
    Write,
    keys,
)
from tests.simulator.clock import Due
from tests.simulator.group import Violation
from tests.simulator.prober import SimProber
from tests.simulator.store import FakeStore

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

_E = TypeVar("_E")
_WRITE = 0.002  # seconds for each of the leader's writes, besides etcd's own time
_LOOK = 0.25  # seconds until the next look at deadlines, doubled while nothing comes in,
_BUSY, _CALM = 4.0, 120.0  # up to this; the real one looks ten times a second


class _Store(FakeStore):
    """Wakes its coordinator whenever something comes in, counts its writes, and sees that it
    writes only while it leads."""

    def __init__(self, cluster: Cluster, name: str, notice: Callable[[], None]) -> None:
        super().__init__(cluster.etcd, prefix=cluster.prefix)
        self._cluster = cluster
        self._notice = notice
        self._own = cluster.prefix + keys.election(name)
        self.written = 0

    def _noticing(self, sink: Callable[[_E], None]) -> Callable[[_E], None]:
        def put(event: _E) -> None:
            sink(event)
            self._notice()

        return put

    def commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        self.written += 1
        revision = super().commit(guards, writes)
        if not all(one.key.startswith(keys.ELECTION) for one in writes):
            names = [self.prefix + keys.election(one.name) for one in self._cluster.coordinators]
            standing = [self.etcd.items[key] for key in names if key in self.etcd.items]
            first = min(standing, key=lambda one: one.create_revision, default=None)
            if first is None or first.key != self._own:
                raise Violation(f"{self._own} writes {writes}, but {first} leads")
        return revision

    def watch(
        self, ranges: Sequence[str], sink: Callable[[WatchEvent], None], *, apart: bool = False
    ) -> Watch:
        return super().watch(ranges, self._noticing(sink), apart=apart)

    def lease(self, ttl: float, sink: Callable[[LeaseEvent], None]) -> Lease:
        return super().lease(ttl, self._noticing(sink))

    def election(
        self, candidate: str, value: bytes, lease: Lease, sink: Callable[[ElectionEvent], None]
    ) -> Election:
        return super().election(candidate, value, lease, self._noticing(sink))


class SimCoordinator:
    """One of several; the one that etcd elects leads."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.turns = 0
        self.controller: Controller | None = None
        self._due: Due | None = None
        self._due_at = 0.0
        self._free_at = 0.0
        self._pause = _LOOK
        self.start()

    def start(self) -> None:
        """The process starts."""
        cluster = self.cluster
        self.store = _Store(cluster, self.name, self._notice)
        store = self.store

        def prober(sink: Callable[[Probed | Contacted | Witnessed], None]) -> Prober:
            self._prober = SimProber(cluster, store._noticing(sink))
            return self._prober

        self.leadership = Leadership()
        self.controller = Controller(
            store,
            self.name,
            b"{}",
            cluster.settings,
            self.leadership,
            prober=prober,
            clock=cluster.clock.now,
        )
        self._free_at = cluster.clock.now()
        self._plan(0.01)

    @property
    def leads(self) -> bool:
        """Whether its election key is the first."""
        guard = self.leadership.guard
        if self.controller is None or guard is None:
            return False
        key = self.cluster.etcd.items.get(self.cluster.prefix + keys.election(self.name))
        return key is not None and key.create_revision == guard.create_revision

    def crash(self) -> None:
        """The process is gone, at once."""
        self.controller = None
        self.cluster.probers.remove(self._prober)
        self._prober.close()
        self.store.close()
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def look(self) -> None:
        """Look at deadlines again, soon."""
        if self.controller is not None:
            self._pause = _LOOK
            self._plan(_LOOK)

    def _notice(self) -> None:
        if self.controller is not None:
            self._pause = _LOOK
            self._plan(0.0)

    def _plan(self, seconds: float) -> None:
        at = max(self.cluster.clock.now() + seconds, self._free_at)
        if self._due is not None:
            if self._due_at <= at:
                return
            self._due.cancel()
        self._due, self._due_at = self.cluster.clock.at(at, self._turn), at

    def _turn(self) -> None:
        self._due = None
        if self.controller is None:
            return
        self.turns += 1
        before = self.store.written
        self.controller.turn(0.0)
        times = self.cluster.times
        spent = times.lead + times.lead_node * len(self.cluster.nodes)
        spent += _WRITE * (self.store.written - before)
        self._free_at = self.cluster.clock.now() + (spent if self.leads else 0.001)
        waiting = not self.controller._events.empty()
        self._plan(0.0 if waiting else self._pause)
        self._pause = min(2 * self._pause, _CALM if self.cluster.calm else _BUSY)
