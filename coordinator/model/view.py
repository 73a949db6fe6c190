# SPDX-License-Identifier: Apache-2.0
"""The whole of what a decision sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from coordinator.model.incident import Incident
from coordinator.model.job import Job, JobStatus
from coordinator.model.membership import Ack, Generation, Progress, Slot
from coordinator.model.node import Assignment, Node, NodeFlags, SpareAssignment

_EMPTY: Mapping[Any, Any] = MappingProxyType({})


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
    """Refused, reset, silent past the deadline, or another incarnation answered."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """An incarnation whose lease is gone: it is dead once a probe says so too."""

    node: str
    incarnation: str
    control_address: str = ""
    verdict: Verdict = Verdict.UNKNOWN
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job. The ``*_at`` are this leader's monotonic seconds."""

    job: Job
    status: JobStatus | None = None
    generation: Generation | None = None
    slots: Mapping[int, Slot] = field(default=_EMPTY)
    acks: Mapping[str, Ack] = field(default=_EMPTY)
    progress: Mapping[str, Progress] = field(default=_EMPTY)
    incident: Incident | None = None
    phase_at: float = 0.0
    """When this leader first saw the generation in its phase."""
    progress_at: float = 0.0
    """When a rank's progress last moved in this phase."""
    broken_at: float | None = None
    """When a rank first reported the group of this generation broken."""
    status_at: float = float("-inf")
    """When the status was last written."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that the leader knows, at one revision of etcd."""

    nodes: Mapping[str, LiveNode] = field(default=_EMPTY)
    flags: Mapping[str, NodeFlags] = field(default=_EMPTY)
    assignments: Mapping[str, Assignment] = field(default=_EMPTY)
    spares: Mapping[str, SpareAssignment] = field(default=_EMPTY)
    jobs: Mapping[str, JobView] = field(default=_EMPTY)
    suspects: Mapping[tuple[str, str], Suspect] = field(default=_EMPTY)
    """By (node, incarnation)."""
    no_eviction_before: float = float("-inf")
    """Monotonic: after an outage of etcd nobody is declared dead before this."""

    def flags_of(self, node: str) -> NodeFlags:
        """The node's flags, none set when it has no record."""
        return self.flags.get(node, NodeFlags())

    def alive(self, node: str, incarnation: str) -> bool:
        """Whether this incarnation's lease lives and it has not been declared dead."""
        live = self.nodes.get(node)
        return (
            live is not None
            and live.record.incarnation == incarnation
            and not self.flags_of(node).is_dead(incarnation)
        )
