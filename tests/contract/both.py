# SPDX-License-Identifier: Apache-2.0
"""What lets one test run on the real etcd and on the simulated one (``tests/simulator``).

Tests that are about sockets, threads, processes, users or several members say ``only_real``.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias, TypeVar

import pytest

from coordinator.store import Store, StoreUnavailable
from tests.etcd import Etcd
from tests.simulator.clock import Clock
from tests.simulator.etcd import FakeEtcd
from tests.simulator.store import FakeStore

_T = TypeVar("_T")

AnyEtcd: TypeAlias = Etcd | FakeEtcd
"""Both can be killed, frozen, thawed, started and compacted."""

only_real = pytest.mark.parametrize("kind", ["real"], indirect=True)


def open_store(
    etcd: AnyEtcd, prefix: str = "/own", timeout: float = 5.0, keepalive: float = 1.0
) -> Store:
    """Another client of an etcd."""
    if isinstance(etcd, FakeEtcd):
        return FakeStore(etcd, prefix=prefix, timeout=timeout)
    return Store(etcd.endpoints, prefix=prefix, timeout=timeout, keepalive=keepalive)


def set_up_anew(etcd: AnyEtcd) -> None:
    """Lose all that an etcd has; it must be down."""
    if isinstance(etcd, FakeEtcd):
        etcd.set_up_anew()
        return
    for member in etcd.members:
        shutil.rmtree(member.folder / member.name)


@contextmanager
def cut_off(store: Store) -> Iterator[None]:
    """No new stream comes about in the block."""
    if isinstance(store, FakeStore):
        store.cut(0.0)
        yield
        store.mend()
        return
    metadata = store.calls.metadata

    def refuse(timeout: float | None = None) -> tuple[tuple[str, str], ...]:
        raise StoreUnavailable("cut off by the test")

    store.calls.metadata = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        store.calls.metadata = metadata  # type: ignore[method-assign]


class Time(Protocol):
    """The time that an etcd and its clients live in."""

    def now(self) -> float:
        """Monotonic seconds."""

    def wait(self, seconds: float) -> None:
        """Let so many seconds pass."""

    def get(self, events: queue.SimpleQueue[_T], seconds: float) -> _T:
        """The next event; raises queue.Empty when none comes in so many seconds."""


class RealTime:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def get(self, events: queue.SimpleQueue[_T], seconds: float) -> _T:
        return events.get(timeout=seconds)


class VirtualTime:
    """Passes only while a test waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def wait(self, seconds: float) -> None:
        self._clock.run_until(self.now() + seconds)

    def get(self, events: queue.SimpleQueue[_T], seconds: float) -> _T:
        until = self.now() + seconds
        while events.empty() and self._clock.step(until):
            pass
        if events.empty():
            self._clock.run_until(until)
        return events.get_nowait()


def time_of(store: Store) -> Time:
    """The time that a store lives in."""
    return VirtualTime(store.clock) if isinstance(store, FakeStore) else RealTime()
