# SPDX-License-Identifier: Apache-2.0
"""The state of a simulated cluster: immutable values all the way down.

The leader's decisions are the production planner's and its writes the production transactions;
a node's are those of ``workerd.agent.decide``, a trainer's those of ``workerd.protocol.phases``.
What is simulated is what lies between: etcd, links, collectives, clocks, and faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.model import ClusterView, JobSpec, Settings, Source, Verdict
from coordinator.plan import Action
from coordinator.store import Created
from tests.sim.etcd import Etcd
from workerd.agent.actions import Action as NodeAction
from workerd.agent.state import Limits, Local, Orders
from workerd.protocol.phases import Standing

JOB = "job"

SETTINGS = Settings(
    pause=1000,
    start=1000,
    restore=1000,
    progress=1000,
    regroup=1,
    regroup_max=10,
    restart=1,
    restart_max=50,
    status=50,
)
"""Of the leader: three times matter, see :class:`Leader`."""
NOW, SETTLED, LATE = 0.0, 100.0, 1e10

LIMITS = Limits(progress_interval=0, retry=0, retry_max=0, self_fence=1e12)
"""Of the nodes, whose clocks stand still: progress is written whenever there is some."""


class Violation(AssertionError):
    """An invariant of the protocol doesn't hold."""


@dataclass(frozen=True, slots=True)
class Process:
    """One trainer process: what it is besides what workerd knows of it."""

    instance: str
    standing: Standing = field(default_factory=Standing)
    rank: int = -1
    inbox: tuple[NodeAction, ...] = ()
    welcomed: bool = False
    spare: bool = False
    lineage: tuple[str, ...] = ()
    """What its state came from: the initial state, then for each step the generation whose
    gradients went into it."""
    prepared_in: int = 0
    broken: int = 0
    """The newest generation whose group it has seen break."""
    sources: tuple[Source, ...] = ()
    pull: tuple[str, tuple[str, ...]] | None = None
    """The instance that it pulls from, and that one's lineage when the pull began."""
    restored: int = 0
    reserve: bool = False
    """The RESTORE that it follows has its replica absent."""
    wish: int = 0
    """The generation whose ranks it is to ask for a stop after their step."""
    hung: bool = False

    @property
    def digest(self) -> str:
        """Of the initial state that the script built: one instance in five has another one."""
        number = int(self.instance.rpartition("t")[2])
        return "seed" if number % 5 else f"odd-{self.instance}"


@dataclass(frozen=True, slots=True)
class SimNode:
    """A machine."""

    local: Local
    up: bool = True
    cut: bool = False
    """Cut off from etcd; its peers and the leader's probe reach it."""
    mute: bool = False
    """Its workerd stands still, but its lease lives on."""
    orders: Orders | None = None
    lease: int = 0
    created: int = 0
    """The create revision of its own node key, as it knows it."""
    outbox: tuple[NodeAction, ...] = ()
    """Writes under way, at most one of a kind."""
    processes: Mapping[str, Process] = field(default_factory=dict)
    idle: bool = False
    """Nothing has changed since decide() last had nothing to do."""
    lives: int = 1
    """How many incarnations and trainer instances it has drawn."""

    @property
    def connected(self) -> bool:
        """Whether it can talk to etcd now."""
        return self.up and not self.cut and not self.mute


@dataclass(frozen=True, slots=True)
class Pending:
    """What a leader has decided and not yet written."""

    view: ClusterView
    actions: tuple[Action, ...]
    guard: Created
    revisions: Mapping[str, int]
    """Of generation and flags keys, as the leader knows them."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads. It sees one of three times: NOW, SETTLED (a broken group has waited long enough),
    LATE (every deadline of the phase has passed)."""

    number: int = 1
    guard: Created = Created("election/c1", 0)
    verdicts: Mapping[tuple[str, str], Verdict] = field(default_factory=dict)
    pending: Pending | None = None
    idle: tuple[Any, float] | None = None
    """At what it had nothing to do, and up to which time."""
    late: tuple[int, int] = (0, 0)
    """The generation and phase whose deadlines have passed: time doesn't go back."""


@dataclass(frozen=True, slots=True)
class Network:
    """What ranks have sent to each other; it outlives them."""

    levels: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (generation, rank): how many collectives it has entered, three a step."""
    arrived: Mapping[int, Mapping[int, tuple[str, int, tuple[str, ...]]]] = field(
        default_factory=dict
    )
    """By generation and rank: instance, step and lineage of who has come to the barrier."""
    members: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By generation that has come to RESTORE: the ranks of its group."""
    broken: frozenset[int] = frozenset()
    wishes: frozenset[tuple[int, int]] = frozenset()
    """By (generation, step): in its agreement a rank has asked for a stop."""


@dataclass(frozen=True, slots=True)
class History:
    """For the invariants alone."""

    prepared: Mapping[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    """By (generation, step): the ranks that were PREPARED."""
    joined: Mapping[int, frozenset[int]] = field(default_factory=dict)
    highest: int = 0
    faults: tuple[str, ...] = ()
    generations: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """Everything."""

    spec: JobSpec
    total: int
    """Steps until the script ends."""
    etcd: Etcd = field(default_factory=Etcd)
    nodes: Mapping[str, SimNode] = field(default_factory=dict)
    leader: Leader = field(default_factory=Leader)
    deposed: tuple[Pending, ...] = ()
    network: Network = field(default_factory=Network)
    history: History = field(default_factory=History)

    def node(self, name: str, **changes: Any) -> World:
        """With something changed on a node."""
        return replace(self, nodes={**self.nodes, name: replace(self.nodes[name], **changes)})


def position(world: World, rank: int) -> int:
    """The shard position of a rank."""
    return world.spec.shard_position(rank)


def peers(world: World, number: int, rank: int, *, replica: bool) -> list[int]:
    """The ranks of a rank's replica, or of its DP group, in a generation."""
    spec = world.spec
    ranks = sorted(world.network.members[number])
    if replica:
        return [one for one in ranks if spec.replica(one) == spec.replica(rank)]
    return [one for one in ranks if spec.shard_position(one) == spec.shard_position(rank)]


def find(world: World, instance: str) -> tuple[str, Process] | None:
    """Where a trainer process lives; None when it doesn't."""
    for name, node in world.nodes.items():
        if node.up and instance in node.processes:
            return name, node.processes[instance]
    return None
