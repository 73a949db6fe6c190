# SPDX-License-Identifier: Apache-2.0
"""A whole simulated cluster: etcd, coordinators, nodes, one job."""

from __future__ import annotations

import random
from collections.abc import Callable

from coordinator.controller.records import dump
from coordinator.model import Job, JobSpec, JobState, JobStatus, Phase, Settings
from coordinator.store import KeyKind, Put, keys
from tests.simulator.checks import Checks
from tests.simulator.clock import Clock
from tests.simulator.coordinator import SimCoordinator
from tests.simulator.etcd import FakeEtcd
from tests.simulator.group import Group, Violation
from tests.simulator.node import SimNode
from tests.simulator.prober import SimProber
from tests.simulator.store import FakeStore
from tests.simulator.times import Times
from tests.simulator.trainer import SimTrainer
from workerd.protocol import phases

PREFIX = "/sim/"
POSITIONS = 16
"""Nodes in one replica: 128 GPUs, as a model of 405 billion parameters takes them."""
_QUIET = 60.0  # seconds after the last event in which deadlines are still looked at often
_HISTORY = 300.0  # seconds between two compactions
_PROGRESS = 240.0  # seconds between two progress records that only say that it goes on


def spec_for(nodes: int) -> JobSpec:
    """A job that takes almost all nodes: one trainer stands for the eight devices of a node."""
    spares = max(2, nodes // 128)
    positions = POSITIONS if nodes >= 8 * POSITIONS else max(1, nodes // 16)
    replicas = (nodes - spares) // positions
    return JobSpec(
        name="job",
        command=("train",),
        replicas=replicas,
        shard_positions=positions,
        spares=spares,
        min_replicas=(replicas + 1) // 2,
        restarts=1_000_000,
    )


class Cluster:
    """Everything lives on its clock; ``seed`` decides all that chance does."""

    def __init__(
        self,
        nodes: int,
        seed: int,
        *,
        times: Times | None = None,
        settings: Settings | None = None,
        spec: JobSpec | None = None,
    ) -> None:
        self.seed = seed
        self.prefix = PREFIX
        self.times = times or Times()
        self.settings = settings or Settings()
        self.spec = spec or spec_for(nodes)
        self.dice = random.Random(f"cluster {seed}")
        self.clock = Clock()
        self.etcd = FakeEtcd(self.clock, seed, quiet=True)
        self.probes = 0
        self.probers: list[SimProber] = []
        self.rolled_forward = 0
        """Updates that ranks have applied because another one had."""
        self.groups: dict[int, Group] = {}
        self.nodes: dict[str, SimNode] = {}
        self._instances = 0
        self._eventful_at = self.clock.now()
        self.checks = Checks(self)
        self.admin = FakeStore(self.etcd, prefix=PREFIX)
        self.admin.commit(
            [], [Put(keys.job_spec(self.spec.name), dump(Job(spec=self.spec, spec_revision=1)))]
        )
        for number in range(nodes):
            name = f"n{number:05}"
            self.nodes[name] = SimNode(self, name)
        self.coordinators = [SimCoordinator(self, f"c{number}") for number in range(3)]
        self._every(_HISTORY, self._compact)
        self._every(_PROGRESS, self._progress)

    def _every(self, seconds: float, run: Callable[[], None]) -> None:
        def due() -> None:
            run()
            self._every(seconds, run)

        self.clock.after(seconds, due)

    def _compact(self) -> None:
        if self.etcd.up and self.etcd.revision - 100 > self.etcd.compacted:
            self.etcd.compact(self.etcd.revision - 100)

    def _progress(self) -> None:
        """One node at a time says that it goes on, instead of all, once a second each."""
        names = list(self.nodes)
        self.nodes[self.dice.choice(names)].wake()
        owners = self.checks.generation.rendezvous_slots if self.checks.generation else ()
        for number in owners[:1]:
            owner = self.checks.owner(number)
            if owner in self.nodes:
                self.nodes[owner].wake()

    # ---- who is where

    def draw_instance(self, node: str) -> str:
        """A trainer's id."""
        self._instances += 1
        return f"{node}-t{self._instances}"

    def trainer(self, node: str, instance: str) -> SimTrainer | None:
        """A living trainer."""
        there = self.nodes.get(node)
        return there.trainers.get(instance) if there is not None and there.up else None

    @property
    def leader(self) -> SimCoordinator | None:
        """Who leads."""
        return next((one for one in self.coordinators if one.leads), None)

    def happened(self, node: SimNode) -> None:
        """Something has happened to a node."""
        for one in self.probers:
            one.happened(node.name)

    # ---- groups

    def arrive(self, generation: int, trainer: SimTrainer) -> None:
        """A trainer has come to a generation's barrier."""
        group = self.groups.get(generation)
        if group is None:
            seconds = self.times.step * self.spec.ranks / trainer.ranks
            group = self.groups[generation] = Group(generation, trainer.ranks, self.times, seconds)
            for old in [one for one in self.groups if one < generation - 4]:
                del self.groups[old]
        if group.arrive(trainer.rank, trainer):
            self.clock.after(self.times.join, lambda: self._build(group))

    def _build(self, group: Group) -> None:
        members = group.members.values()
        there = all(
            one.lives and not one.hung and one.standing.stopped == group.generation
            for one in members
        )
        if not there or group.step >= 0:
            return
        group.begin(self.clock.now())
        for one in members:
            if not one.join(group):
                raise Violation(f"rank {one.rank} is not in the group that it has built")
        self.checks.all_joined(group.generation)
        self.clock.at(group.updated_at(group.step + 1), lambda: self._first_step(group))

    def _first_step(self, group: Group) -> None:
        if group.stalled < self.clock.now():
            return
        for one in group.members.values():
            if one.lives and not one.hung:
                one.advance()
                one.node.hear(one.instance, committed=group.generation)
        self.checks.first_step(group.generation, self.clock.now())

    def hold(self, group: Group) -> None:
        """A rank has been told that all are to stop after the step under way."""
        if group.hold(self.clock.now()):
            self.clock.at(group.updated_at(group.last), lambda: self._boundary(group))

    def _boundary(self, group: Group) -> None:
        for one in group.members.values():
            if one.lives and not one.hung:
                one.advance()
                if phases.at_boundary(one.standing):
                    held = group.generation
                    one.node.hear(one.instance, committed=held, held=held)

    def break_group(self, group: Group, gone: SimTrainer) -> None:
        """A process has ended: those that it talks to see it, unless they are stopped before."""
        if group.step < 0:
            return
        size = self.spec.ranks
        for rank in {(gone.rank + step) % size for step in (-1, 1)}:
            peer = group.members.get(rank)
            if peer is not None and peer is not gone:
                wait = self.dice.uniform(0.02, self.times.notice)
                self.clock.after(wait, lambda peer=peer: self._notice(group, peer))  # type: ignore[misc]

    def _notice(self, group: Group, peer: SimTrainer) -> None:
        standing = peer.standing
        if not peer.lives or peer.hung or standing.stopped > group.generation:
            return
        if standing.joined == group.generation:
            peer.node.hear(
                peer.instance, broken_generation=group.generation, broken="a peer is gone"
            )

    # ---- how it stands

    def eventful(self) -> None:
        """Something happens: deadlines matter again."""
        self._eventful_at = self.clock.now()
        for one in getattr(self, "coordinators", ()):
            one.look()

    @property
    def calm(self) -> bool:
        """Whether nothing has happened for a while, and the job runs."""
        generation = self.checks.generation
        return (
            self.etcd.up
            and generation is not None
            and generation.phase is Phase.RUNNING
            and self.clock.now() - self._eventful_at > _QUIET
        )

    @property
    def running(self) -> bool:
        """Whether the job runs and makes steps."""
        generation = self.checks.generation
        if generation is None or generation.phase is not Phase.RUNNING:
            return False
        group = self.groups.get(generation.generation)
        return group is not None and self.clock.now() < group.stalled

    def status(self) -> JobStatus:
        """What the coordinator says of the job."""
        from coordinator.controller.records import load

        found = self.etcd.items.get(self.prefix + keys.job_status(self.spec.name))
        if found is None:
            return JobStatus(JobState.STATE_UNSPECIFIED)
        status: JobStatus = load(KeyKind.JOB_STATUS, found)
        return status

    def run_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until something holds, but at most so long; whether it does."""
        limit = self.clock.now() + seconds
        while not done():
            if not self.clock.step(limit):
                self.clock.run_until(limit)
                return done()
        return True
