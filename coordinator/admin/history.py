# SPDX-License-Identifier: Apache-2.0
"""Every change of the cluster's records from a revision on, past and to come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.store import Compacted, KeyValue, Store, StoreError, StoreUnavailable
from coordinator.store.keys import prefix_end
from coordinator.store.stream import Stream, StreamEnded
from protos.etcd import kv_pb2, rpc_pb2

_LOOK = 0.5
"""Seconds after which it looks whether anybody still listens."""
_QUIET = 0.5
"""etcd sends the past in rounds of 100 ms. After this long without any it has sent it."""
_EVERYTHING = ""

_Stream = Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse]


class InTheFuture(StoreError):
    """etcd hasn't come to that revision yet."""


class NotKept(StoreError):
    """etcd has compacted that revision; ``first`` is the oldest from which one can begin."""

    def __init__(self, message: str, first: int) -> None:
        super().__init__(message)
        self.first = first


@dataclass(frozen=True, slots=True)
class Step:
    """One key's change; None where it didn't exist. ``live``: it came after the call began."""

    revision: int
    key: str
    before: KeyValue | None
    after: KeyValue | None
    live: bool


def follow(
    store: Store,
    from_revision: int,
    listening: Callable[[], bool],
    begun: Callable[[int], None],
    *,
    only_past: bool = False,
) -> Iterator[Step]:
    """Yield every change from ``from_revision`` on, 0: from now on, while ``listening`` says so.

    In the order of revisions, none lost, none twice. ``begun`` is told, once, the revision that
    it begins with. With ``only_past`` it ends where the call began.

    Raises :class:`NotKept` when etcd has compacted the revision, :class:`InTheFuture` when it
    hasn't come to it, and :class:`StoreUnavailable` when the stream breaks: call again with the
    next revision.
    """
    present = store.read([]).revision
    if from_revision > present + 1:
        raise InTheFuture(f"revision {from_revision} is in the future, etcd is at {present}")
    start = from_revision or present + 1
    try:
        # What stood before the first change; to etcd, revision 0 would mean the present.
        known = dict(store.list(_EVERYTHING, revision=start - 1).items) if start > 1 else {}
    except Compacted:
        raise _not_kept(start, _first_kept(store)) from None
    newest = 0
    if only_past:
        there = store.list(_EVERYTHING, revision=present).items.values()
        newest = max((one.mod_revision for one in there), default=0)
    begun(start)
    last, heard = start - 1, time.monotonic()
    with _watch(store, start) as stream:
        while listening():
            answer = stream.receive(_LOOK)
            if answer is None or not answer.events:
                if answer is not None:
                    _check(answer, start)
                # A deletion leaves no record behind that says how new it is: quiet says it.
                if only_past and last >= newest and time.monotonic() - heard > _QUIET:
                    return
                continue
            for event in answer.events:
                last, heard = event.kv.mod_revision, time.monotonic()
                if only_past and last > present:
                    return
                yield _step(store, known, event, present)


@contextmanager
def _watch(store: Store, start: int) -> Iterator[_Stream]:
    first = store.full(_EVERYTHING)
    stream = _Stream(store.calls.watch.Watch, store.calls.metadata(), "events")
    create = rpc_pb2.WatchCreateRequest(
        key=first, range_end=prefix_end(first), start_revision=start
    )
    try:
        stream.send(rpc_pb2.WatchRequest(create_request=create))
        yield stream
    except StreamEnded as ended:
        if ended.error is None:
            raise StoreUnavailable("etcd ended the watch") from None
        raise store.calls.error(ended.error, "watch") from None
    finally:
        stream.close()


def _check(answer: rpc_pb2.WatchResponse, start: int) -> None:
    if answer.canceled and answer.compact_revision:
        raise _not_kept(start, answer.compact_revision + 1)
    if answer.canceled:
        raise StoreUnavailable(f"etcd ended the watch: {answer.cancel_reason}")


def _not_kept(start: int, first: int) -> NotKept:
    return NotKept(f"revision {start} is no longer kept, the oldest is {first}", first)


def _first_kept(store: Store) -> int:
    """The oldest revision to begin with: etcd tells it to a watch that comes too late."""
    deadline = time.monotonic() + store.timeout
    with _watch(store, 1) as stream:
        while time.monotonic() < deadline:
            answer = stream.receive(deadline - time.monotonic())
            if answer is not None and answer.canceled:
                return answer.compact_revision + 1
    raise StoreUnavailable("etcd doesn't say which revisions it keeps")


def _step(store: Store, known: dict[str, KeyValue], event: kv_pb2.Event, present: int) -> Step:
    key = store.relative(event.kv.key)
    before = known.pop(key, None)
    after = None
    if event.type == kv_pb2.Event.PUT:
        after = known[key] = store.key_value(event.kv)
    revision = event.kv.mod_revision
    return Step(revision, key, before, after, live=revision > present)
