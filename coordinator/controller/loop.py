# SPDX-License-Identifier: Apache-2.0
"""The controller: stands for election, leads while it is elected, and goes on for ever.

One thread owns everything here and reads one queue. Watches, leases, the election, probes and
signals only put events into it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # not yet the builtin one in 3.10
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.controller.leader import Fenced, Leader, Seen
from coordinator.model import Settings
from coordinator.prober import Contacted, Probed, Prober, Witnessed
from coordinator.store import (
    Changed,
    Created,
    Deposed,
    Disconnected,
    Elected,
    Election,
    ElectionEvent,
    Lease,
    LeaseDeadlinePassed,
    LeaseEvent,
    Listed,
    Reconnected,
    Store,
    StoreError,
    Watch,
    WatchEvent,
)
from coordinator.store.lease import LeaseLost

log = logging.getLogger(__name__)

_WAKE = 0.1
"""Seconds after which a leader looks whether a deadline has passed, if nothing happens."""
_STAND_AGAIN = 0.5
"""Seconds between tries to get a lease while etcd can't be reached."""
_REST = 3
"""Times as long as the latest decision took, events are only taken in before the next: while the
acknowledgements of many nodes trickle in, each would ask for one."""
_IDLE = 10
"""Times as long as the latest decision took, at least, before deciding again without an event."""
_AT_ONCE = 1000
"""Events that are taken in before the next decision."""
_EVERYTHING = ""


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _OfTerm:
    """An event of one candidature; those of an earlier one are void."""

    term: int
    event: WatchEvent | ElectionEvent | LeaseEvent


@dataclass(frozen=True, slots=True)
class _Look:
    """Another thread wants to know what the leader sees."""

    answer: Future[Seen]


_Event: TypeAlias = _Stop | _OfTerm | _Look | Probed | Contacted | Witnessed


class NotLeading(Exception):
    """Nobody leads here, or who leads has no time for an answer, or has not seen all yet."""


class Leadership:
    """Whether this process leads, and what it sees, for other threads to read."""

    def __init__(self) -> None:
        self._guard: Created | None = None
        self._ask: Callable[[Future[Seen]], None] | None = None

    @property
    def guard(self) -> Created | None:
        """The guard that every write of the leader carries; None while this isn't the leader."""
        return self._guard

    def see(self, timeout: float) -> Seen:
        """What the leader decides on at this moment. Raises :class:`NotLeading`.

        ``timeout``: in seconds; the leader answers between two decisions.
        """
        ask = self._ask
        if ask is None:
            raise NotLeading("this coordinator doesn't lead")
        answer: Future[Seen] = Future()
        ask(answer)
        try:
            return answer.result(timeout)
        except NoAnswer:
            answer.cancel()
            raise NotLeading(f"the leader has not answered within {timeout:g} s") from None

    def set(self, guard: Created | None, ask: Callable[[Future[Seen]], None] | None = None) -> None:
        """Only for the controller. ``ask`` brings a question before it."""
        self._ask = ask
        self._guard = guard


class Controller:
    """Runs on the thread that calls :meth:`run`, until :meth:`stop`.

    ``prober`` makes the one who asks suspects, ``clock`` gives monotonic seconds, ``passed`` is
    called after every completed turn, on that thread.
    """

    def __init__(
        self,
        store: Store,
        candidate: str,
        value: bytes,
        settings: Settings,
        leading: Leadership,
        *,
        prober: Callable[[Callable[[Probed | Contacted | Witnessed], None]], Prober] = Prober,
        clock: Callable[[], float] = time.monotonic,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._candidate = candidate
        self._value = value
        self._settings = settings
        self._leading = leading
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._prober = prober(self._events.put)
        self._clock = clock
        self._passed = passed
        self._term = 0
        self._lease: Lease | None = None
        self._election: Election | None = None
        self._watch: Watch | None = None
        self._leader: Leader | None = None
        self._looks: list[Future[Seen]] = []
        self._stand_at = 0.0
        self._deciding = 0.0
        self._no_eviction_before = -math.inf
        self._stopping = False
        self._ending: queue.SimpleQueue[_Stop] = queue.SimpleQueue()

    def stop(self) -> None:
        """Ask :meth:`run` to give the leadership up and return; also from a signal handler."""
        self._events.put(_Stop())
        self._ending.put(_Stop())

    def run(self) -> None:
        """Stand and lead until :meth:`stop`. Losing etcd is waited out."""
        try:
            gathered = False
            while not self._stopping:
                # Nothing has come: only a deadline can have passed.
                idle = max(_WAKE, _IDLE * self._deciding)
                self.turn(0.0 if gathered else idle)
                self._passed()
                gathered = self._gather(_REST * self._deciding)
        finally:
            self._resign()
            self._prober.close()

    # ---- one turn

    def turn(self, wait: float) -> None:
        """Wait so many seconds at most for an event, take in what there is, and act on it."""
        if self._lease is None and self._clock() >= self._stand_at:
            self._stand()
        self._take_events(wait)
        if self._stopping or self._leader is None:
            return
        began = time.thread_time()
        try:
            failed_at = self._leader.act(self._no_eviction_before)
        except Fenced as error:
            self._step_down(str(error))
            return
        finally:
            self._deciding = time.thread_time() - began
        if failed_at is not None:
            self._outage(failed_at)

    def _gather(self, seconds: float) -> bool:
        """Let events come in for so long, and take them in at once; whether there were any.

        With many nodes a decision takes its time, and each event asks for one: so they take turns.
        To be woken by each would cost more than to read it.
        """
        with contextlib.suppress(queue.Empty):
            self._ending.get(timeout=seconds)
        return self._take_events(0.0)

    def _take_events(self, wait: float) -> bool:
        """Whether one has come in time; then all that are there are taken in."""
        taken = False
        try:
            event = self._events.get(timeout=wait)
            taken = True
            for _ in range(_AT_ONCE):
                self._take(event)
                event = self._events.get_nowait()
            self._take(event)
        except queue.Empty:
            return taken
        return taken

    def _take(self, event: _Event) -> None:
        if isinstance(event, _Stop):
            self._stopping = True
        elif isinstance(event, Probed):
            if self._leader is not None:
                self._leader.probed(event)
        elif isinstance(event, Contacted):
            if self._leader is not None:
                self._leader.contacted(event)
        elif isinstance(event, Witnessed):
            if self._leader is not None:
                self._leader.witnessed(event)
        elif isinstance(event, _Look):
            self._show(event.answer)
        elif event.term == self._term:
            self._take_of_term(event.event)

    def _show(self, answer: Future[Seen]) -> None:
        leader = self._leader
        seen = None if leader is None else leader.see(self._no_eviction_before)
        if leader is not None and seen is None:
            self._looks.append(answer)  # until it has seen all records
        elif not answer.set_running_or_notify_cancel():
            pass  # who asked has gone
        elif seen is None:
            answer.set_exception(NotLeading("this coordinator doesn't lead any more"))
        else:
            answer.set_result(seen)

    def _show_all(self) -> None:
        looks, self._looks = self._looks, []
        for answer in looks:
            self._show(answer)

    def _take_of_term(self, event: WatchEvent | ElectionEvent | LeaseEvent) -> None:
        match event:
            case Listed() | Changed():
                if self._leader is not None:
                    self._leader.take(event)
                if isinstance(event, Listed):
                    self._show_all()
            case Elected(guard):
                self._lead(guard)
            case Deposed(reason):
                self._step_down(reason)
            case LeaseLost():
                self._step_down(event.reason)
            case Disconnected(reason):
                log.warning("etcd is out of reach: %s", reason)
                self._no_eviction_before = math.inf
            case Reconnected():
                log.info("etcd is back")
                self._no_eviction_before = -math.inf
                self._outage(self._clock())
            case LeaseDeadlinePassed():
                log.warning("the own lease was not renewed in time")
                self._outage(self._clock())

    def _outage(self, seen_at: float) -> None:
        """etcd didn't answer at that time: nodes get the time to renew their leases."""
        grace = self._settings.lease_ttl + self._settings.election_timeout
        self._no_eviction_before = max(self._no_eviction_before, seen_at + grace)

    # ---- candidature and leadership

    def _stand(self) -> None:
        self._term += 1
        term = self._term

        def sink(event: WatchEvent | ElectionEvent | LeaseEvent) -> None:
            self._events.put(_OfTerm(term, event))

        try:
            self._lease = self._store.lease(self._settings.lease_ttl, sink)
        except StoreError as error:
            log.warning("no lease to stand for election with: %s", error)
            self._stand_at = self._clock() + _STAND_AGAIN
            self._outage(self._clock())
            return
        self._election = self._store.election(self._candidate, self._value, self._lease, sink)
        self._election.start()
        log.info("standing for election as %s", self._candidate)

    def _lead(self, guard: Created) -> None:
        log.info("elected: %s leads from revision %d on", self._candidate, guard.create_revision)
        term = self._term
        self._leader = Leader(self._store, guard, self._settings, self._prober, clock=self._clock)
        self._leading.set(guard, lambda answer: self._events.put(_Look(answer)))
        if self._no_eviction_before == math.inf:
            self._no_eviction_before = -math.inf  # an earlier term's watch saw the outage begin
            self._outage(self._clock())
        self._watch = self._store.watch(
            [_EVERYTHING], lambda event: self._events.put(_OfTerm(term, event))
        )
        self._watch.start()

    def _step_down(self, reason: str) -> None:
        """Drop everything of this term and stand again."""
        log.warning("%s: %s", "deposed" if self._leader else "out of the election", reason)
        self._drop(revoke=True)
        self._stand_at = self._clock()

    def _drop(self, *, revoke: bool) -> None:
        self._leading.set(None)
        self._leader = None
        self._prober.watch({}, self._settings.ping)
        self._show_all()
        self._term += 1  # what is still on its way is void
        watch, self._watch = self._watch, None
        election, self._election = self._election, None
        lease, self._lease = self._lease, None
        if watch is not None:
            watch.close()
        if election is not None:
            election.close()
        if lease is not None:
            lease.close(revoke=revoke)

    def _resign(self) -> None:
        revoke = True
        if self._election is not None:
            try:
                self._election.resign()
            except StoreError as error:
                log.warning("the election key goes with its lease, not now: %s", error)
                revoke = False
        self._drop(revoke=revoke)
