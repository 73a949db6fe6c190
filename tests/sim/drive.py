# SPDX-License-Identifier: Apache-2.0
"""Runs the simulation: which of the possible moves comes next."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from coordinator.model import JobSpec, Phase
from coordinator.store import Created, Put
from tests.sim import faults, invariants, leaders, nodes, operators
from tests.sim.trainers import Move
from tests.sim.world import JOB, LATE, Leader, SimNode, Violation, World

MOVES = 4000
"""More than any run needs: one that takes them all has no end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a simulated job is."""

    replicas: int = 3
    positions: int = 1
    ranks_per_node: int = 1
    spares: int = 1
    steps: int = 2
    restarts: int = 3
    fewest: int = 0

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
            restarts=self.restarts,
            min_replicas=self.fewest,
        )


def begin(shape: Shape) -> World:
    """A job is submitted to a cluster whose nodes are just starting."""
    spec = shape.spec
    names = [f"n{number}" for number in range(spec.slots + shape.spares)]
    world = World(
        spec=spec,
        total=shape.steps,
        nodes={name: SimNode(nodes.fresh(name, 0, shape.ranks_per_node)) for name in names},
    )
    etcd = world.etcd.commit([], [Put("election/c1", b"{}")])
    assert etcd is not None
    leader = Leader(1, Created("election/c1", etcd.revision))
    return leaders.submit(replace(world, etcd=etcd, leader=leader))


def moves(world: World) -> list[Move]:
    """Everything that can happen without a fault."""
    found = list(leaders.moves(world))
    for name in world.nodes:
        found.extend(nodes.moves(world, name))
    found.extend(faults.expiries(world))
    return found


def step(world: World, move: Move, trace: list[str]) -> World:
    """Make a move. Raises Violation, with the trace."""
    trace.append(move[0])
    try:
        return move[1]()
    except Violation as error:
        raise Violation(f"{error}\n  " + "\n  ".join(trace)) from error


@lru_cache(maxsize=64)
def running(shape: Shape, seed: int = 0) -> World:
    """A world in which the job runs and a spare is hot."""
    world, chance = begin(shape), Chance(str(seed))
    trace: list[str] = []
    for _ in range(MOVES):
        hot = shape.spares == 0 or any(
            node.local.node_written is not None and node.local.node_written.warm
            for node in world.nodes.values()
        )
        if hot and nodes.phase_of(world) is Phase.RUNNING:
            return world
        # the steps can wait until there is a spare
        possible = [one for one in moves(world) if "UPDATING" not in one[0] or hot]
        world = step(world, chance.choose(possible), trace)
    raise AssertionError("the job never ran")


class Chance:
    """Draws moves. Who is slow changes every now and then, so that what is rare in an even race
    happens too; a deposed leader's writes are always slow."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._pace: dict[str, float] = {}
        self._until = 0

    def choose(self, possible: list[Move]) -> Move:
        """The next move."""
        self._until -= 1
        if self._until < 0:
            self._until = self.random.randrange(10, 60)
            self._pace = {"a": self.random.choice((0.1, 0.01))}
        weights = []
        for label, _ in possible:
            who = label.partition(" ")[0]
            if who not in self._pace:
                self._pace[who] = self.random.choice((1.0, 1.0, 1.0, 0.1, 0.01))
            weights.append(self._pace[who])
        return self.random.choices(possible, weights)[0]


def settle(world: World, chance: Chance, trace: list[str]) -> tuple[World, str]:
    """Let everything happen that can; when nothing can, deadlines pass. Returns the end."""
    for _ in range(MOVES):
        possible = moves(world)
        if possible:
            world = step(world, chance.choose(possible), trace)
            continue
        later = step(world, ("every deadline passes", lambda: _late(world)), trace)  # noqa: B023
        if later.leader.pending is None:
            try:
                return world, invariants.at_end(world)
            except Violation as error:
                raise Violation(f"{error}\n  " + "\n  ".join(trace)) from error
        world = later
    raise Violation("there is no end to it\n  " + "\n  ".join(trace[-200:]))


def _late(world: World) -> World:
    return leaders.decide(world, LATE)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which faults a run has."""

    kinds: tuple[str, ...]
    mend: bool = True
    from_start: bool = False


def run(shape: Shape, plan: Plan, seed: int) -> tuple[World, str]:
    """One run: the faults come at random moments, then the end. Raises Violation."""
    chance = Chance(f"{shape} {plan} {seed}")
    world = begin(shape) if plan.from_start else running(shape, seed % 7)
    trace: list[str] = []
    dice = chance.random
    waiting = sorted(((dice.randrange(120), kind) for kind in plan.kinds), reverse=True)
    for moment in range(160):
        while waiting and waiting[-1][0] <= moment:
            kind = waiting[-1][1]
            possible = list((faults.ALL.get(kind) or operators.ALL[kind])(world))
            if not possible:
                break  # it comes as soon as it can
            waiting.pop()
            world = _fault(world, dice.choice(possible), trace)
        mending = list(_mends(world)) if plan.mend and dice.random() < 0.02 else []
        possible = moves(world)
        if mending:
            world = step(world, dice.choice(mending), trace)
        elif possible:
            world = step(world, chance.choose(possible), trace)
        else:
            break
    if plan.mend:
        while mending := list(_mends(world)):
            world = step(world, mending[0], trace)
    world = operators.resumed(world)
    return settle(world, chance, trace)


def _mends(world: World) -> Iterator[Move]:
    yield from faults.mends(world)
    yield from operators.undone(world)


def _fault(world: World, move: Move, trace: list[str]) -> World:
    after = step(world, move, trace)
    known = (*world.history.faults, move[0])
    return replace(after, history=replace(after.history, faults=known))


def ends(runs: Iterable[tuple[World, str]]) -> dict[str, int]:
    """How often runs came to which end."""
    counted: dict[str, int] = {}
    for _, end in runs:
        name = end.partition(":")[0]
        counted[name] = counted.get(name, 0) + 1
    return counted
