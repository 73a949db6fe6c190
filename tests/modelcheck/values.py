# SPDX-License-Identifier: Apache-2.0
"""The parts of a state. Each is an immutable value with a number; a state is a tuple of numbers.

Most moves change one part, and the same parts come together again and again: what follows for a
part is worked out once, by the production functions, and looked up from then on.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from coordinator.controller.transactions import Transaction
from coordinator.model import (
    Ack,
    Assignment,
    Generation,
    Incident,
    Job,
    JobSpec,
    JobStatus,
    Node,
    NodeFlags,
    Progress,
    Slot,
    Source,
    SpareAssignment,
)
from workerd.agent.actions import Action as NodeAction
from workerd.agent.state import Local, Orders
from workerd.protocol.phases import Standing

JOB = "job"
Lineage = tuple[str, ...]
"""Where a state comes from: how it began, then for each step the generation whose gradients went
into it."""

T = TypeVar("T", bound=Hashable)


class Violation(AssertionError):
    """An invariant of the protocol doesn't hold."""


@dataclass(frozen=True)
class Shape:
    """How large a job is, and how much happens to it."""

    replicas: int = 3
    positions: int = 1
    ranks_per_node: int = 1
    spares: int = 1
    steps: int = 1
    fewest: int = 0
    """With how many replicas it goes on; 0: with all."""
    faults: tuple[tuple[str, ...], ...] = ()
    """For each fault, of which kinds it may be."""
    from_start: bool = False
    """Begin where the job is submitted; otherwise where it runs and a spare is hot."""

    @property
    def spec(self) -> JobSpec:
        """As the operator submits it."""
        return JobSpec(
            name=JOB,
            command=("train",),
            replicas=self.replicas,
            shard_positions=self.positions,
            ranks_per_node=self.ranks_per_node,
            spares=self.spares,
            restarts=3,
            min_replicas=self.fewest,
        )

    @property
    def nodes(self) -> int:
        """Of owners and spares."""
        return self.spec.slots + self.spares


class Process(NamedTuple):
    """One trainer process: what it is besides what workerd knows of it."""

    instance: str
    standing: Standing = Standing()
    rank: int = -1
    lineage: Lineage = ()
    sources: tuple[Source, ...] = ()
    pull: tuple[str, Lineage] | None = None
    """The instance that it pulls from, and that one's lineage when the pull began."""
    arrived: int = 0
    """The newest generation at whose barrier it has been."""
    broken: int = 0
    """The newest generation whose group it has seen break."""
    reserve: bool = False
    """The RESTORE that it follows has its replica absent: it serves, and doesn't join."""
    wish: int = 0
    """The generation whose ranks it is to ask for a stop after their step."""
    hung: bool = False


class Machine(NamedTuple):
    """A machine, its workerd and its trainers."""

    local: Local
    up: bool = True
    cut: bool = False
    """Cut off from etcd; its peers and the leader's probe reach it."""
    mute: bool = False
    """Its workerd stands still, but its lease lives on."""
    lease: int = 0
    """Its own, as it knows it."""
    lives: int = 1
    """How many incarnations and trainer instances it has drawn, and one."""
    orders: Orders | None = None
    processes: tuple[Process, ...] = ()
    slow: str = ""
    """The kind of write of which the next one is held up."""
    outbox: tuple[NodeAction, ...] = ()
    """Writes that are held up."""

    @property
    def connected(self) -> bool:
        """Whether it can talk to etcd now."""
        return self.up and not self.cut and not self.mute


class Key(NamedTuple):
    """What etcd holds under a node's lease."""

    lease: int
    record: Node
    ack: Ack | None = None
    progress: Progress | None = None


class Control(NamedTuple):
    """What etcd holds that only leaders write. By slot, and by node."""

    leader: int
    job: Job
    generation: Generation | None
    slots: tuple[Slot | None, ...]
    assignments: tuple[Assignment | None, ...]
    spares: tuple[SpareAssignment | None, ...]
    flags: tuple[NodeFlags | None, ...]
    incident: Incident | None
    status: JobStatus | None


class Arrival(NamedTuple):
    """Who has come to a generation's barrier."""

    instance: str
    step: int
    lineage: Lineage


class Group(NamedTuple):
    """The process group of a generation: what its ranks have sent to each other outlives them."""

    number: int
    members: tuple[int, ...]
    """The ranks of the replicas that the generation has."""
    arrived: tuple[Arrival | None, ...]
    levels: tuple[int, ...]
    """How many collectives each rank has entered, three a step; -1 before it has joined."""
    broken: bool = False
    wish: int = -1
    """The step after which a rank has asked for a stop."""

    @property
    def whole(self) -> bool:
        """Whether everybody has come to the barrier."""
        return all(self.arrived[rank] is not None for rank in self.members)


class Pending(NamedTuple):
    """What a leader has decided and not yet written."""

    what: str
    transactions: tuple[Transaction, ...]
    deposed: bool


class Rest(NamedTuple):
    """Everything else."""

    budget: tuple[tuple[str, ...], ...]
    """Of which kinds the faults may be that are still to come."""
    highest: int
    """The highest step that a rank has come to."""
    pending: Pending | None = None


class Table(Generic[T]):
    """Numbers for values."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """The value's number; equal values have the same one."""
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found

    def __getitem__(self, number: int) -> T:
        return self.values[number]


def present(spec: JobSpec, generation: Generation) -> tuple[int, ...]:
    """The ranks of the replicas that a generation has."""
    gone = generation.absent_replicas
    return tuple(rank for rank in range(spec.ranks) if spec.replica(rank) not in gone)
