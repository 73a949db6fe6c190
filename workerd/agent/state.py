# SPDX-License-Identifier: Apache-2.0
"""What a decision of the agent works on: frozen values, from etcd and from this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.model import (
    Ack,
    Assignment,
    Device,
    Generation,
    Job,
    JobSpec,
    Node,
    NodeFlags,
    Phase,
    Progress,
    Pull,
    Rendezvous,
    Slot,
    SpareAssignment,
    StepPhase,
    TrainerExit,
)


@dataclass(frozen=True, slots=True)
class JobOrders:
    """One job's records, as far as this node needs them; None where there is none."""

    job: Job | None = None
    generation: Generation | None = None
    slot: Slot | None = None
    """The slot that this node's assignment names, if it is one of this job."""
    ack: Ack | None = None
    """What this node has acknowledged."""

    @property
    def phase(self) -> Phase:
        """The generation's phase; unspecified before the first generation."""
        return Phase.PHASE_UNSPECIFIED if self.generation is None else self.generation.phase


@dataclass(frozen=True, slots=True)
class Orders:
    """What etcd says to this node, all of it at one revision."""

    revision: int = 0
    flags: NodeFlags = field(default_factory=NodeFlags)
    assignment: Assignment | None = None
    spare: SpareAssignment | None = None
    jobs: Mapping[str, JobOrders] = field(default_factory=dict)
    """The jobs of the assignment, of the spare record and of every trainer that lived here when
    this was read. A job that isn't in here was not read."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What a trainer was placed for: it never serves for anything else (rule 1)."""

    job: str
    slot: int
    since: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A trainer's own word that nothing of its state changes until RESTORE of ``generation``."""

    generation: int
    phase: StepPhase = StepPhase.EMPTY
    step: int = -1
    initial_digest: str = ""
    shard_address: str = ""
    offer: Rendezvous | None = None
    held: bool = False


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """One trainer process and what it has said. Times are monotonic seconds.

    The ``*_sent`` are the generations of the latest such message to it.
    """

    instance: str
    local_rank: int
    job: str
    spec_revision: int
    started_at: float = 0.0
    attempt: int = 0
    """How many trainers before it, one after the other, ended here while they waited."""
    placement: Placement | None = None

    ending: str = ""
    """Why workerd has told it to end; empty while it may live."""
    kill_at: float | None = None
    """When it is killed if it hasn't ended; None once it has been."""
    killed_at: float | None = None
    """When it was sent SIGKILL first."""
    ended_at: float | None = None
    exit: TrainerExit | None = None
    cleared: bool = False
    """It and all that it had started are gone: its device is free."""

    connected: bool = False
    unlinked_at: float | None = None
    welcomed: bool = False
    stop_sent: int = 0
    restore_sent: int = 0
    running_sent: int = 0
    hold_sent: int = 0
    released_at: float | None = None

    ready: bool = False
    stopped: Stopped | None = None
    restored: int = 0
    pull: Pull | None = None
    joined: int = 0
    committed: int = 0
    held: int = 0
    broken_generation: int = 0
    broken: str = ""
    done_step: int | None = None
    digest: str = ""

    step: int = -1
    """Of its progress page, as ``phase``."""
    phase: StepPhase = StepPhase.EMPTY
    moved_at: float = 0.0
    """When anything in its page has changed last; 0 before it is known."""
    waiting: int = 0
    """Collectives that it has entered and that have not ended."""
    excused_until: float = 0.0
    """Until when its script has said that it takes longer."""
    stacks_asked_at: float = 0.0
    """When its stacks were asked for last; 0 when never."""
    stacks: str | None = None
    """What came of that; None while it is awaited."""

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self.ended_at is None


@dataclass(frozen=True, slots=True)
class Written:
    """A progress record that is in etcd. ``marks`` is what made it urgent, or would have."""

    job: str
    progress: Progress
    marks: tuple[object, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Local:
    """This machine, as of ``now`` (monotonic seconds)."""

    now: float
    template: Node
    """The node record without what changes: trainers, warm, unhealthy."""
    trainers: tuple[TrainerFacts, ...] = ()
    registered: bool = False
    """The node key is there, under this incarnation's lease."""
    overdue_since: float | None = None
    """Since when etcd may have given up this node's lease; None while it is surely held."""
    stopping: str = ""
    """Why this workerd is to end; empty while it isn't."""
    node_written: Node | None = None
    written: Written | None = None
    """The progress record; None while there is none."""
    acked: tuple[str, int] | None = None
    """(job, generation) of the ack that this incarnation has written last."""
    ack_held: bool = False
    """Whether that ack is still in etcd: it goes with the lease."""
    busy: frozenset[str] = frozenset()
    """Kinds of writes that are under way: they are not asked for again."""
    steps_per_second: float = 0.0
    step_seconds: float = 0.0
    """What a step has usually taken; 0 while that is not known."""

    @property
    def node(self) -> str:
        """This node's id."""
        return self.template.node

    @property
    def incarnation(self) -> str:
        """This workerd's incarnation."""
        return self.template.incarnation

    @property
    def devices(self) -> tuple[Device, ...]:
        """One trainer runs on each."""
        return self.template.devices


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    end_grace: float = 5.0
    """Between SIGTERM and SIGKILL."""
    release_grace: float = 60.0
    """How long a released trainer may take to leave: it may still write its model."""
    link_grace: float = 30.0
    """How long a trainer may live without a link. One that has raised takes seconds to leave on a
    busy machine: its interpreter frees everything that torch has made."""
    progress_interval: float = 1.0
    """Between two progress records without an urgent reason."""
    progress_rate: float = 200.0
    """Such records a second of all nodes of one job; with more nodes the interval grows."""
    retry: float = 1.0
    """Before a spare's trainer that ended is started again; doubled each time."""
    retry_max: float = 60.0
    still: float = 10.0
    """A rank that nothing has changed of for this long, and for three usual steps, stands still."""
    unkillable: float = 30.0
    """A trainer of which anything is left so long after SIGKILL, or its end, stays."""
    self_fence: float = 300.0
    """How long a node that etcd may have given up keeps trainers whose group is broken. They
    can't go on by themselves; until then a short outage of etcd costs no state."""


__all__ = [
    "JobOrders",
    "JobSpec",
    "Limits",
    "Local",
    "Orders",
    "Placement",
    "Stopped",
    "TrainerFacts",
    "Written",
]
