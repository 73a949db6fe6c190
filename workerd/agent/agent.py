# SPDX-License-Identifier: Apache-2.0
"""The agent: one owner, one queue. Events come in, a pure decision is made, its actions go out."""

from __future__ import annotations

import logging
import queue
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import TypeAlias

from coordinator.model import JobSpec, Node
from coordinator.store import (
    Changed,
    Disconnected,
    LeaseDeadlinePassed,
    LeaseRenewed,
    Listed,
    Reconnected,
    Store,
)
from coordinator.store.lease import LeaseLost
from protos.node_pb2 import ProbeReply
from workerd.agent import desk as desks
from workerd.agent.actions import Action, Renew, WriteProgress
from workerd.agent.decide import decide
from workerd.agent.errands import ErrandDone
from workerd.agent.hands import Hands
from workerd.agent.links import LinkDown, LinkEvent, LinkMessage, LinkServer, LinkUp
from workerd.agent.probe import ProbeServer
from workerd.agent.registration import Dead, Occupied, Overtaken, Registered
from workerd.agent.reports import node_record
from workerd.agent.standing import standing
from workerd.agent.state import Limits, Local
from workerd.health.rate import StepRate, StepTime
from workerd.protocol.link import Listener
from workerd.supervisor.runtime import RuntimeFolder
from workerd.supervisor.trainers import (
    GuardianEnded,
    ProcessCleared,
    ProcessEnded,
    ProcessEvent,
    Supervisor,
)

_log = logging.getLogger(__name__)

_TICK = 0.25  # seconds: how late a grace or an interval may be noticed
_HEARTBEAT = 1.0  # seconds between two in the pages
_MARGIN = 2.0  # seconds that a lease of a dead workerd may outlive its TTL
_AGAIN = 0.25  # seconds between two looks at a node id that is taken
_CLOSE = 10.0  # seconds for etcd to take the lease back


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal asks workerd to end."""

    name: str


Event: TypeAlias = desks.DeskEvent | ProcessEvent | LinkEvent | Signalled


def draw_incarnation() -> str:
    """A fresh id for one life of workerd on a node."""
    return secrets.token_hex(6)


class Agent:
    """One node's agent. Made and run on the main thread; :meth:`run` returns the exit status.

    ``ready`` is called when the node is registered for the first time, ``alive`` with a line on how
    it stands after every turn, unless its lease has silently not been renewed.
    """

    def __init__(
        self,
        store: Store,
        template: Node,
        ttl: float,
        folder: RuntimeFolder,
        probe: ProbeServer,
        ready: Callable[[], None],
        limits: Limits | None = None,
        *,
        alive: Callable[[str], None] = lambda status: None,
    ) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._template = template
        self._own = {template.incarnation}
        self._ttl = ttl
        self._folder = folder
        self._probe = probe
        self._ready = ready
        self._alive = alive
        self._limits = limits or Limits()
        self._desk = desks.Desk(store, template.node, ttl, self._queue.put)
        self._supervisor = Supervisor(folder, secrets.token_hex(8), self._queue.put)
        self._links = LinkServer(Listener(folder.socket), self._queue.put)
        self._hands = Hands(folder, self._supervisor, template)
        self._rate = StepRate()
        self._step_time = StepTime()
        self._rate_of: tuple[str, ...] = ()
        self._beat_at = 0.0
        self._occupied_until: float | None = None
        self._was_registered = False
        self._stopping = ""
        self._failure = ""

    def run(self) -> int:
        """Serve until a signal asks for the end; 1 if it could not, else 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        self._answer_probes()
        try:
            self._turn()
            while not self._over():
                self._take(self._next())
                self._turn()
        finally:
            self._close()
        if self._failure:
            _log.error("%s", self._failure)
            return 1
        return 0

    # ---- events

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        # A simple queue may be put to from a signal handler.
        self._queue.put(Signalled(signal.Signals(number).name))

    def _next(self) -> list[Event]:
        """What has come; empty after a tick without anything."""
        try:
            events = [self._queue.get(timeout=_TICK)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            events.append(self._queue.get())
        return events

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ErrandDone():
                    self._desk.errand(event)
                case LeaseRenewed() | LeaseLost() | LeaseDeadlinePassed():
                    self._desk.lease(event)
                case Listed() | Changed() | Reconnected():
                    self._desk.refresh()
                case Disconnected(reason):
                    _log.warning("etcd does not answer: %s", reason)
                case ProcessEnded() | ProcessCleared() | GuardianEnded():
                    self._hands.process(event)
                case LinkUp() | LinkMessage() | LinkDown():
                    self._hands.link(event)
                case Signalled(name):
                    self._stop(name)

    def _stop(self, name: str) -> None:
        if not self._stopping:
            _log.info("%s: ending", name)
            self._stopping = f"workerd is stopping ({name})"
            return
        _log.warning("%s again: killing the trainers", name)
        for instance in self._hands.entries:
            self._supervisor.kill(instance)

    # ---- one turn

    def _turn(self) -> None:
        now = time.monotonic()
        self._registered(now)
        if self._desk.registered or self._was_registered:
            self._desk.read(frozenset(one.facts.job for one in self._hands.entries.values()))
        local = self._local(now)
        if not self._stopping:
            record = node_record(local, standing(self._desk.orders, local), self._limits)
            self._desk.register(record, frozenset(self._own))
        for action in decide(self._desk.orders, local, self._limits):
            level = logging.DEBUG if isinstance(action, WriteProgress) else logging.INFO
            _log.log(level, "%s", _told(action), extra={"job": self._job(action)})
            if isinstance(action, Renew):
                self._renew()
            elif not self._hands.carry_out(action, self._spec):
                self._desk.carry_out(action)
        if now >= self._beat_at:
            self._beat_at = now + _HEARTBEAT
            self._hands.beat()
        if self._desk.minded:
            registered = "registered" if self._desk.registered else "not registered"
            self._alive(f"{registered}, incarnation {self._template.incarnation}")

    def _local(self, now: float) -> Local:
        trainers = self._hands.facts()
        placed = [one for one in trainers if one.placement is not None and one.lives]
        of = tuple(one.instance for one in placed)
        if of != self._rate_of:
            self._rate_of = of
            self._rate.clear()
            self._step_time.clear()
        if placed:
            step = min(one.step for one in placed)
            self._rate.observe(now, step)
            self._step_time.observe(now, step)
        return Local(
            now=now,
            template=self._template,
            trainers=trainers,
            registered=self._desk.registered,
            overdue_since=self._desk.overdue_since,
            stopping=self._stopping,
            node_written=self._desk.node_written,
            written=self._desk.written,
            acked=self._desk.acked,
            ack_held=self._desk.ack_held,
            busy=self._desk.busy(now),
            steps_per_second=self._rate.per_second(),
            step_seconds=self._step_time.usual(),
        )

    def _spec(self, job: str) -> JobSpec | None:
        orders = self._desk.orders
        found = orders.jobs.get(job) if orders is not None else None
        return found.job.spec if found is not None and found.job is not None else None

    def _job(self, action: Action) -> str:
        """The job that an action is about, by itself or by its trainer."""
        entry = self._hands.entries.get(getattr(action, "instance", ""))
        return getattr(action, "job", "") or (entry.facts.job if entry is not None else "")

    # ---- registration

    def _registered(self, now: float) -> None:
        """What came of a try to register."""
        outcome, self._desk.outcome = self._desk.outcome, None
        match outcome:
            case Registered():
                self._occupied_until = None
                if not self._was_registered:
                    self._was_registered = True
                    self._ready()
            case Occupied(incarnation, address, seconds):
                if self._occupied_until is None:
                    wait = max(self._ttl, seconds) + _MARGIN
                    self._occupied_until = now + wait
                    _log.warning(
                        "node id %s is held by incarnation %s at %s: waiting %.0f s for its end",
                        self._template.node,
                        incarnation,
                        address,
                        wait,
                    )
                if now >= self._occupied_until:
                    self._failure = (
                        f"node id {self._template.node} is taken: another workerd lives with it "
                        f"(incarnation {incarnation}, {address}); every node needs its own --node"
                    )
                    self._stopping = self._stopping or self._failure
                self._desk.try_again_in(_AGAIN)
            case Dead():
                # The orders say so too, and the decision that follows ends the trainers.
                self._desk.refresh()
                self._desk.try_again_in(_AGAIN)
            case Overtaken() | None:
                pass

    def _renew(self) -> None:
        """Start anew: this incarnation never lives again."""
        self._hands.entries.clear()
        self._template = replace(self._template, incarnation=draw_incarnation())
        self._own.add(self._template.incarnation)
        self._desk.start_anew()
        self._answer_probes()
        _log.warning("starting anew as incarnation %s", self._template.incarnation)

    def _answer_probes(self) -> None:
        self._probe.say(
            ProbeReply(
                node=self._template.node,
                incarnation=self._template.incarnation,
                boot_id=self._template.boot_id,
            )
        )

    # ---- the end

    def _over(self) -> bool:
        return (
            bool(self._stopping)
            and all(one.facts.cleared for one in self._hands.entries.values())
            and not self._desk.registering
        )

    def _close(self) -> None:
        self._supervisor.close()
        self._links.close()
        if not self._desk.close(_CLOSE):
            _log.warning("etcd has not taken the lease back: it ends by itself")
        self._probe.close()
        self._folder.close()


def _told(action: Action) -> str:
    """An action in one short line."""
    kind = type(action).__name__
    about = " ".join(
        f"{name}={value}"
        for name in ("instance", "job", "local_rank", "generation", "resume_step", "rank")
        if (value := getattr(action, name, None)) is not None
    )
    return f"{kind} {about}: {action.reason}" if about else f"{kind}: {action.reason}"
