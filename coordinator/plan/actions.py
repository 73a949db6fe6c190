# SPDX-License-Identifier: Apache-2.0
"""What the planner can ask for. Every action carries its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.model import Assignment, Generation, Incident, JobStatus, Slot


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a suspected incarnation directly, now, whether it lives."""

    node: str
    incarnation: str
    control_address: str
    reason: str


@dataclass(frozen=True, slots=True)
class AskWitnesses:
    """Have other nodes try to reach one that doesn't answer, once for each try of the leader's."""

    node: str
    incarnation: str
    tried: float
    addresses: tuple[str, ...]
    witnesses: tuple[tuple[str, str], ...]
    """Nodes and their incarnations."""
    reason: str


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Give no verdict on an incarnation that doesn't answer: its lease decides. For people."""

    node: str
    incarnation: str
    reason: str
    over_budget: bool


@dataclass(frozen=True, slots=True)
class DeclareDead:
    """Record an incarnation dead, for ever; then revoke its lease, which only cleans up."""

    node: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Transition:
    """Write a generation record and all that belongs to it, guarded by the one that was seen.

    ``assign`` is created with its slots, guarded by the absence of an assignment of that node.
    Marks of ``incident`` without a time get the time of the write.
    """

    generation: Generation
    reason: str
    slots: tuple[Slot, ...] = ()
    assign: tuple[Assignment, ...] = ()
    unassign: tuple[str, ...] = ()
    incident: Incident | None = None
    status: JobStatus | None = None


@dataclass(frozen=True, slots=True)
class Unassign:
    """Take a node's assignment away: its job has ended there."""

    node: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class SettleFlags:
    """A node has been replaced: it is not to be any more."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class KeepWarm:
    """Tell a node without a slot which job to be warm for; no job: none."""

    node: str
    job: str
    spec_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateStatus:
    """Write a job's status."""

    job: str
    status: JobStatus
    reason: str


@dataclass(frozen=True, slots=True)
class UpdateIncident:
    """Write an incident; marks without a time get the time of the write."""

    incident: Incident
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done for a job now; the reason says what it waits for.

    ``blocked``: it can't go on by itself, its status is WAITING.
    """

    job: str
    reason: str
    blocked: bool = False


Action: TypeAlias = (
    Probe
    | AskWitnesses
    | HoldBack
    | DeclareDead
    | Transition
    | Unassign
    | SettleFlags
    | KeepWarm
    | UpdateStatus
    | UpdateIncident
    | Wait
)
