# SPDX-License-Identifier: Apache-2.0
"""The agent's dealings with etcd: registration, reads and guarded writes, each as an errand.

Everything here is called on the agent's thread; what waits for etcd runs on two others, one for
reads and one for writes, and comes back as an event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.message import Message

from coordinator.model import Node, to_record
from coordinator.store import (
    Absent,
    Created,
    Delete,
    Guard,
    GuardFailed,
    Lease,
    LeaseDeadlinePassed,
    LeaseEvent,
    LeaseRenewed,
    Put,
    Store,
    StoreError,
    StoreUnavailable,
    Unchanged,
    WatchEvent,
    Write,
    encode,
    errors,
    keys,
)
from protos import membership_pb2, node_pb2
from workerd.agent.actions import Action, ClearPlace, WriteAck, WriteNode, WriteProgress
from workerd.agent.errands import ErrandDone, Errands
from workerd.agent.orders import OrdersDesk, Reading
from workerd.agent.registration import Outcome, Registered, register
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import Orders, Written

_log = logging.getLogger(__name__)

READ, REGISTER, CLOSE = "read", "register", "close"
_AGAIN = 0.25  # seconds until what etcd could not take is tried again
_AGAIN_LATER = 5.0  # the same, for what trying again alone won't mend

DeskEvent: TypeAlias = ErrandDone | LeaseEvent | WatchEvent


@dataclass(frozen=True, slots=True)
class _Done:
    """A write that was carried out."""

    action: Action
    revision: int
    at: float


class Desk:
    """What this node knows of its own keys. ``sink`` is called on other threads.

    ``errands`` makes what runs the errands, ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        node: str,
        ttl: float,
        sink: Callable[[DeskEvent], None],
        *,
        errands: Callable[[str, Callable[[ErrandDone], None]], Errands] = Errands,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._node = node
        self._ttl = ttl
        self._sink = sink
        self._orders_desk = OrdersDesk(store, node, sink)
        self._reads = errands("etcd-reads", sink)
        self._writes = errands("etcd-writes", sink)
        self._clock = clock
        self._lease: Lease | None = None
        self._create_revision = 0
        self._ack_revisions: dict[str, int] = {}
        self._under_way: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._failing: set[str] = set()
        self._stale = True
        self._early: list[LeaseEvent] = []
        self.orders: Orders | None = None
        self.overdue_since: float | None = None
        self.node_written: Node | None = None
        self.written: Written | None = None
        self.acked: tuple[str, int] | None = None
        self.ack_held = False
        self.outcome: Outcome | None = None
        """Of the latest try to register; for the agent to take and set to None."""

    @property
    def registered(self) -> bool:
        """Whether the node key is there, as far as is known."""
        return self._lease is not None

    @property
    def minded(self) -> bool:
        """Whether the lease has been renewed in time, or it is known why not.

        While etcd can't be reached, that is known, and the trainers go on. A renewal that is late
        without a word means that what renews it hangs.
        """
        return (
            self._lease is None
            or self.overdue_since is not None
            or self._clock() < self._lease.deadline()
        )

    @property
    def registering(self) -> bool:
        """Whether a try to register is under way: it may end with a lease."""
        return REGISTER in self._under_way

    def busy(self, now: float) -> frozenset[str]:
        """The kinds of errands that are under way, or must wait after a failure."""
        waiting = {kind for kind, at in self._not_before.items() if now < at}
        return frozenset(self._under_way | waiting)

    def start_anew(self) -> None:
        """Another incarnation begins: nothing that was written is its own."""
        self._drop("another incarnation begins", revoke=True)
        self.acked = None

    # ---- errands

    def read(self, jobs: frozenset[str]) -> None:
        """Read the orders if something may have changed since they were read."""
        if self._stale and READ not in self.busy(self._clock()):
            self._stale = False
            self._submit(self._reads, READ, lambda: self._orders_desk.read(jobs))

    def refresh(self) -> None:
        """The orders have to be read again."""
        self._stale = True

    def register(self, record: Node, own: frozenset[str]) -> None:
        """Try to register, unless a try is under way or must wait."""
        if self._lease is None and REGISTER not in self.busy(self._clock()):
            self._submit(
                self._writes,
                REGISTER,
                lambda: register(self._store, record, self._ttl, self._sink, own),
            )

    def try_again_in(self, seconds: float) -> None:
        """Wait before the next try to register."""
        self._not_before[REGISTER] = self._clock() + seconds

    def carry_out(self, action: Action) -> bool:
        """Carry out a write; whether it was one. It is left out when the lease is gone."""
        guards: list[Guard] = [Created(keys.node(self._node), self._create_revision)]
        match action:
            case WriteNode(node):
                self._put(
                    NODE, action, guards, keys.node(self._node), to_record(node, node_pb2.Node())
                )
            case WriteAck(job, ack):
                key = keys.ack(job, self._node)
                # Write-once: only over the one that was seen, which is of an older generation.
                seen = self._ack_revisions.get(job)
                guards.append(Absent(key) if seen is None else Unchanged(key, seen))
                self._put(ACK, action, guards, key, to_record(ack, membership_pb2.Ack()))
            case WriteProgress(job, progress):
                key = keys.progress(job, self._node)
                told = to_record(progress, membership_pb2.Progress())
                self._put(PROGRESS, action, guards, key, told)
            case ClearPlace(job):
                gone = [keys.ack(job, self._node), keys.progress(job, self._node)]
                self._commit(PROGRESS, action, guards, [Delete(key) for key in gone])
            case _:
                return False
        return True

    def _put(
        self, kind: str, action: Action, guards: Sequence[Guard], key: str, record: Message
    ) -> None:
        if self._lease is not None:
            self._commit(kind, action, guards, [Put(key, encode(record), self._lease.id)])

    def _commit(
        self, kind: str, action: Action, guards: Sequence[Guard], writes: Sequence[Write]
    ) -> None:
        if self._lease is not None:
            self._submit(
                self._writes,
                kind,
                lambda: _Done(action, self._store.commit(guards, writes), self._clock()),
            )

    def close(self, timeout: float) -> bool:
        """Give the lease back and end the threads, within ``timeout`` seconds each."""
        self._drop("workerd ends", revoke=True)
        self._reads.submit(CLOSE, self._orders_desk.close)
        written = self._writes.close(timeout)
        read = self._reads.close(timeout)
        return written and read

    def _submit(self, errands: Errands, kind: str, run: Callable[[], object]) -> None:
        self._under_way.add(kind)
        self._not_before.pop(kind, None)
        errands.submit(kind, run)

    def _drop(self, reason: str, *, revoke: bool) -> None:
        """The node key is not ours any more, or shall not be."""
        lease, self._lease = self._lease, None
        self.node_written = None
        self.written = None
        self.ack_held = False
        self._ack_revisions.clear()
        self._stale = True
        if lease is not None:
            _log.info("lease %x is given up: %s", lease.id, reason)
            self._writes.submit(CLOSE, lambda: lease.close(revoke=revoke))

    # ---- events

    def lease(self, event: LeaseEvent) -> None:
        """A lease event."""
        if self._lease is None:
            self._early.append(event)  # of the lease that is just being registered, perhaps
            return
        if event.lease_id != self._lease.id:
            return
        match event:
            case LeaseRenewed():
                self.overdue_since = None
            case LeaseDeadlinePassed():
                self.overdue_since = self.overdue_since or self._clock()
                _log.warning("no renewal of the lease in time: etcd may have given up this node")
            case _:
                self.overdue_since = self.overdue_since or self._clock()
                self._drop(event.reason, revoke=False)

    def errand(self, done: ErrandDone) -> None:
        """An errand has come to its end."""
        self._under_way.discard(done.kind)
        if done.error is not None:
            self._failed(done.kind, done.error)
            return
        if done.kind in self._failing:
            self._failing.discard(done.kind)
            _log.info("etcd: %s works again", done.kind)
        match done.result:
            case Reading(orders, revisions):
                self.orders = orders
                self._ack_revisions = dict(revisions)
            case _Done():
                self._wrote(done.result)
            case Registered(lease, create_revision, record):
                self._lease, self._create_revision = lease, create_revision
                _log.info("registered as incarnation %s, lease %x", record.incarnation, lease.id)
                self.node_written, self.overdue_since = record, None
                self._stale = True
                self.outcome = done.result
                early, self._early = self._early, []
                for event in early:
                    self.lease(event)
            case None:
                pass
            case outcome:
                self.outcome = outcome  # type: ignore[assignment]  # the rest of Outcome

    def _wrote(self, done: _Done) -> None:
        if self._lease is None:
            return
        match done.action:
            case WriteNode(record):
                self.node_written = record
            case WriteAck(job, ack):
                self.acked, self.ack_held = (job, ack.generation), True
                # Nothing to read again: what it changes is known here.
                self._ack_revisions[job] = done.revision
            case WriteProgress(job, progress, marks):
                self.written = Written(job, progress, marks, done.at)
            case ClearPlace(job):
                self.written, self.ack_held = None, False
                self._ack_revisions.pop(job, None)

    def _failed(self, kind: str, error: StoreError) -> None:
        if kind == READ:
            self._stale = True
        if isinstance(error, errors.LeaseLost) or self._fenced(error):
            self.overdue_since = self.overdue_since or self._clock()
            self._drop(str(error), revoke=True)
            return
        if isinstance(error, GuardFailed):
            self._stale = True  # an ack that is there already: the next reading shows it
            return
        passing = isinstance(error, StoreUnavailable)
        self._not_before[kind] = self._clock() + (_AGAIN if passing else _AGAIN_LATER)
        if kind not in self._failing:
            self._failing.add(kind)
            _log.warning("etcd: %s fails, it is tried again: %s", kind, error)

    def _fenced(self, error: StoreError) -> bool:
        key = keys.node(self._node)
        return isinstance(error, GuardFailed) and any(one.key == key for one in error.failed)
