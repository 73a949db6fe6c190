# SPDX-License-Identifier: Apache-2.0
"""What follows for one machine when something happens to it.

Decisions are those of ``workerd.agent.decide`` and ``workerd.protocol.phases``. What nobody else
sees in between is one event: workerd decides until there is nothing left to do, its messages
reach its trainers, what it writes is in etcd (unless a write is held up: a fault).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from coordinator import model
from coordinator.model import (
    Device,
    DeviceKind,
    Node,
    Progress,
    RankProgress,
    TrainerExit,
)
from tests.modelcheck import past
from tests.modelcheck.trainers import Effect, Trainers
from tests.modelcheck.values import Key, Machine, Process, Violation
from workerd.agent.actions import Action as NodeAction
from workerd.agent.actions import (
    ClearPlace,
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
    WriteAck,
    WriteNode,
    WriteProgress,
)
from workerd.agent.decide import decide
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import Limits, Local, Orders, TrainerFacts, Written

LIMITS = Limits(progress_interval=1e12, retry=0, retry_max=0, self_fence=1e12)
"""Clocks stand still here: only what is urgent is reported."""
KINDS = {WriteNode: NODE, WriteAck: ACK, WriteProgress: PROGRESS, ClearPlace: PROGRESS}
ROUNDS = 20
"""More than workerd ever needs to come to rest."""

Event = tuple[Any, ...]
"""A name, and what it is about."""


def fresh(name: str, life: int, devices: int) -> Local:
    """A workerd that has just started."""
    return Local(
        now=0.0,
        template=Node(
            node=name,
            incarnation=f"{name}-{life}",
            control_address=name,
            devices=tuple(Device(DeviceKind.CPU, index) for index in range(devices)),
        ),
    )


@lru_cache(maxsize=100_000)
def plain(progress: Progress) -> Progress:
    """Without what no decision depends on."""
    ranks = tuple(_plain(one) for one in progress.ranks)
    return Progress(incarnation=progress.incarnation, ranks=ranks)


def _plain(one: RankProgress) -> RankProgress:
    done = one.phase is model.StepPhase.DONE
    phase = one.phase if done else model.StepPhase.COMPUTING
    return replace(one, phase=phase, step=max(one.step, 0), pull=None)


class Turn(Trainers):
    """One event, until the machine is at rest again."""

    def finished(self) -> tuple[Machine, Key | None, tuple[Effect, ...]]:
        """What has become of it."""
        self._decide()
        machine = past.machine(self._whole())
        if machine != self.machine:
            self.machine = machine
            self._processes = {one.instance: one for one in machine.processes}
            self._decide()
            machine = self._whole()
        return machine, self.key, tuple(self.effects)

    def _whole(self) -> Machine:
        return self.machine._replace(processes=tuple(self._processes.values()))

    def happen(self, event: Event) -> None:
        """Let it happen."""
        handler: Callable[..., None] = getattr(self, f"on_{event[0]}")
        handler(*event[1:])

    # ---- events of the machine

    def on_read(self, orders: Orders) -> None:
        """It reads what etcd says to it."""
        self.machine = self.machine._replace(orders=orders)

    def on_register(self) -> None:
        """It notices that its lease is gone, if it had one, and registers under a new one."""
        lease = self.machine.lease + 1
        record = self.machine.local.template
        self.key = Key(lease, record)
        local = replace(
            self.machine.local,
            registered=True,
            node_written=record,
            written=None,
            ack_held=False,
            busy=frozenset(),
        )
        self.machine = self.machine._replace(lease=lease, local=local, outbox=())

    def on_heal(self) -> None:
        """It is neither cut off nor silent any more."""
        self.machine = self.machine._replace(cut=False, mute=False)

    def on_write(self, number: int) -> None:
        """A write that was held up reaches etcd."""
        action = self.machine.outbox[number]
        outbox = self.machine.outbox[:number] + self.machine.outbox[number + 1 :]
        self.machine = self.machine._replace(outbox=outbox)
        self._local(busy=self.machine.local.busy - {KINDS[type(action)]})
        self._write(action)

    # ---- workerd

    def _decide(self) -> None:
        for _ in range(ROUNDS):
            machine = self.machine
            if machine.mute or not machine.up:
                return
            done = [self._do(one) for one in decide(machine.orders, machine.local, LIMITS)]
            if not any(done):
                return
        raise Violation(f"{self.machine.local.node}: workerd never comes to rest")

    def _do(self, action: NodeAction) -> bool:
        """False if it can't be done now."""
        match action:
            case StartTrainer():
                self._start(action)
            case PlaceTrainer():
                self._facts(action.instance, placement=action.placement)
            case EndTrainer() | KillTrainer():
                self._facts(action.instance, ending="told to")
                self.on_end(action.instance, TrainerExit(signal=15))
            case ForgetTrainer():
                kept = tuple(
                    one for one in self.machine.local.trainers if one.instance != action.instance
                )
                self._local(trainers=kept)
            case Renew():
                self._renew()
            case SendWelcome():
                self._facts(action.instance, welcomed=True)
                if self._trainer(action.instance).placement is None:
                    self.on_ready(action.instance)
            case SendStop():
                self._facts(action.instance, stop_sent=action.generation)
                self._stop(action)
            case SendRestore():
                self._facts(action.instance, restore_sent=action.generation)
                self._restore(action)
            case SendHold():
                self._facts(action.instance, hold_sent=action.generation)
                self._hold(action)
            case SendRunning():
                self._facts(action.instance, running_sent=action.generation)
            case SendRelease():
                self._facts(action.instance, released_at=0.0)
                self.on_end(action.instance, TrainerExit())
            case WriteNode() | WriteAck() | WriteProgress() | ClearPlace():
                if not self.machine.connected:
                    return False
                kind = KINDS[type(action)]
                if self.machine.slow != kind:
                    self._write(action)
                else:
                    outbox = (*self.machine.outbox, action)
                    self.machine = self.machine._replace(slow="", outbox=outbox)
                    self._local(busy=self.machine.local.busy | {kind})
        return True

    def _start(self, action: StartTrainer) -> None:
        instance = f"{self.machine.local.node}t{self.machine.lives}"
        facts = TrainerFacts(
            instance=instance,
            local_rank=action.local_rank,
            job=action.job,
            spec_revision=action.spec_revision,
            placement=action.placement,
            connected=True,
        )
        self._processes[instance] = Process(instance)
        self.machine = self.machine._replace(lives=self.machine.lives + 1)
        self._local(trainers=(*self.machine.local.trainers, facts))

    def _renew(self) -> None:
        machine = self.machine
        local = fresh(machine.local.node, machine.lives, len(machine.local.devices))
        self.machine = machine._replace(
            local=local, orders=None, outbox=(), lives=machine.lives + 1
        )

    def _write(self, action: NodeAction) -> None:
        key, local = self.key, self.machine.local
        if key is None or key.lease != self.machine.lease:
            self._local(registered=False, node_written=None, written=None)
            return
        if isinstance(action, WriteNode):
            self.key = key._replace(record=action.record)
            self._local(node_written=action.record)
        elif isinstance(action, WriteAck):
            self.key = key._replace(ack=action.ack)
            self._local(acked=(action.job, action.ack.generation), ack_held=True)
        elif isinstance(action, WriteProgress):
            self.key = key._replace(progress=plain(action.progress))
            self._local(written=Written(action.job, Progress(), action.marks, local.now))
        elif isinstance(action, ClearPlace):
            self.key = key._replace(ack=None, progress=None)
            self._local(written=None)
