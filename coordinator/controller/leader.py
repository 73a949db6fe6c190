# SPDX-License-Identifier: Apache-2.0
"""One term of leadership: what is seen, what was decided, what was written."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from coordinator.controller.contacts import Contacts
from coordinator.controller.transactions import Context, Stale, Transaction, build, undo_staged
from coordinator.controller.view import Observer
from coordinator.model import ClusterView, Settings, Verdict
from coordinator.plan import (
    Action,
    AskWitnesses,
    DeclareDead,
    HoldBack,
    KeepWarm,
    Probe,
    SettleFlags,
    Transition,
    Unassign,
    UpdateIncident,
    UpdateStatus,
    Wait,
    doubtful,
    plan,
)
from coordinator.prober import Contacted, Probed, Witnessed
from coordinator.store import (
    Changed,
    Created,
    GuardFailed,
    Listed,
    Store,
    StoreError,
    StoreRequestError,
    StoreUnavailable,
    WatchEvent,
)

log = logging.getLogger(__name__)

_SEEN_WITHIN = 5.0
"""Seconds that the watch may take to deliver an own write before decisions go on without it."""
_BACK_OFF = 0.2
"""Seconds before deciding again after a write that failed, unless the watch says more first."""

_TOLD_AGAIN = 1.0
"""Seconds between two lines of what a job waits for: every node of many changes it."""

_REFUSED = 1.0
"""Seconds before deciding again after etcd refused a write for what it is, or for who asks."""

Who = tuple[str, str]


class Asks(Protocol):
    """What a leader wants of a :class:`~coordinator.prober.Prober`."""

    def probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        """Ask a suspect."""

    def watch(self, targets: Mapping[Who, str], patience: float) -> None:
        """Hold on to these, and to nobody else any more."""

    def hurry(self, node: str, incarnation: str) -> None:
        """Ping one now."""

    def witness(
        self,
        who: Who,
        tried: float,
        addresses: tuple[str, ...],
        witnesses: tuple[Who, ...],
        patience: float,
    ) -> None:
        """Have others try to reach one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the leader decides on: the view, as of an etcd revision and of monotonic seconds."""

    view: ClusterView
    revision: int
    now: float
    settings: Settings


class Leader:
    """The leader's knowledge and acts in one term. Owned by the controller's thread."""

    def __init__(
        self,
        store: Store,
        guard: Created,
        settings: Settings,
        prober: Asks,
        plan: Callable[[ClusterView, float, Settings], tuple[Action, ...]] = plan,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._guard = guard
        self._settings = settings
        self._prober = prober
        self._plan = plan
        self._clock = clock
        self._observer = Observer()
        self._contacts = Contacts(settings.lease_ttl)
        self._witnessed: dict[Who, float] = {}
        self._listed = False
        self._not_before = 0.0  # or until the watch says more
        self._refused_until = 0.0
        self._awaited = 0
        self._awaited_until = 0.0
        self._evicting = False
        self._ask_again: dict[tuple[str, str], float] = {}
        self._waits: dict[str, tuple[str, float]] = {}
        self._unreadable: dict[str, str] = {}
        self._held: dict[Who, str] = {}
        self._doubted_at = -math.inf
        self._doubts = False

    # ---- what comes in

    def take(self, event: WatchEvent) -> None:
        """Take in what the watch delivers."""
        now = self._clock()
        if isinstance(event, Listed):
            self._observer.list(event.items, event.revision, now)
            self._listed = True
            log.info("leading: %d records at revision %d", len(event.items), event.revision)
        elif isinstance(event, Changed):
            for change in event.changes:
                self._observer.change(change.key, change.kv, now)
                if change.kv is not None:
                    self._contacts.wrote(change.key, now)
            self._observer.revision = max(self._observer.revision, event.revision)
            self._not_before = 0.0
        self._report_unreadable()

    def probed(self, said: Probed) -> None:
        """Take in the answer to a probe, or its absence."""
        log.info("probe of %s (%s): %s, %s", said.node, said.incarnation, *_words(said))
        self._observer.verdict(said.node, said.incarnation, said.verdict, said.detail)
        self._ask_again[said.node, said.incarnation] = self._clock() + self._settings.probe

    def contacted(self, said: Contacted) -> None:
        """Take in how a watched node answers from now on."""
        log.info("%s (%s): %s, %s", said.node, said.incarnation, said.line.name, said.detail)
        self._contacts.contacted(said, self._clock())

    def witnessed(self, said: Witnessed) -> None:
        """Take in what another node says of one that doesn't answer."""
        one = said.statement
        log.info("%s says of %s: %s, %s", one.witness, said.node, one.answer.name, one.detail)
        self._contacts.witnessed(said)

    def _report_unreadable(self) -> None:
        now_unreadable = self._observer.unreadable
        if now_unreadable == self._unreadable:
            return
        for key, why in now_unreadable.items():
            if self._unreadable.get(key) != why:
                log.error("a record can't be read and is left alone: %s", why)
        self._unreadable = dict(now_unreadable)

    def see(self, no_eviction_before: float) -> Seen | None:
        """What a decision would be made on now; None while not all records have been listed."""
        if not self._listed:
            return None
        now = self._clock()
        view = self._contacts.at(self._observer.view(no_eviction_before), now)
        return Seen(view, self._observer.revision, now, self._settings)

    # ---- what goes out

    def act(self, no_eviction_before: float) -> float | None:
        """Decide, if the view is up to date, and carry out what was decided.

        ``no_eviction_before`` is monotonic. Returns the time of an etcd failure, if there was
        one, in monotonic seconds. Raises :class:`Fenced` when the election key is gone.
        """
        now = self._clock()
        if not self._listed or now < max(self._not_before, self._refused_until):
            return None
        if self._observer.revision < self._awaited:
            if now < self._awaited_until:
                return None
            log.warning(
                "the watch is at revision %d and has not delivered %d within %g s",
                self._observer.revision,
                self._awaited,
                _SEEN_WITHIN,
            )
            self._awaited = 0
        if now < no_eviction_before:
            self._evicting = False
        elif not self._evicting:
            # Who didn't answer during the outage may have come back since: ask again.
            self._evicting = True
            self._observer.forget_verdicts()
        view = self._observer.view(no_eviction_before)
        targets = self._contacts.targets(view)
        if targets is not None:
            self._prober.watch(targets, self._settings.ping)
        view = self._trusted(self._contacts.at(view, now), no_eviction_before, now)
        subject = "what was staged"
        try:
            undone = undo_staged(self._context(view))
            for transaction in undone:
                log.info("taking back what was staged and never valid")
                self._commit(transaction)
            if undone:
                return None
            actions = self._plan(view, now, self._settings)
            self._report_waits(actions)
            self._report_held(actions)
            for action in actions:
                subject = _subject(action)
                try:
                    self._carry_out(action, view, now)
                except StoreRequestError as error:
                    # Too large, say. The other jobs must not wait for this one's repair.
                    log.error("%s: etcd refuses it: %s", subject, error)
                    self._refused_until = self._clock() + _REFUSED
        except (GuardFailed, Stale) as error:
            self._overtaken(subject, error)
        except StoreUnavailable as error:
            log.warning("%s: not written: %s", subject, error)
            self._not_before = self._clock() + _BACK_OFF
            return self._clock()
        except StoreError as error:
            log.error("%s: not written: %s", subject, error)
            self._refused_until = self._clock() + _REFUSED
        return None

    def _trusted(self, view: ClusterView, no_eviction_before: float, now: float) -> ClusterView:
        """The view, without the silence found while it was rather the leader that was cut off.

        When that is over, some are heard before others: those must be asked again.
        """
        before, self._doubts = self._doubts, doubtful(view, self._settings)
        if self._doubts:
            self._doubted_at = now
        elif before:
            self._observer.forget_verdicts()
            view = self._contacts.at(self._observer.view(no_eviction_before), now)
        return replace(view, doubted_at=self._doubted_at)

    def _context(self, view: ClusterView) -> Context:
        # Wall time for people: nothing is decided from it.
        wall_ns = time.time_ns()  # noqa: TID251
        return Context(self._guard, view, self._observer.mod_revision, wall_ns)

    def _carry_out(self, action: Action, view: ClusterView, now: float) -> None:
        if isinstance(action, Probe):
            self._probe(action, view, now)
            return
        if isinstance(action, AskWitnesses):
            self._ask_witnesses(action)
            return
        if isinstance(action, Wait | HoldBack):
            return
        for transaction in build(action, self._context(view)):
            self._commit(transaction)
        level = logging.DEBUG if isinstance(action, UpdateStatus) else logging.INFO
        log.log(level, "%s: %s", _subject(action), action.reason, extra=_fields(action))
        if isinstance(action, DeclareDead):
            self._revoke(action, view)

    def _commit(self, transaction: Transaction) -> None:
        revision = self._store.commit(transaction.guards, transaction.writes)
        for write in transaction.writes:
            self._observer.wrote(write.key, revision)
        self._awaited = max(self._awaited, revision)
        self._awaited_until = self._clock() + _SEEN_WITHIN

    def _overtaken(self, subject: str, error: GuardFailed | Stale) -> None:
        """The world moved on: decide anew once the watch has told how."""
        if isinstance(error, GuardFailed) and self._guard in error.failed:
            raise Fenced(str(error)) from error
        log.info("%s: overtaken, deciding anew: %s", subject, error)
        self._not_before = self._clock() + _BACK_OFF

    def _revoke(self, action: DeclareDead, view: ClusterView) -> None:
        """End a dead incarnation's lease. It only cleans up, so failing is no harm."""
        live = view.nodes.get(action.node)
        if live is None or live.record.incarnation != action.incarnation or not live.lease:
            return
        try:
            self._store.revoke(live.lease)
        except StoreError as error:
            log.warning("the lease of dead node %s was not revoked: %s", action.node, error)

    def _probe(self, action: Probe, view: ClusterView, now: float) -> None:
        who = (action.node, action.incarnation)
        if now < self._ask_again.get(who, -math.inf):
            return
        log.info("probing %s (%s): %s", *who, action.reason, extra=_fields(action))
        if who not in view.suspects:
            self._ask_again[who] = now + self._settings.probe
            self._prober.hurry(*who)
            return
        self._ask_again[who] = math.inf  # until the answer comes
        self._prober.probe(*who, action.control_address, self._settings.probe)

    def _ask_witnesses(self, action: AskWitnesses) -> None:
        who = (action.node, action.incarnation)
        if self._witnessed.get(who) == action.tried:
            return
        self._witnessed[who] = action.tried
        names = ", ".join(name for name, _ in action.witnesses)
        log.info("asking %s about %s: %s", names, action.node, action.reason, extra=_fields(action))
        self._prober.witness(
            who, action.tried, action.addresses, action.witnesses, self._settings.ping
        )

    def _report_waits(self, actions: tuple[Action, ...]) -> None:
        now = self._clock()
        waits = {one.job: one.reason for one in actions if isinstance(one, Wait)}
        for job, reason in waits.items():
            told, at = self._waits.get(job, ("", -math.inf))
            if told != reason and now - at >= _TOLD_AGAIN:
                log.info("job %s waits: %s", job, reason, extra={"job": job})
                self._waits[job] = reason, now
        for job in self._waits.keys() - waits.keys():
            del self._waits[job]

    def _report_held(self, actions: tuple[Action, ...]) -> None:
        held = {
            (one.node, one.incarnation): one.reason for one in actions if isinstance(one, HoldBack)
        }
        for (node, incarnation), reason in held.items():
            if self._held.get((node, incarnation)) != reason:
                log.warning("no verdict on %s (%s): %s", node, incarnation, reason)
        self._held = held


class Fenced(Exception):
    """The election key is gone: somebody else may lead."""


def _words(said: Probed) -> tuple[str, str]:
    return Verdict(said.verdict).name, said.detail


def _fields(action: Action) -> dict[str, str]:
    """The job and the node that an action is about, as the log's fields."""
    match action:
        case Transition(generation=generation):
            return {"job": generation.job}
        case UpdateIncident(incident=incident):
            return {"job": incident.job}
        case _:
            return {name: getattr(action, name, "") for name in ("job", "node")}


def _subject(action: Action) -> str:
    match action:
        case Transition(generation=generation):
            return (
                f"job {generation.job}: generation {generation.generation} {generation.phase.name}"
            )
        case DeclareDead():
            return f"node {action.node}: incarnation {action.incarnation} is dead"
        case Unassign():
            return f"node {action.node}: freed from job {action.job}"
        case SettleFlags():
            return f"node {action.node}: replaced"
        case KeepWarm():
            return f"node {action.node}: warm for {action.job or 'nothing'}"
        case UpdateStatus():
            return f"job {action.job}: status {action.status.state.name}"
        case UpdateIncident():
            return f"incident {action.incident.id}"
        case Probe() | AskWitnesses() | HoldBack() | Wait():
            return type(action).__name__
