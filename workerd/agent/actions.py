# SPDX-License-Identifier: Apache-2.0
"""What a decision of the agent can ask for. Every action carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.model import Ack, JobSpec, Node, Progress, Rendezvous, Source
from workerd.agent.state import Placement


@dataclass(frozen=True, slots=True)
class StartTrainer:
    """Start a process for a local rank; without a placement it is a spare."""

    local_rank: int
    job: str
    spec_revision: int
    placement: Placement | None
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlaceTrainer:
    """Bind a waiting trainer to a place, for good."""

    instance: str
    placement: Placement
    reason: str


@dataclass(frozen=True, slots=True)
class EndTrainer:
    """End a process: SIGTERM, and SIGKILL after ``grace`` seconds; at once if that is 0."""

    instance: str
    grace: float
    reason: str


@dataclass(frozen=True, slots=True)
class KillTrainer:
    """SIGKILL to a process whose grace has passed."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Have the stacks of a trainer's threads written down."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetTrainer:
    """Drop what is known of an ended trainer."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendWelcome:
    """Answer a trainer's Hello."""

    instance: str
    job: str
    spec: JobSpec
    spec_revision: int
    local_rank: int
    spare: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SendStop:
    """PAUSE reaches a trainer."""

    instance: str
    generation: int
    rank: int
    offer_rendezvous: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SendRestore:
    """RESTORE reaches a trainer."""

    instance: str
    generation: int
    resume_step: int
    initial: bool
    rank: int
    replica: int
    replicas: int
    shard_position: int
    sources: tuple[Source, ...]
    rendezvous: Rendezvous | None
    reserve: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SendRunning:
    """RUNNING reaches a trainer."""

    instance: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendHold:
    """The wish for a stop after the step under way reaches a trainer."""

    instance: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendRelease:
    """The job's end reaches a trainer."""

    instance: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteNode:
    """Write this node's record."""

    record: Node
    reason: str


@dataclass(frozen=True, slots=True)
class WriteAck:
    """Acknowledge a generation."""

    job: str
    ack: Ack
    reason: str


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """Write the progress record; ``marks`` is to be kept with it."""

    job: str
    progress: Progress
    marks: tuple[object, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ClearPlace:
    """Remove this node's ack and progress of a job in which it has no place any more."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """This incarnation is dead and nothing of it runs any more: start anew with another."""

    reason: str


Action: TypeAlias = (
    StartTrainer
    | PlaceTrainer
    | EndTrainer
    | KillTrainer
    | AskStacks
    | ForgetTrainer
    | SendWelcome
    | SendStop
    | SendRestore
    | SendRunning
    | SendHold
    | SendRelease
    | WriteNode
    | WriteAck
    | WriteProgress
    | ClearPlace
    | Renew
)
