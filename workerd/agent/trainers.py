# SPDX-License-Identifier: Apache-2.0
"""The trainers of this node as the agent knows them: processes, links, pages, messages."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from coordinator.model import Pull, Rendezvous, StepPhase
from protos import trainer_pb2
from workerd.agent.diagnosis import diagnose
from workerd.agent.state import Stopped, TrainerFacts
from workerd.protocol.link import Downward, LinkClosed, LinkTimeout, Upward, WorkerdEnd
from workerd.protocol.page import PageError, ProgressPage
from workerd.supervisor.evidence import Ending

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """One trainer: what is known of it, and the handles."""

    facts: TrainerFacts
    page: ProgressPage | None = None
    link: WorkerdEnd | None = None
    link_number: int = 0
    traceback: str = ""

    def set(self, **changes: Any) -> None:
        """Change what is known."""
        self.facts = replace(self.facts, **changes)

    # ---- the link

    def connect(self, link: WorkerdEnd, number: int) -> None:
        """It has said hello. What it was told over an older link, it is told again."""
        self.link, self.link_number = link, number
        self.set(
            connected=True,
            unlinked_at=None,
            welcomed=False,
            stop_sent=0,
            restore_sent=0,
            running_sent=0,
            hold_sent=0,
            released_at=None,
        )

    def disconnect(self, now: float) -> None:
        """Its link is closed."""
        if self.link is not None:
            self.link.close()
            self.link = None
        self.set(connected=False, unlinked_at=now)

    def send(self, message: Downward) -> bool:
        """Send without waiting; whether it was. What was not is due again the next time."""
        if self.link is None:
            return False
        try:
            self.link.send(message, timeout=0)
        except (LinkClosed, LinkTimeout) as error:
            _log.warning(
                "trainer %s takes no %s: %s", self.facts.instance, type(message).__name__, error
            )
            return False
        return True

    # ---- the page

    def look(self) -> None:
        """Read its page."""
        if self.page is None:
            return
        try:
            view = self.page.read()
        except PageError as error:
            _log.warning("trainer %s: %s", self.facts.instance, error)
            return
        seen = {
            "step": view.step,
            "phase": StepPhase(int(view.phase)),
            "moved_at": view.changed_ns / 1e9,
            "waiting": view.waiting,
            "excused_until": view.excused_ns / 1e9,
        }
        if any(getattr(self.facts, name) != value for name, value in seen.items()):
            self.set(**seen)

    def beat(self) -> None:
        """Say in its page that workerd lives."""
        if self.page is not None:
            self.page.beat()

    # ---- its end

    def end(self, ending: Ending, now: float) -> None:
        """Its process has ended."""
        self.look()
        if self.page is not None:
            self.page.close()
            self.page = None
        if self.link is not None:
            self.link.close()
            self.link = None
        facts = self.facts
        exit_ = diagnose(
            ending,
            self.traceback,
            facts.ending,
            facts.step,
            released=facts.released_at is not None,
        )
        self.set(ended_at=now, exit=exit_, connected=False)

    # ---- what it says

    def hear(self, message: Upward) -> None:
        """Take in a message."""
        facts = self.facts
        match message:
            case trainer_pb2.Ready():
                self.set(ready=True)
            case trainer_pb2.Stopped():
                self._stopped(message)
            case trainer_pb2.Restored() if message.generation > facts.restored:
                self.set(restored=message.generation, pull=_pull(message))
            case trainer_pb2.Joined() if message.generation > facts.joined:
                self.set(joined=message.generation)
            case trainer_pb2.Committed() if message.generation > facts.committed:
                self.set(committed=message.generation)
            case trainer_pb2.Held() if message.generation > facts.held:
                self.set(held=message.generation)
            case trainer_pb2.Broken() if message.generation > facts.broken_generation:
                self.set(
                    broken_generation=message.generation,
                    broken=message.error or "its group is broken",
                )
            case trainer_pb2.Done():
                self.set(done_step=message.step, digest=message.digest)
            case trainer_pb2.Failed():
                self.traceback = message.traceback
            case _:
                _log.warning("trainer %s says again or too late: %s", facts.instance, message)

    def _stopped(self, message: trainer_pb2.Stopped) -> None:
        facts = self.facts
        said = Stopped(
            generation=message.generation,
            phase=StepPhase(message.phase),
            step=message.step,
            initial_digest=message.initial_digest,
            shard_address=message.shard_address,
            offer=(
                Rendezvous(message.offer.address, message.offer.nonce)
                if message.HasField("offer")
                else None
            ),
            held=message.held,
        )
        # Write-once: its first word for a generation is the one that is acknowledged.
        if message.generation > facts.stop_sent or (
            facts.stopped is not None and facts.stopped.generation >= message.generation
        ):
            if said != facts.stopped:
                _log.warning("trainer %s: a stop that is not due: %s", facts.instance, said)
            return
        self.set(stopped=said)


def _pull(message: trainer_pb2.Restored) -> Pull | None:
    if not message.HasField("pull"):
        return None
    return Pull(message.pull.source, message.pull.bytes, message.pull.seconds)
