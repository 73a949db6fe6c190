# SPDX-License-Identifier: Apache-2.0
"""List and watch: a snapshot first, then every change after it, over whatever breaks between."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.store.assembly import Assembly
from coordinator.store.errors import StoreError, StoreRequestError, StoreUnavailable
from coordinator.store.stream import Backoff, Stream, StreamEnded
from coordinator.store.txn import span
from coordinator.store.values import KeyValue
from protos.etcd import kv_pb2, rpc_pb2

if TYPE_CHECKING:
    from coordinator.store.connection import Store

_log = logging.getLogger(__name__)

_IDLE = 60.0  # nothing hangs on it: the owner is woken by answers and by close()
# How often to ask again whether every range is up to date; etcd (3.4.25, 3.5.8 and later) does
# not answer at all while one is not.
_ASK_AGAIN = 0.1
# Older versions answer at once, even while a range catches up. Catching up takes etcd at most
# two rounds of 100 ms, so that after a gap their answer is not trusted before this.
_CATCH_UP = 0.3
# Without any answer in this time events are delivered nevertheless: late is worse than split.
_HOLD = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """One key's change. ``kv`` is None if it was deleted, ``previous`` None if it is new."""

    key: str
    kv: KeyValue | None
    previous: KeyValue | None


@dataclass(frozen=True, slots=True)
class Listed:
    """The first event: every key of the ranges as of ``revision``."""

    revision: int
    items: Mapping[str, KeyValue]


@dataclass(frozen=True, slots=True)
class Changed:
    """What changed at ``revision``, each key once.

    After a compaction, the differences to what was delivered before; ``revision`` is then that
    of the new listing.
    """

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """From here on events may be late. Sent once until :class:`Reconnected`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The stream is there again; what was missed follows."""


WatchEvent = Listed | Changed | Disconnected | Reconnected


class _ListAgain(Exception):
    """The stream cannot go on from where it was."""


class Watch:
    """Delivers ``ranges`` into ``sink``: first :class:`Listed`, then every :class:`Changed`.

    A range is a key, or a prefix ending in ``/`` ("" is the whole cluster). ``sink`` is called on
    the watch's thread; it should only put the event into a queue.

    Guaranteed, over disconnects, restarts and changes of etcd's members: no change is lost or
    repeated; the changes of one range come in the order of revisions, those of one revision in
    one event. After a compaction only the differences are known, and come as one event.

    Changes of *several* ranges at one revision come in one event too, and all events in the order
    of revisions, except that etcd before 3.4.25 and 3.5.8 may, for a range that lags (after a
    burst that this client was too slow to read, say), deliver its part later, as an event of its
    own with that same, by then lower, revision. Newer ones may too, if the range lags for more
    than a second. One range has no exception.

    With ``apart`` each range stands for itself, as if it had a watch of its own: a revision that
    changes several comes in several events. It spares etcd a question for every change, where an
    event only says that there is something to read.
    """

    def __init__(
        self,
        store: Store,
        ranges: Sequence[str],
        sink: Callable[[WatchEvent], None],
        *,
        apart: bool = False,
    ) -> None:
        if not ranges:
            raise StoreRequestError("a watch needs a range")
        self._store = store
        self._ranges = _without_contained(ranges)
        self._sink = sink
        self._apart = apart or len(self._ranges) == 1
        self._assembly = Assembly(len(self._ranges))
        self._state: dict[str, KeyValue] | None = None
        self._stale = True  # the state must be listed (again)
        self._cluster = 0
        self._connected = True
        self._stream: Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse] | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._backoff = Backoff()
        self._trusted_from = 0.0
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)

    def start(self) -> None:
        """Begin. May be called once."""
        self._thread.start()

    def close(self) -> None:
        """End the watch. No event comes afterwards, unless this is called from the sink.

        Returns at once, or, while a listing runs, within the store's timeout.
        """
        with self._lock:
            self._closing.set()
            if self._stream is not None:
                self._stream.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._store.timeout + 3.0)
            if self._thread.is_alive():
                _log.error("watch of %s: its thread did not end", ", ".join(self._ranges))

    # ---- the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._follow()
            except _ListAgain as reason:
                _log.info("watch of %s: listing again: %s", ", ".join(self._ranges), reason)
                self._stale = True
            except StoreError as error:
                self._disconnected(str(error))
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A watch that ends in silence would be worse than anything: begin anew.
                _log.exception("watch of %s: unexpected error", ", ".join(self._ranges))
                self._stale = True
            self._closing.wait(self._backoff.next())

    def _emit(self, event: WatchEvent) -> None:
        if not self._closing.is_set():
            self._sink(event)

    def _disconnected(self, reason: str) -> None:
        if self._connected and not self._closing.is_set():
            self._connected = False
            self._emit(Disconnected(reason))

    def _list(self) -> None:
        snapshot, self._cluster = self._store.list_ranges(self._ranges)
        before, after = self._state, dict(snapshot.items)
        self._state = after
        self._assembly.reset(snapshot.revision)
        self._stale = False
        if before is None:
            self._emit(Listed(snapshot.revision, snapshot.items))
            return
        changes = tuple(
            Change(key, after.get(key), before.get(key))
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        )
        if changes:
            self._emit(Changed(snapshot.revision, changes))

    def _follow(self) -> None:
        stream = Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse](
            self._store.calls.watch.Watch, self._store.calls.metadata(), "store-watch"
        )
        with self._lock:
            self._stream = stream
        try:
            for index, text in enumerate(self._ranges):
                stream.send(self._create(index, text))
            gap = self._await_created(stream)
            if self._stale:
                # Only now, so that the ranges are followed from about where the listing is, and
                # have nothing to catch up. What comes twice is dropped.
                self._list()
            self._trusted_from = time.monotonic() + (_CATCH_UP if gap else 0.0)
            self._backoff.reset()
            if not self._connected:
                self._connected = True
                self._emit(Reconnected())
            self._deliver(stream)
        except StreamEnded as ended:
            if ended.error is not None:
                raise self._store.calls.error(
                    ended.error, "watch", ",".join(self._ranges[:3])
                ) from None
            raise StoreUnavailable("etcd ended the watch") from None
        finally:
            with self._lock:
                self._stream = None
            stream.close()
            self._assembly.drop_fragments()

    def _create(self, index: int, text: str) -> rpc_pb2.WatchRequest:
        start, end = span(self._store.full(text))
        return rpc_pb2.WatchRequest(
            create_request=rpc_pb2.WatchCreateRequest(
                key=start,
                range_end=end,
                start_revision=0 if self._stale else self._assembly.start_revision(index),
                progress_notify=True,
                watch_id=index + 1,
                fragment=True,
            )
        )

    def _await_created(self, stream: Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse]) -> bool:
        """Wait until etcd has all ranges; whether they have something to catch up.

        Their first events may come in between.
        """
        missing = set(range(len(self._ranges)))
        gap = False
        deadline = time.monotonic() + self._store.timeout
        while missing and not self._closing.is_set():
            answer = stream.receive(deadline - time.monotonic())
            if answer is None:
                if time.monotonic() >= deadline:
                    raise StoreUnavailable(f"etcd {self._store.endpoints}: watch: no answer")
                continue
            self._check(answer)
            index = answer.watch_id - 1
            if answer.created:
                missing.discard(index)
                if not self._stale:
                    self._check_history(answer.header, index)
                    gap |= answer.header.revision >= self._assembly.start_revision(index)
            else:
                self._take(answer)
        return gap

    def _deliver(self, stream: Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse]) -> None:
        asked = held_since = None
        while not self._closing.is_set():
            now = time.monotonic()
            wait = _IDLE
            if self._apart:
                self._emit_up_to(None)
            elif not self._assembly.waiting:
                asked = held_since = None
            else:
                held_since = held_since or now
                if now - held_since > _HOLD:
                    self._emit_up_to(None)
                    continue
                if asked is None or now - asked >= _ASK_AGAIN:
                    if now >= self._trusted_from:
                        stream.send(_ASK)
                    asked = now
                wait = _ASK_AGAIN
            answer = stream.receive(wait)
            if answer is None:
                continue
            self._check(answer)
            if not self._take(answer) and time.monotonic() >= self._trusted_from:
                self._emit_up_to(answer.header.revision)
                asked = held_since = None

    def _check(self, answer: rpc_pb2.WatchResponse) -> None:
        if not answer.canceled:
            return
        if answer.compact_revision:
            raise _ListAgain(f"compacted at {answer.compact_revision}")
        # Among the reasons is a token that is too old, which is not worth telling apart.
        self._store.calls.forget_token()
        raise StoreUnavailable(
            f"etcd {self._store.endpoints}: watch cancelled: {answer.cancel_reason or 'no reason'}"
        )

    def _check_history(self, header: rpc_pb2.ResponseHeader, index: int) -> None:
        """Notice an etcd that was set up anew or restored: its revisions begin again.

        A watcher of a revision in the far future would just be silent.
        """
        behind = header.revision < self._assembly.start_revision(index) - 1
        if behind or header.cluster_id != self._cluster:
            raise _ListAgain(f"etcd is at revision {header.revision}, behind what was seen")

    def _take(self, answer: rpc_pb2.WatchResponse) -> bool:
        """Take in events; whether the answer was about one range (and not about all)."""
        index = answer.watch_id - 1
        if not 0 <= index < len(self._ranges):
            return False
        if answer.events:
            self._assembly.add(index, answer.events, more=answer.fragment)
        elif not answer.fragment:
            self._assembly.advance(index, answer.header.revision)
        return True

    def _emit_up_to(self, revision: int | None) -> None:
        for at, events in self._assembly.take(revision):
            self._emit(Changed(at, tuple(self._apply(event) for event in events)))

    def _apply(self, event: kv_pb2.Event) -> Change:
        assert self._state is not None
        key = self._store.relative(event.kv.key)
        if event.type == kv_pb2.Event.DELETE:
            return Change(key, None, self._state.pop(key, None))
        kv = self._store.key_value(event.kv)
        previous = self._state.get(key)
        self._state[key] = kv
        return Change(key, kv, previous)


_ASK = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest())


def _without_contained(ranges: Sequence[str]) -> list[str]:
    """Leave out what another range covers: it would be delivered twice."""
    distinct = list(dict.fromkeys(ranges))

    def covered(text: str) -> bool:
        return any(
            other != text and (other == "" or (other.endswith("/") and text.startswith(other)))
            for other in distinct
        )

    return [text for text in distinct if not covered(text)]
