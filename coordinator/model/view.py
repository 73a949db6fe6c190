# SPDX-License-Identifier: Apache-2.0
"""The whole of what a decision sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.model.incident import Incident
from coordinator.model.job import Job, JobStatus
from coordinator.model.membership import Ack, Generation, Progress, Slot
from coordinator.model.node import Assignment, Node, NodeFlags, SpareAssignment


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A node whose lease lives."""

    record: Node
    lease: int = 0
    create_revision: int = 0


class Verdict(IntEnum):
    """What a direct probe of a suspected incarnation said."""

    UNKNOWN = 0
    """No answer yet."""
    ALIVE = 1
    """It answered with this incarnation."""
    DEAD = 2
    """Refused, reset, no answer from a workerd whose kernel accepts, or another incarnation."""
    SILENT = 3
    """Nothing answers there at all, or the leader can't even try."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """An incarnation whose lease is gone: it is dead once a probe says so too."""

    node: str
    incarnation: str
    control_address: str = ""
    verdict: Verdict = Verdict.UNKNOWN
    detail: str = ""


class Answer(IntEnum):
    """What another node said when it was asked to reach one that doesn't answer the leader."""

    NONE = 0
    """It could not be asked, or said nothing in time."""
    ACCEPTED = 1
    """A kernel accepts connections there."""
    REFUSED = 2
    """A kernel answers there, and nobody listens."""
    SILENT = 3
    """Nothing answers there."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One witness' word."""

    witness: str
    answer: Answer
    detail: str = ""


class Line(IntEnum):
    """How the leader's own connection to a node stands."""

    ANSWERS = 0
    """Pings come back, and the incarnation is the one that is meant."""
    LOST = 1
    """A ping has not come back, or the connection has ended: a new one is being tried."""
    REFUSED = 2
    """Nobody listens there any more: the machine's kernel itself says so."""
    REPLACED = 3
    """Another incarnation answers there."""
    FROZEN = 4
    """The kernel accepts connections, workerd says nothing."""
    SILENT = 5
    """Nothing answers."""
    UNKNOWN = 6
    """The leader itself has no way to try."""


@dataclass(frozen=True, slots=True)
class Contact:
    """How an incarnation with a place answers. The times are the leader's monotonic seconds.

    There is none before it has answered this leader once: an address that never did may be wrong.
    """

    node: str
    incarnation: str
    addresses: tuple[str, ...] = ()
    """host:port, on the control network first."""
    line: Line = Line.ANSWERS
    detail: str = ""
    since: float = 0.0
    """When it answered no more."""
    tried: float = 0.0
    """When the latest try to reach it began; ``said`` are the witnesses of that try."""
    said: tuple[Statement, ...] = ()
    wrote: float = float("-inf")
    """When something that it has written itself was last seen in etcd, while it didn't answer."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job. The ``*_at`` are this leader's monotonic seconds."""

    job: Job
    status: JobStatus | None = None
    generation: Generation | None = None
    slots: Mapping[int, Slot] = field(default_factory=dict)
    acks: Mapping[str, Ack] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    incident: Incident | None = None
    phase_at: float = 0.0
    """When this leader first saw the generation in its phase."""
    progress_at: float = 0.0
    """When a rank's progress last moved in this phase."""
    broken_at: float | None = None
    """When a rank first reported the group of this generation broken."""
    status_at: float = float("-inf")
    """When the status was last written."""
    created: int = 0
    """etcd's revision of its submission."""

    @property
    def current(self) -> Generation:
        """The generation record.

        Raises LookupError for a job that has none yet: who asks must know that it has.
        """
        if self.generation is None:
            raise LookupError(f"job {self.job.spec.name} has no generation yet")
        return self.generation


_NO_FLAGS = NodeFlags()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that the leader knows, at one revision of etcd."""

    nodes: Mapping[str, LiveNode] = field(default_factory=dict)
    flags: Mapping[str, NodeFlags] = field(default_factory=dict)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    spares: Mapping[str, SpareAssignment] = field(default_factory=dict)
    jobs: Mapping[str, JobView] = field(default_factory=dict)
    suspects: Mapping[tuple[str, str], Suspect] = field(default_factory=dict)
    """By (node, incarnation)."""
    contacts: Mapping[tuple[str, str], Contact] = field(default_factory=dict)
    """By (node, incarnation): with those declared dead in the last ``lease_ttl`` seconds."""
    doubted_at: float = float("-inf")
    """Monotonic: when so many didn't answer that the leader doubted itself. The silence that it has
    found until then counts no more."""
    no_eviction_before: float = float("-inf")
    """Monotonic: after an outage of etcd nobody is declared dead before this."""

    def flags_of(self, node: str) -> NodeFlags:
        """The node's flags, none set when it has no record."""
        return self.flags.get(node, _NO_FLAGS)

    def alive(self, node: str, incarnation: str) -> bool:
        """Whether this incarnation's lease lives and it has not been declared dead."""
        live = self.nodes.get(node)
        return (
            live is not None
            and live.record.incarnation == incarnation
            and not self.flags_of(node).is_dead(incarnation)
        )
