# SPDX-License-Identifier: Apache-2.0
"""Incidents; the fields are those of ``protos/incident.proto``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.model.node import TrainerExit


class Cause(IntEnum):
    """What an incident began with."""

    CAUSE_UNSPECIFIED = 0
    NODE_LOST = 1
    TRAINER_ENDED = 2
    GROUP_BROKEN = 3
    NO_PROGRESS = 4
    DEADLINE = 5
    PLANNED = 6


@dataclass(frozen=True, slots=True)
class IncidentMark:
    """A point of an incident's timeline.

    ``time_ns`` is wall-clock time in nanoseconds since the epoch, stamped when the mark is
    written (0 until then); nothing is decided from it.
    """

    phase: str = ""
    note: str = ""
    time_ns: int = 0


@dataclass(frozen=True, slots=True)
class RankExit:
    """How the trainer of a rank has ended."""

    rank: int = 0
    node: str = ""
    instance: str = ""
    exit: TrainerExit = field(default_factory=TrainerExit)


@dataclass(frozen=True, slots=True)
class Incident:
    """``incidents/<id>``: one failure, from its detection to the first step after it."""

    id: str = ""
    job: str = ""
    cause: Cause = Cause.CAUSE_UNSPECIFIED
    nodes: tuple[str, ...] = ()
    detail: str = ""
    first_generation: int = 0
    last_generation: int = 0
    marks: tuple[IncidentMark, ...] = ()
    resume_step: int = -1
    lost_steps: int = 0
    bytes_moved: int = 0
    closed: bool = False
    exits: tuple[RankExit, ...] = ()
