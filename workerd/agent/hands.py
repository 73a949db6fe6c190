# SPDX-License-Identifier: Apache-2.0
"""Carries out what was decided about trainers: processes and links. Main thread only."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from coordinator.model import DeviceKind, FailureClass, JobSpec, Node, TrainerExit
from workerd.agent import messages
from workerd.agent.actions import (
    Action,
    AskStacks,
    EndTrainer,
    ForgetTrainer,
    KillTrainer,
    PlaceTrainer,
    SendHold,
    SendRelease,
    SendRestore,
    SendRunning,
    SendStop,
    SendWelcome,
    StartTrainer,
)
from workerd.agent.links import LinkDown, LinkEvent, LinkMessage, LinkUp, belongs
from workerd.agent.state import TrainerFacts
from workerd.agent.trainers import Entry
from workerd.protocol import stacks
from workerd.protocol.link import Downward
from workerd.protocol.page import ProgressPage
from workerd.supervisor.runtime import RuntimeFolder
from workerd.supervisor.trainers import (
    GuardianEnded,
    ProcessCleared,
    ProcessEnded,
    ProcessEvent,
    SpawnError,
    Supervisor,
)

_log = logging.getLogger(__name__)

_STACKS = 1.0  # seconds that a trainer gets to write its stacks down
_NOT_STARTED = 126  # the exit code of a trainer whose process could not be made, as in a shell


class Hands:
    """The trainers of this node."""

    def __init__(self, folder: RuntimeFolder, supervisor: Supervisor, template: Node) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._node = template.node
        self._data_address = template.data_address
        self._devices = template.devices
        self.entries: dict[str, Entry] = {}

    def facts(self) -> tuple[TrainerFacts, ...]:
        """What is known of each trainer, its page read just now; by local rank and age."""
        now = time.monotonic()
        for entry in self.entries.values():
            entry.look()
            self._hear_stacks(entry, now)
        found = [entry.facts for entry in self.entries.values()]
        return tuple(sorted(found, key=lambda one: (one.local_rank, one.started_at)))

    def beat(self) -> None:
        """Say in every page that workerd lives."""
        for entry in self.entries.values():
            entry.beat()

    # ---- events

    def process(self, event: ProcessEvent) -> None:
        """A process event."""
        match event:
            case ProcessEnded(instance):
                entry = self.entries[instance]
                entry.end(self._supervisor.ended(instance), time.monotonic())
                exit_ = entry.facts.exit or TrainerExit()
                how = f"signal {exit_.signal}" if exit_.signal else f"code {exit_.code}"
                why = f" ({exit_.cause})" if exit_.cause else ""
                _log.info("trainer %s ended: %s%s", instance, how, why)
            case ProcessCleared(instance):
                self._supervisor.reap(instance)
                self.entries[instance].set(cleared=True)
            case GuardianEnded():
                self._supervisor.guard()

    def link(self, event: LinkEvent) -> None:
        """A link event."""
        match event:
            case LinkUp():
                self._hello(event)
            case LinkMessage(number, message):
                entry = self._by_link(number)
                if entry is not None:
                    _log.debug("trainer %s says %s", entry.facts.instance, message)
                    entry.hear(message)
            case LinkDown(number, reason):
                entry = self._by_link(number)
                if entry is not None:
                    _log.debug("trainer %s: %s", entry.facts.instance, reason)
                    entry.disconnect(time.monotonic())

    def _hello(self, event: LinkUp) -> None:
        entry = self.entries.get(event.instance)
        pid = self._supervisor.pid(event.instance)
        if entry is None or pid is None or not entry.facts.lives:
            why = "there is no such trainer here"
        elif not belongs(event.peer, pid):
            why = f"process {event.peer} is not of that trainer"
        elif entry.facts.connected:
            why = "that trainer has a link already"
        else:
            entry.connect(event.link, event.number)
            _log.info("trainer %s connected", event.instance)
            return
        _log.warning("a connection as trainer %r was refused: %s", event.instance, why)
        event.link.close()

    def _by_link(self, number: int) -> Entry | None:
        for entry in self.entries.values():
            if entry.link_number == number and entry.facts.connected:
                return entry
        return None

    # ---- actions

    def carry_out(self, action: Action, spec: Callable[[str], JobSpec | None]) -> bool:
        """Carry out what is about a trainer; whether it was. ``spec`` gives a job's."""
        now = time.monotonic()
        match action:
            case StartTrainer():
                self._start(action, spec(action.job), now)
            case PlaceTrainer():
                self.entries[action.instance].set(placement=action.placement)
            case EndTrainer():
                self._end(action, now)
            case KillTrainer():
                self.entries[action.instance].set(kill_at=None, killed_at=now)
                self._supervisor.kill(action.instance)
            case AskStacks():
                self._ask_stacks(self.entries[action.instance], now)
            case ForgetTrainer():
                del self.entries[action.instance]
            case SendWelcome():
                self._send(
                    action.instance,
                    messages.welcome(action, self._node, self._data_address),
                    welcomed=True,
                )
            case SendStop():
                self._send(action.instance, messages.stop(action), stop_sent=action.generation)
            case SendRestore():
                self._send(
                    action.instance, messages.restore(action), restore_sent=action.generation
                )
            case SendRunning():
                self._send(
                    action.instance, messages.running(action), running_sent=action.generation
                )
            case SendHold():
                self._send(action.instance, messages.hold(action), hold_sent=action.generation)
            case SendRelease():
                self._send(action.instance, messages.release(action), released_at=now)
            case _:
                return False
        return True

    def _ask_stacks(self, entry: Entry, now: float) -> None:
        instance = entry.facts.instance
        pid = self._supervisor.pid(instance)
        said = None
        if pid is None or not stacks.ask(pid, self._folder.page(instance)):
            said = "" if pid is None else stacks.threads(pid)
        entry.set(stacks_asked_at=now, stacks=said)

    def _hear_stacks(self, entry: Entry, now: float) -> None:
        asked = entry.facts.stacks_asked_at
        if not asked or entry.facts.stacks is not None or now < asked + _STACKS:
            return
        instance = entry.facts.instance
        pid = self._supervisor.pid(instance)
        kernel = "" if pid is None else stacks.threads(pid)
        found = f"{stacks.read(self._folder.page(instance))}\n\n{kernel}".strip()
        _log.warning("the stacks of trainer %s, which stands still:\n%s", instance, found)
        entry.set(stacks=found)

    def _send(self, instance: str, message: Downward, **mark: object) -> None:
        entry = self.entries[instance]
        if entry.send(message):
            entry.set(**mark)

    def _end(self, action: EndTrainer, now: float) -> None:
        entry = self.entries[action.instance]
        if action.grace > 0:
            entry.set(ending=action.reason, kill_at=now + action.grace)
            self._supervisor.terminate(action.instance)
        else:
            entry.set(ending=action.reason, killed_at=now)
            self._supervisor.kill(action.instance)

    def _start(self, action: StartTrainer, spec: JobSpec | None, now: float) -> None:
        instance = secrets.token_hex(6)
        facts = TrainerFacts(
            instance=instance,
            local_rank=action.local_rank,
            job=action.job,
            spec_revision=action.spec_revision,
            started_at=now,
            attempt=action.attempt,
            placement=action.placement,
        )
        page = None
        try:
            if spec is None:
                raise SpawnError(f"the spec of job {action.job} is not known")
            self._folder.trainer(instance)
            page = ProgressPage.create(self._folder.page(instance))
            environment = dict(spec.environment)
            if self._devices[action.local_rank].kind is DeviceKind.CPU:
                environment["CUDA_VISIBLE_DEVICES"] = ""  # this node's GPUs are not for trainers
            pid = self._supervisor.start(
                instance, spec.command, environment, spec.working_directory
            )
        except (OSError, SpawnError) as error:
            # As one that has ended: the leader counts it, and its message reaches the operator.
            _log.error("trainer %s of job %s: %s", instance, action.job, error)
            if page is not None:
                page.close()
            self._folder.retire(instance)
            exit_ = TrainerExit(
                code=_NOT_STARTED, failure_class=FailureClass.HOST, cause=str(error), step=-1
            )
            ended = replace(facts, ended_at=now, exit=exit_, cleared=True)
            self.entries[instance] = Entry(ended)
            return
        _log.info("trainer %s is process %d", instance, pid)
        self.entries[instance] = Entry(facts, page)
