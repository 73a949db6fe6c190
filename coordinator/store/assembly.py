# SPDX-License-Identifier: Apache-2.0
"""Puts what etcd's watchers send together again, revision by revision. Knows no network.

Each range of a watch is a watcher of its own in etcd. One watcher sends its events in the order
of revisions, and one revision's events in one message, or in fragments of one. But two watchers
of one stream are only in step while both are up to date: while one still catches up, the other
may be ahead. So with several ranges, events wait here until etcd has said that every watcher has
everything up to their revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from protos.etcd import kv_pb2


class Assembly:
    """The events of some ranges that are not yet delivered, and where each range stands."""

    def __init__(self, ranges: int) -> None:
        self._next = [0] * ranges
        self._fragments: list[list[kv_pb2.Event]] = [[] for _ in range(ranges)]
        self._waiting: dict[int, list[kv_pb2.Event]] = {}

    @property
    def waiting(self) -> bool:
        """Whether events wait to be delivered."""
        return bool(self._waiting)

    def start_revision(self, index: int) -> int:
        """The revision from which the range's watcher must (again) be started.

        Events that wait were received and are kept, so each range has its own.
        """
        return self._next[index]

    def reset(self, revision: int) -> None:
        """Everything up to ``revision`` is known from a listing: go on behind it."""
        self._next = [revision + 1] * len(self._next)
        self._waiting.clear()
        self.drop_fragments()

    def drop_fragments(self) -> None:
        """The stream is over: the rest of a half message will not come."""
        for fragments in self._fragments:
            fragments.clear()

    def add(self, index: int, events: Iterable[kv_pb2.Event], *, more: bool) -> None:
        """Take a message of one range; ``more``: it is a fragment and not the last one."""
        fragments = self._fragments[index]
        fragments.extend(events)
        if more or not fragments:
            return
        known = self._next[index]
        for event in fragments:
            revision = event.kv.mod_revision
            if revision < known:
                continue
            self._waiting.setdefault(revision, []).append(event)
        # The event's revision, not the header's: that one may be ahead of what was sent.
        self._next[index] = max(known, fragments[-1].kv.mod_revision + 1)
        fragments.clear()

    def advance(self, index: int, revision: int) -> None:
        """etcd says that the range has no event up to ``revision`` that was not sent."""
        self._next[index] = max(self._next[index], revision + 1)

    def take(self, revision: int | None = None) -> Iterator[tuple[int, Sequence[kv_pb2.Event]]]:
        """Remove and return the events up to ``revision`` (None: all), a revision at a time."""
        for ready in sorted(r for r in self._waiting if revision is None or r <= revision):
            yield ready, self._waiting.pop(ready)
