# SPDX-License-Identifier: Apache-2.0
"""Sinks that tests can wait on, and what a watch's events add up to."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from coordinator.store import Changed, KeyValue, Listed, Store, WatchEvent
from coordinator.store.keys import prefix_end
from protos.etcd import kv_pb2, rpc_pb2
from tests.contract.both import time_of

_T = TypeVar("_T")
_E = TypeVar("_E")


class Recorder(Generic[_T]):
    """Give ``recorder.put`` as the sink; every event stays in ``seen``."""

    def __init__(self, store: Store) -> None:
        self._time = time_of(store)
        self._queue: queue.SimpleQueue[_T] = queue.SimpleQueue()
        self.put = self._queue.put
        self.seen: list[_T] = []

    def next(self, timeout: float = 30.0) -> _T:
        """The next event; fails the test if none comes in time."""
        try:
            event = self._time.get(self._queue, max(0.001, timeout))
        except queue.Empty:
            raise AssertionError(f"no event came; before: {self.seen[-5:]}") from None
        self.seen.append(event)
        return event

    def until(self, kind: type[_E], timeout: float = 30.0) -> _E:
        """The next event of ``kind``, skipping others."""
        deadline = self._time.now() + timeout
        while True:
            event = self.next(deadline - self._time.now())
            if isinstance(event, kind):
                return event

    def until_true(self, done: Callable[[], bool], timeout: float = 40.0) -> None:
        """Take events until ``done()``."""
        deadline = self._time.now() + timeout
        while not done():
            self.next(deadline - self._time.now())

    def nothing_for(self, seconds: float) -> None:
        """Fails the test if an event comes."""
        try:
            event = self._time.get(self._queue, seconds)
        except queue.Empty:
            return
        raise AssertionError(f"unexpected: {event}")


def state(events: list[WatchEvent]) -> dict[str, KeyValue]:
    """What the events add up to. Checks that ``previous`` is right each time."""
    found: dict[str, KeyValue] = {}
    for event in events:
        if isinstance(event, Listed):
            assert not found
            found = dict(event.items)
        elif isinstance(event, Changed):
            for change in event.changes:
                assert change.previous == found.get(change.key), (event, found.get(change.key))
                if change.kv is None:
                    del found[change.key]
                else:
                    found[change.key] = change.kv
    return found


def history(events: list[WatchEvent]) -> list[tuple[int, str, bytes | None]]:
    """Every change: revision, key, value (None: deleted)."""
    return [
        (event.revision, change.key, change.kv.value if change.kv else None)
        for event in events
        if isinstance(event, Changed)
        for change in event.changes
    ]


def full_history(store: Store, after: int, upto: int) -> list[tuple[int, str, bytes | None]]:
    """Every change as etcd itself tells it, in the revisions after ``after`` up to ``upto``."""
    start = store.full("")
    create = rpc_pb2.WatchCreateRequest(
        key=start, range_end=prefix_end(start), start_revision=after + 1
    )
    request = rpc_pb2.WatchRequest(create_request=create)
    call = store.calls.watch.Watch(iter([request]), timeout=20)
    found: list[tuple[int, str, bytes | None]] = []
    try:
        for answer in call:
            for event in answer.events:
                deleted = event.type == kv_pb2.Event.DELETE
                value = None if deleted else event.kv.value
                found.append((event.kv.mod_revision, store.relative(event.kv.key), value))
            if found and found[-1][0] >= upto:
                break
    finally:
        call.cancel()
    return [entry for entry in found if entry[0] <= upto]


@contextmanager
def watching(store: Store, *ranges: str, apart: bool = False) -> Iterator[Recorder[WatchEvent]]:
    """A watch that runs while the block does."""
    recorder: Recorder[WatchEvent] = Recorder(store)
    watch = store.watch(ranges, recorder.put, apart=apart)
    watch.start()
    try:
        yield recorder
    finally:
        began = time_of(store).now()
        watch.close()
        assert time_of(store).now() - began < store.timeout + 1
