# SPDX-License-Identifier: Apache-2.0
"""Generations, slots, acknowledgements and progress; see ``protos/membership.proto``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Where a generation stands; it only rises."""

    PHASE_UNSPECIFIED = 0
    PAUSE = 1
    RESTORE = 2
    RUNNING = 3
    FINISHED = 4
    STOPPED = 5
    FAILED = 6
    LOST = 7

    @property
    def ended(self) -> bool:
        """Whether the job is over with this generation."""
        return self >= Phase.FINISHED


class StepPhase(IntEnum):
    """Where a rank stands in its step."""

    EMPTY = 0
    COMPUTING = 1
    PREPARED = 2
    UPDATING = 3
    DONE = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A rank that serves its state to the empty ranks of its shard position."""

    shard_position: int = 0
    rank: int = 0
    node: str = ""
    instance: str = ""
    address: str = ""
    initial_digest: str = ""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A TCPStore and the nonce that is part of every key in it."""

    address: str = ""
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """``jobs/<job>/generation``: the one record that every owner of the job follows."""

    job: str = ""
    generation: int = 0
    phase: Phase = Phase.PHASE_UNSPECIFIED
    spec_revision: int = 0
    last_running_generation: int = 0
    resume_step: int = -1
    initial: bool = False
    empty_slots: tuple[int, ...] = ()
    absent_replicas: tuple[int, ...] = ()
    changed_slots: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    rendezvous_slots: tuple[int, ...] = ()
    rendezvous: Rendezvous | None = None
    incident: str = ""
    restarts: int = 0
    regroups: int = 0
    reason: str = ""
    hold: str = ""


@dataclass(frozen=True, slots=True)
class SlotRank:
    """The trainer instance that has a rank, and the generation since which it has it anew."""

    instance: str = ""
    since: int = 0


@dataclass(frozen=True, slots=True)
class Leaver:
    """A node that has given its slot away, and serves its state, stopped, until the others run."""

    node: str = ""
    incarnation: str = ""
    ranks: tuple[SlotRank, ...] = ()
    since: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """``jobs/<job>/slots/<slot>``: the place of one node in a job."""

    slot: int = 0
    node: str = ""
    incarnation: str = ""
    ranks: tuple[SlotRank, ...] = ()
    generation: int = 0
    leaving: Leaver | None = None

    def left(self, generation: Generation) -> Slot | None:
        """The slot as who has left it still has it in a generation; None when nobody has."""
        one = self.leaving
        if one is None or not generation.last_running_generation < one.since:
            return None
        if one.since > generation.generation or generation.phase.ended:
            return None
        return Slot(self.slot, one.node, one.incarnation, one.ranks, self.generation)


@dataclass(frozen=True, slots=True)
class RankAck:
    """One rank's part of an acknowledgement."""

    rank: int = 0
    instance: str = ""
    phase: StepPhase = StepPhase.EMPTY
    step: int = -1
    initial_digest: str = ""
    shard_address: str = ""
    offer: Rendezvous | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class Ack:
    """``jobs/<job>/acks/<node>``: every local rank has stopped for ``generation``."""

    generation: int = 0
    incarnation: str = ""
    ranks: tuple[RankAck, ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """What an empty rank pulled."""

    source: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank's part of a progress record."""

    rank: int = 0
    instance: str = ""
    generation: int = 0
    phase: StepPhase = StepPhase.EMPTY
    step: int = 0
    broken: str = ""
    pull: Pull | None = None
    digest: str = ""
    broken_generation: int = 0
    restored: int = 0
    held: int = 0
    still: bool = False
    waiting: bool = False
    excused: bool = False
    stacks: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """``jobs/<job>/progress/<node>``."""

    incarnation: str = ""
    ranks: tuple[RankProgress, ...] = ()
    steps_per_second: float = 0.0
    step_seconds: float = 0.0
