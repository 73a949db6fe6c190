# SPDX-License-Identifier: Apache-2.0
"""What the leader writes, as a watch delivers it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from coordinator.controller import records
from coordinator.model import Generation, Incident, Phase
from coordinator.store import Changed, KeyKind, Listed, Store, Watch, WatchEvent, keys


class Follow:
    """Times are monotonic seconds, of the delivery."""

    def __init__(self, store: Store, job: str, cpu: Callable[[], dict[str, float]]) -> None:
        self._cpu = cpu
        self._changed = threading.Condition()
        self.phases: dict[tuple[int, Phase], float] = {}
        """When a generation came into a phase."""
        self.used: dict[tuple[int, Phase], dict[str, float]] = {}
        """What ``cpu`` said then."""
        self.closed: dict[str, float] = {}
        """When an incident was closed."""
        self.latest = Generation()
        self.writes: Counter[str] = Counter()
        """Of the leader, by kind of key."""
        self.bytes: Counter[str] = Counter()
        """Of keys and values in them."""
        ranges = [keys.generation(job), keys.job_status(job), keys.slots_prefix(job)]
        ranges += [keys.ASSIGNMENTS, keys.SPARES, keys.FLAGS, keys.INCIDENTS]
        # The record alone too: with several ranges a watch waits for the slowest.
        self._watches = [
            Watch(store, ranges, self._count),
            Watch(store, [keys.generation(job)], self._phase),
        ]
        for one in self._watches:
            one.start()

    def close(self) -> None:
        """End the watches."""
        for one in self._watches:
            one.close()

    def wait(self, until: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait for a condition on what is followed. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(until, timeout):
                raise TimeoutError(f"not within {timeout:g} s: {what}; it is at {self.latest}")

    def _phase(self, event: WatchEvent) -> None:
        now = time.monotonic()
        found = []
        if isinstance(event, Listed):
            found = list(event.items.values())
        elif isinstance(event, Changed):
            found = [one.kv for one in event.changes if one.kv is not None]
        with self._changed:
            for one in found:
                self.latest = records.load(KeyKind.GENERATION, one)
                self.phases.setdefault((self.latest.generation, self.latest.phase), now)
                self.used.setdefault((self.latest.generation, self.latest.phase), self._cpu())
            self._changed.notify_all()

    def _count(self, event: WatchEvent) -> None:
        now = time.monotonic()
        if not isinstance(event, Changed):
            return
        with self._changed:
            for one in event.changes:
                kind = keys.parse(one.key).kind
                self.writes[kind.value] += 1
                self.bytes[kind.value] += len(one.key)
                if one.kv is None:
                    continue
                self.bytes[kind.value] += len(one.kv.value)
                if kind is KeyKind.INCIDENT:
                    incident: Incident = records.load(kind, one.kv)
                    if incident.closed:
                        self.closed.setdefault(incident.id, now)
            self._changed.notify_all()
