# SPDX-License-Identifier: Apache-2.0
"""The process groups of the generations: who takes part, how far they are, who can go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.modelcheck.planner import CONTROL, NETWORK, NODES, Planner, State
from tests.modelcheck.values import Group, Machine, Process, Shape, Table
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do, Standing


class Part(NamedTuple):
    """What a trainer may still do in the group of a generation."""

    number: int
    rank: int
    standing: Standing | None
    """None for who is on the way to its barrier, or waits there."""
    waits: bool
    """Whether it is in the group, or at its barrier."""


class Groups(Planner):
    """What the ranks of a job are to each other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        spec = self.spec
        ranks = range(spec.ranks)
        self.dp = [
            [one for one in ranks if spec.shard_position(one) == spec.shard_position(rank)]
            for rank in ranks
        ]
        self.replica = [
            [one for one in ranks if spec.replica(one) == spec.replica(rank)] for rank in ranks
        ]
        self.alone = self.networks.number(())
        self._active: dict[int, tuple[tuple[int, str], ...]] = {}
        self._parts: dict[int, int] = {}
        self._all_parts: Table[tuple[Part, ...]] = Table()
        self._all_parts.number(())
        self._generations: dict[int, int] = {}
        self._cleared: dict[tuple[int, ...], int] = {}

    def group(self, network: int, number: int) -> Group | None:
        """The group of a generation."""
        for group in self.networks[network]:
            if group.number == number:
                return group
        return None

    def entered(self, group: Group, ranks: list[int], level: int) -> bool:
        """Whether all of these ranks have entered that many collectives."""
        return all(group.levels[rank] >= level for rank in ranks if rank in group.members)

    def all_at(self, group: Group, ranks: list[int], level: int) -> bool:
        """Whether all of these ranks have come so far that their gradients can be reduced."""
        return all(group.levels[rank] >= level for rank in ranks if rank in group.members)

    def active(self, own: int) -> tuple[tuple[int, str], ...]:
        """(generation, instance) of the trainers of a machine that keep a group's connections."""
        found = self._active.get(own)
        if found is None:
            active = []
            for process in self.machines[own].processes:
                number = _in_group(process)
                if number and process.broken < number:
                    active.append((number, process.instance))
            found = self._active[own] = tuple(active)
        return found

    def forget(self, new: list[int]) -> None:
        """Groups in which nobody can do anything any more."""
        machines = new[NODES : NODES + self.count]
        now = self.generation(new[CONTROL])
        played = self._parts
        key = (new[NETWORK], now, *[played.get(one) or self._played(one) for one in machines])
        found = self._cleared.get(key)
        if found is None:
            parts = [part for own in machines for part in self._all_parts[played[own]]]
            kept = tuple(
                group
                for group in self.networks[new[NETWORK]]
                if any(group.number == part.number and part.waits for part in parts)
                and (group.number >= now or self.still(group, parts))
            )
            found = self._cleared[key] = self.networks.number(kept)
        new[NETWORK] = found

    def _played(self, own: int) -> int:
        """A number for what the trainers of a machine may still do in groups."""
        found = self._parts.get(own)
        if found is None:
            parts = tuple(_parts(self.machines[own]))
            found = self._parts[own] = self._all_parts.number(parts)
        return found

    def still(self, group: Group, parts: list[Part]) -> bool:
        """Whether somebody can take a step in a group, or come into it.

        If nobody can, nobody ever will: ranks enter collectives by their own steps alone.
        """
        for part in parts:
            if part.number != group.number:
                continue
            standing, rank = part.standing, part.rank
            if standing is None:
                return True
            if standing.phase is StepPhase.COMPUTING:
                if not group.broken and self.all_at(group, self.dp[rank], 3 * standing.step):
                    return True
            elif standing.phase is StepPhase.PREPARED:
                along, agreed = self.agreement(group, rank, standing.step)
                if along or phases.may_update(standing, agreed).do is Do.GO:
                    return True
        return False

    def agreement(self, group: Group, rank: int, step: int) -> tuple[bool, bool]:
        """Whether it comes to an end for a rank now: along its replica, along its DP group."""
        mine, replica = group.levels[rank], self.replica[rank]
        if group.broken:
            return False, False
        if len(replica) > 1 and mine == 3 * step + 1:
            return self.entered(group, replica, mine), False
        return False, self.entered(group, self.dp[rank], mine)

    def generation(self, control: int) -> int:
        """The number of the record, 0 where there is none yet."""
        found = self._generations.get(control)
        if found is None:
            record = self.controls[control].generation
            found = self._generations[control] = 0 if record is None else record.generation
        return found

    def broken(self, state: State, me: Process, number: int) -> bool:
        """Whether a rank can see that a group has broken, and somebody has to say so."""
        generation = self.controls[state[CONTROL]].generation
        if generation is None or generation.generation != number:
            return False
        for key in state[NODES + self.count :]:
            held = self.keys[key]
            if held is not None and held.progress is not None:
                for one in held.progress.ranks:
                    if one.broken_generation == number:
                        return False
        group = self.group(state[NETWORK], number)
        if group is None:
            return False
        if group.broken:
            return True
        there = {one for own in state[NODES : NODES + self.count] for one in self.active(own)}
        return any(one is not None and (number, one.instance) not in there for one in group.arrived)


def may_update(process: Process) -> bool:
    """Whether a rank could begin to update by the agreement of its group."""
    standing = process.standing
    if standing.phase is not StepPhase.PREPARED or 0 < standing.resume_step == standing.step + 1:
        return False
    return phases.may_update(standing, agreed=True).do is Do.GO


def _parts(there: Machine) -> Iterator[Part]:
    for process in there.processes:
        standing = process.standing
        if process.hung:
            continue
        number = _in_group(process)
        if number and number == standing.joined:
            idle = phases.at_boundary(standing)
            yield Part(number, process.rank, standing if not idle else Standing(), True)
        elif standing.stopped > standing.joined and not process.reserve:
            yield Part(standing.stopped, -1, None, number == standing.stopped)


def _in_group(process: Process) -> int:
    """The generation in whose group a process is, or waits for the others; 0 for none."""
    standing = process.standing
    if standing.stopped <= standing.joined or may_update(process):
        return standing.joined
    waits = process.arrived == standing.stopped and not process.reserve
    return standing.stopped if waits else 0
