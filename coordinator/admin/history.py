# SPDX-License-Identifier: Apache-2.0
"""Every change of the cluster's records from a revision on, past and to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.store import Compacted, KeyValue, Store, StoreError, StoreUnavailable
from coordinator.store.keys import prefix_end
from coordinator.store.stream import Stream, StreamEnded
from protos.etcd import kv_pb2, rpc_pb2

_LOOK = 1.0
"""Seconds after which it looks whether anybody still listens."""
_EVERYTHING = ""


class InTheFuture(StoreError):
    """etcd hasn't come to that revision yet."""


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
    begun: Callable[[], None],
) -> Iterator[Step]:
    """Yield every change from ``from_revision`` on, 0: from now on, while ``listening`` says so.

    ``begun`` is called once, when it is settled what "now" is.

    In the order of revisions, none lost, none twice. Raises :class:`Compacted` when etcd no
    longer keeps the revision, :class:`InTheFuture` when it hasn't come to it, and
    :class:`StoreUnavailable` when the stream breaks: call again with the next revision.
    """
    present = store.read([]).revision
    if from_revision > present + 1:
        raise InTheFuture(f"revision {from_revision} is in the future, etcd is at {present}")
    start = from_revision or present + 1
    # What stood before the first change; etcd's revision 0 would mean the present.
    known = dict(store.list(_EVERYTHING, revision=start - 1).items) if start > 1 else {}
    begun()
    first = store.full(_EVERYTHING)
    stream = Stream[rpc_pb2.WatchRequest, rpc_pb2.WatchResponse](
        store.calls.watch.Watch, store.calls.metadata(), "events"
    )
    try:
        stream.send(
            rpc_pb2.WatchRequest(
                create_request=rpc_pb2.WatchCreateRequest(
                    key=first, range_end=prefix_end(first), start_revision=start
                )
            )
        )
        while listening():
            answer = stream.receive(_LOOK)
            if answer is None:
                continue
            if answer.canceled and answer.compact_revision:
                raise Compacted(f"etcd keeps nothing before revision {answer.compact_revision}")
            if answer.canceled:
                raise StoreUnavailable(f"etcd ended the watch: {answer.cancel_reason}")
            for event in answer.events:
                yield _step(store, known, event, present)
    except StreamEnded as ended:
        if ended.error is None:
            raise StoreUnavailable("etcd ended the watch") from None
        raise store.calls.error(ended.error, "watch") from None
    finally:
        stream.close()


def _step(store: Store, known: dict[str, KeyValue], event: kv_pb2.Event, present: int) -> Step:
    key = store.relative(event.kv.key)
    before = known.pop(key, None)
    after = None
    if event.type == kv_pb2.Event.PUT:
        after = known[key] = store.key_value(event.kv)
    revision = event.kv.mod_revision
    return Step(revision, key, before, after, live=revision > present)
