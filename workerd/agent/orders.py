# SPDX-License-Identifier: Apache-2.0
"""Reads what etcd says to this node, all of it at one revision, and watches just those keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from coordinator.model import (
    Ack,
    Assignment,
    Generation,
    Job,
    NodeFlags,
    Slot,
    SpareAssignment,
)
from coordinator.store import (
    KeyValue,
    Store,
    StoreUnavailable,
    Watch,
    WatchEvent,
    decode_value,
    keys,
)
from protos import job_pb2, membership_pb2, node_pb2
from workerd.agent.state import JobOrders, Orders

V = TypeVar("V")

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """Orders, and the revision of each ack of this node, by job, for its next write's guard."""

    orders: Orders
    ack_revisions: Mapping[str, int]


def order_keys(node: str, jobs: Collection[str], place: tuple[str, int] | None) -> list[str]:
    """What tells a node what to do, as far as it knows of ``jobs`` and of its (job, slot)."""
    wanted = [keys.flags(node), keys.assignment(node), keys.spare(node)]
    for job in sorted(jobs):
        wanted += [keys.job_spec(job), keys.generation(job), keys.ack(job, node)]
    if place is not None:
        wanted.append(keys.slot(*place))
    return wanted


def watched_keys(
    node: str, jobs: Collection[str], place: tuple[str, int] | None
) -> tuple[str, ...]:
    """The same, except for the node's own acks: nobody else writes them."""
    acks = {keys.ack(job, node) for job in jobs}
    return tuple(one for one in order_keys(node, jobs, place) if one not in acks)


class OrdersDesk:
    """Belongs to one thread. ``sink`` gets the watch's events: each means "read again"."""

    def __init__(self, store: Store, node: str, sink: Callable[[WatchEvent], None]) -> None:
        self._store = store
        self._node = node
        self._sink = sink
        self._watch: Watch | None = None
        self._watched: tuple[str, ...] = ()
        self._place: tuple[str, int] | None = None
        self._named: frozenset[str] = frozenset()

    def read(self, jobs: Collection[str]) -> Reading:
        """What etcd says now: of the jobs that it names to this node, and of ``jobs``.

        Raises StoreError.
        """
        for _ in range(_TRIES):
            wanted = frozenset(jobs) | self._named
            place = self._place
            snapshot = self._store.read(order_keys(self._node, wanted, place))
            orders, revisions = self._parse(snapshot.revision, snapshot.items, wanted, place)
            held, spare = orders.assignment, orders.spare
            # What was read names what is to be read: mostly it is the same as last time.
            self._place = (held.job, held.slot) if held is not None and held.job else None
            self._named = frozenset(one.job for one in (held, spare) if one is not None and one.job)
            if self._named <= wanted and self._place == place:
                self._follow(wanted)
                return Reading(orders, revisions)
        raise StoreUnavailable(f"node {self._node}: its place changes faster than it can be read")

    def close(self) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.close()

    def _parse(
        self,
        revision: int,
        items: Mapping[str, KeyValue],
        jobs: frozenset[str],
        place: tuple[str, int] | None,
    ) -> tuple[Orders, dict[str, int]]:
        def value(key: str, record: type[Message], cls: type[V]) -> V | None:
            return decode_value(cls, record, items[key]) if key in items else None

        found: dict[str, JobOrders] = {}
        revisions: dict[str, int] = {}
        for job in jobs:
            ack_key = keys.ack(job, self._node)
            slot = None
            if place is not None and place[0] == job:
                slot = value(keys.slot(*place), membership_pb2.Slot, Slot)
            found[job] = JobOrders(
                job=value(keys.job_spec(job), job_pb2.Job, Job),
                generation=value(keys.generation(job), membership_pb2.Generation, Generation),
                slot=slot,
                ack=value(ack_key, membership_pb2.Ack, Ack),
            )
            if ack_key in items:
                revisions[job] = items[ack_key].mod_revision
        orders = Orders(
            revision=revision,
            flags=value(keys.flags(self._node), node_pb2.NodeFlags, NodeFlags) or NodeFlags(),
            assignment=value(keys.assignment(self._node), node_pb2.Assignment, Assignment),
            spare=value(keys.spare(self._node), node_pb2.SpareAssignment, SpareAssignment),
            jobs=found,
        )
        return orders, revisions

    def _follow(self, jobs: frozenset[str]) -> None:
        """Watch what was read, except for this node's own acks."""
        ranges = watched_keys(self._node, jobs, self._place)
        if ranges == self._watched:
            return
        old, self._watched = self._watch, ranges
        # Its first event is a listing: nothing that changed in between is missed. What changes
        # is read at one revision, so that the events need not be whole.
        self._watch = self._store.watch(ranges, self._sink, apart=True)
        self._watch.start()
        if old is not None:
            old.close()
