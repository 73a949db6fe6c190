# SPDX-License-Identifier: Apache-2.0
"""A simulated machine: its workerd is the production desk and ``decide``, its trainers are not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.model import Device, DeviceKind, Node, StepPhase, TrainerExit
from coordinator.store import Changed, LeaseDeadlinePassed, LeaseRenewed, Listed, Reconnected
from coordinator.store.lease import LeaseLost
from tests.simulator.clock import Due
from tests.simulator.errands import SimErrands
from tests.simulator.store import FakeStore
from tests.simulator.trainer import SimTrainer
from workerd.agent.actions import (
    Action,
    EndTrainer,
    ForgetTrainer,
    KillTrainer,
    PlaceTrainer,
    Renew,
    SendHold,
    SendRelease,
    SendRestore,
    SendRunning,
    SendStop,
    SendWelcome,
    StartTrainer,
)
from workerd.agent.decide import decide
from workerd.agent.desk import READ, REGISTER, Desk, DeskEvent
from workerd.agent.errands import ErrandDone
from workerd.agent.registration import Dead, Occupied, Registered
from workerd.agent.reports import node_record
from workerd.agent.standing import standing
from workerd.agent.state import Limits, Local, TrainerFacts

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

LIMITS = Limits()
_AGAIN = 0.5  # seconds until what failed is tried again
_WRITTEN = 0.05  # seconds until a node looks what else is to be done after a write
_OVERDUE = 5.0  # seconds between two looks of a node whose lease may be gone
_MARKS = {"SendStop": "stop_sent", "SendRestore": "restore_sent", "SendHold": "hold_sent"}


class SimNode:
    """One machine."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.name = name
        self.up = False
        self.mute = False
        """Its workerd stands still, and everything on it that would answer."""
        self.isolated = False
        """Nobody reaches it, and it reaches nobody."""
        self.trainers: dict[str, SimTrainer] = {}
        self._lives = 0
        self._due: Due | None = None
        self._due_at = 0.0
        self.boot()

    # ---- the machine

    def boot(self) -> None:
        """It starts, and its workerd with it, as a new incarnation."""
        self.up, self.mute, self.isolated = True, False, False
        self.store = FakeStore(self.cluster.etcd, prefix=self.cluster.prefix)
        self.facts: dict[str, TrainerFacts] = {}
        self._own: set[str] = set()
        self._was_registered = False
        self._incarnate()
        times, store = self.cluster.times, self.store
        self.desk = Desk(
            store,
            self.name,
            self.cluster.settings.lease_ttl,
            self._hear_desk(store),
            errands=lambda name, sink: SimErrands(store, times, sink),
            clock=self.clock.now,
        )
        self.wake(self.cluster.dice.uniform(0.0, 1.0))

    def _incarnate(self) -> None:
        self._lives += 1
        self._template = Node(
            node=self.name,
            incarnation=f"{self.name}-{self._lives}",
            boot_id=f"{self.name}-{self._lives}",
            control_address=self.name,
            data_address=self.name,
            devices=(Device(DeviceKind.CUDA, 0),) * self.cluster.spec.ranks_per_node,
        )
        self._own.add(self._template.incarnation)
        self._happened()

    def _happened(self) -> None:
        """To its machine or its lines: what is still thought of it may be of before."""
        self.reached_since = self.clock.now()
        self.cluster.happened(self)

    @property
    def incarnation(self) -> str:
        """The one that lives here."""
        return self._template.incarnation

    def crash(self) -> None:
        """The machine is gone, at once; nobody is told."""
        self.up = False
        for trainer in list(self.trainers.values()):
            trainer.vanish()
        self.trainers.clear()
        self.facts.clear()
        self.store.close()
        self._cancel()
        self._happened()

    def isolate(self) -> None:
        """Its lines are cut."""
        self.isolated = True
        self.store.cut(after=1.5)
        self._happened()
        for trainer in self.trainers.values():
            if trainer.group is not None:
                trainer.advance()
                trainer.group.stall(self.clock.now())

    def hush(self) -> None:
        """Its workerd is stopped; its trainers go on."""
        self.mute = True
        self.store.cut(after=1.5)
        self._cancel()
        self.cluster.happened(self)

    def mend(self) -> None:
        """Its lines are whole, and its workerd goes on."""
        was_isolated, self.isolated, self.mute = self.isolated, False, False
        self.store.mend()
        self.wake()
        if was_isolated:
            self._happened()
        else:
            self.cluster.happened(self)

    def reaches(self, other: SimNode) -> bool:
        """Whether data comes through between two nodes."""
        return self.up and other.up and not self.isolated and not other.isolated

    # ---- events

    def _hear_desk(self, store: FakeStore) -> Any:
        def sink(event: DeskEvent) -> None:
            if store is not self.store or not self.up:
                return  # of an earlier life
            match event:
                case ErrandDone():
                    self.desk.errand(event)
                    if event.error is not None:
                        self.wake(_AGAIN)
                    elif event.kind not in (READ, REGISTER):
                        self.wake(_WRITTEN)
                        return
                case LeaseRenewed() | LeaseLost() | LeaseDeadlinePassed():
                    self.desk.lease(event)
                case Listed() | Changed() | Reconnected():
                    self.desk.refresh()
            self.wake()

        return sink

    def hear(self, instance: str, **facts: Any) -> None:
        """A trainer has said something."""
        if instance in self.facts:
            self.facts[instance] = replace(self.facts[instance], **facts)
            self.wake()

    def ended(self, instance: str, how: TrainerExit) -> None:
        """A process has ended, and what it had started too."""
        trainer = self.trainers.pop(instance, None)
        if trainer is not None:
            self._look(trainer)
        self.hear(instance, ended_at=self.clock.now(), exit=how, cleared=True, connected=False)

    # ---- one turn

    def wake(self, seconds: float | None = None) -> None:
        """Decide soon, or in so many seconds; the earliest counts."""
        at = self.clock.now() + (self.cluster.times.turn if seconds is None else seconds)
        if not self.up or self.mute or (self._due is not None and self._due_at <= at):
            return
        self._cancel()
        self._due, self._due_at = self.clock.at(at, self._turn), at

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None

    def _turn(self) -> None:
        """As ``workerd.agent.agent.Agent`` does it."""
        self._due = None
        now = self.clock.now()
        self._registered()
        if self.desk.registered or self._was_registered:
            self.desk.read(frozenset(one.job for one in self.facts.values()))
        for trainer in self.trainers.values():
            self._look(trainer)
        local = self._local(now)
        if not self.desk.registered:
            record = node_record(local, standing(self.desk.orders, local), LIMITS)
            self.desk.register(record, frozenset(self._own))
        for action in decide(self.desk.orders, local, LIMITS):
            if isinstance(action, Renew):
                self._renew()
            elif not self._carry_out(action):
                self.desk.carry_out(action)
        self._plan_next(now)

    def _look(self, trainer: SimTrainer) -> None:
        """Read its page."""
        trainer.advance()
        facts = self.facts[trainer.instance]
        step, phase = trainer.standing.step, StepPhase(int(trainer.standing.phase))
        if (step, phase) != (facts.step, facts.phase):
            self.facts[trainer.instance] = replace(facts, step=step, phase=phase)

    def _local(self, now: float) -> Local:
        trainers = sorted(self.facts.values(), key=lambda one: (one.local_rank, one.started_at))
        return Local(
            now=now,
            template=self._template,
            trainers=tuple(trainers),
            registered=self.desk.registered,
            overdue_since=self.desk.overdue_since,
            node_written=self.desk.node_written,
            written=self.desk.written,
            acked=self.desk.acked,
            ack_held=self.desk.ack_held,
            busy=self.desk.busy(now),
        )

    def _registered(self) -> None:
        outcome, self.desk.outcome = self.desk.outcome, None
        if isinstance(outcome, Registered):
            self._was_registered = True
        elif isinstance(outcome, Dead):
            self.desk.refresh()
            self.desk.try_again_in(_AGAIN)
        elif isinstance(outcome, Occupied):
            self.desk.try_again_in(_AGAIN)

    def _renew(self) -> None:
        self.facts.clear()
        self._incarnate()
        self.desk.start_anew()
        self.wake()

    def _plan_next(self, now: float) -> None:
        if not self.desk.registered:
            self.wake(_AGAIN)
        elif self.desk.overdue_since is not None:
            self.wake(_OVERDUE)
        for facts in self.facts.values():
            if facts.kill_at is not None and facts.lives:
                self.wake(max(0.0, facts.kill_at - now))
            elif not facts.lives:
                self.wake(1.0)

    # ---- actions

    def _carry_out(self, action: Action) -> bool:
        match action:
            case StartTrainer():
                self._start(action)
            case PlaceTrainer():
                self._set(action.instance, placement=action.placement)
            case EndTrainer() | KillTrainer():
                self._end(action)
            case ForgetTrainer():
                del self.facts[action.instance]
            case SendWelcome():
                self._send(action)
                self._set(action.instance, welcomed=True)
            case SendStop() | SendRestore() | SendHold():
                self._send(action)
                self._set(action.instance, **{_MARKS[type(action).__name__]: action.generation})
            case SendRunning():
                self._set(action.instance, running_sent=action.generation)
            case SendRelease():
                self._send(action)
                self._set(action.instance, released_at=self.clock.now())
            case _:
                return False
        return True

    def _set(self, instance: str, **changes: Any) -> None:
        self.facts[instance] = replace(self.facts[instance], **changes)

    def _send(self, action: SendWelcome | SendStop | SendRestore | SendHold | SendRelease) -> None:
        trainer = self.trainers.get(action.instance)
        if trainer is not None:
            trainer._after(self.cluster.times.message, trainer.receive, action)

    def _start(self, action: StartTrainer) -> None:
        instance = self.cluster.draw_instance(self.name)
        self.facts[instance] = TrainerFacts(
            instance=instance,
            local_rank=action.local_rank,
            job=action.job,
            spec_revision=action.spec_revision,
            started_at=self.clock.now(),
            attempt=action.attempt,
            placement=action.placement,
        )
        self.trainers[instance] = SimTrainer(self, instance)

    def _end(self, action: EndTrainer | KillTrainer) -> None:
        facts = self.facts[action.instance]
        trainer = self.trainers.get(action.instance)
        grace = action.grace if isinstance(action, EndTrainer) else 0.0
        if isinstance(action, EndTrainer):
            kill_at = self.clock.now() + grace if grace else None
            self.facts[action.instance] = replace(facts, ending=action.reason, kill_at=kill_at)
        else:
            self.facts[action.instance] = replace(facts, kill_at=None)
        if trainer is None:
            return
        if grace and trainer.hung:
            return  # until it is killed
        how = TrainerExit(signal=15 if grace else 9, message=action.reason)
        wait = self.cluster.dice.uniform(0.1, 2.0) if grace else 0.05
        self.clock.after(wait, lambda: trainer.end(how))
