# SPDX-License-Identifier: Apache-2.0
"""The whole system: what can happen in a state, and what state it leads to.

A state is a tuple of numbers: of the control keys, the groups, the rest, then of each machine,
then of each node's own keys. Everything that follows for parts alone is remembered by them.

Moves that nobody else could tell from their absence are part of the move before:
- a machine at rest has decided and written all that is due, see ``machine``;
- bookkeeping of the leader (status, incident, spares, leftovers) is done;
- a node has read what makes it do nothing;
- a rank joins as soon as everybody has come to the barrier, is done as soon as it may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordinator.model import Job
from tests.modelcheck import invariants, leader, machine
from tests.modelcheck.leader import NOW
from tests.modelcheck.machine import Event, Turn
from tests.modelcheck.planner import CONTROL, NETWORK, NODES, REST, Choice, Planner, State
from tests.modelcheck.symmetry import Symmetry
from tests.modelcheck.trainers import Effect
from tests.modelcheck.values import (
    Arrival,
    Control,
    Group,
    Machine,
    Process,
    Rest,
    Shape,
    Table,
)
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do

Label = tuple[Any, ...]
"""Formatted only when somebody wants to read it."""
Move = tuple[Label, State]


class System(Planner):
    """All rules, and all that is remembered of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        spec = self.spec
        self.orders: Table[Any] = Table()
        if not shape.from_start:  # there the lowest rank's own state is the job's
            self.symmetry = Symmetry(self)
        ranks = range(spec.ranks)
        self.dp = [
            [one for one in ranks if spec.shard_position(one) == spec.shard_position(rank)]
            for rank in ranks
        ]
        self.replica = [
            [one for one in ranks if spec.replica(one) == spec.replica(rank)] for rank in ranks
        ]
        self._turns: dict[tuple[Any, ...], tuple[int, int, tuple[Effect, ...]]] = {}
        self._reads: dict[tuple[int, int, int], tuple[int, int, tuple[Effect, ...], bool]] = {}
        self._orders: dict[tuple[int, int, frozenset[str]], int] = {}
        self._known: dict[int, tuple[bool, int, frozenset[str]]] = {}
        self._effects: dict[tuple[int, Effect], int] = {}
        self._options: dict[int, tuple[Label, ...]] = {}
        self._active: dict[int, tuple[tuple[int, str], ...]] = {}
        self._needed: dict[int, frozenset[int]] = {}
        self._cleared: dict[tuple[int, frozenset[int]], int] = {}
        self.expires: dict[tuple[int, int, int], bool] = {}
        self.may_register: dict[tuple[int, int, int], bool] = {}

    # ---- the beginning

    def submitted(self) -> State:
        """A job is submitted, the nodes have just started."""
        nothing = (None,) * self.count
        slots = (None,) * self.spec.slots
        job = Job(spec=self.spec, spec_revision=1)
        control = Control(1, job, None, slots, nothing, nothing, nothing, None, None)
        rest = Rest(self.shape.faults, 0)
        machines = [
            self.machines.number(Machine(machine.fresh(name, 0, self.spec.ranks_per_node)))
            for name in self.names
        ]
        state = (
            self.controls.number(control),
            self.networks.number(()),
            self.rests.number(rest),
            *machines,
            *[self.keys.number(None)] * self.count,
        )
        for number in range(self.count):
            state = self.turn(state, number, ("register",))
        return state

    # ---- a machine's events

    def turn(self, state: State, number: int, event: Event) -> State:
        """Something happens to a machine."""
        own, key = state[NODES + number], state[NODES + self.count + number]
        result = self._turns.get((own, key, event))
        if result is None:
            result = self._turns[own, key, event] = self._turned(own, key, event)
        return self._settled(state, number, *result)

    def _turned(self, own: int, key: int, event: Event) -> tuple[int, int, tuple[Effect, ...]]:
        turn = Turn(self.machines[own], self.keys[key], self.shape)
        turn.happen(event)
        after, held, effects = turn.finished()
        return self.machines.number(after), self.keys.number(held), effects

    def _read(self, own: int, key: int, read: int) -> tuple[int, int, tuple[Effect, ...], bool]:
        """What a machine does once it has read its orders; and whether anybody sees it."""
        found = self._reads.get((own, key, read))
        if found is None:
            after, held, effects = self._turned(own, key, ("read", self.orders[read]))
            unseen = (
                held == key
                and not effects
                and self.machines[after].processes == self.machines[own].processes
            )
            found = self._reads[own, key, read] = (after, held, effects, unseen)
        return found

    def unread(self, state: State, number: int) -> int:
        """The orders that a machine could read and hasn't; -1 for none."""
        own = state[NODES + number]
        known = self._known.get(own)
        if known is None:
            local = self.machines[own].local
            jobs = frozenset(one.job for one in local.trainers)
            orders = self.machines[own].orders
            at = -1 if orders is None else self.orders.number(orders)
            known = self._known[own] = (self.machines[own].connected, at, jobs)
        if not known[0]:
            return -1
        control = state[CONTROL]
        found = self._orders.get((control, number, known[2]))
        if found is None:
            value = leader.orders(self.controls[control], number, known[2])
            found = self._orders[control, number, known[2]] = self.orders.number(value)
        return -1 if found == known[1] else found

    def _settled(
        self, state: State, number: int, own: int, key: int, effects: tuple[Effect, ...]
    ) -> State:
        """Everything that follows at once from what has become of a machine."""
        new = list(state)
        new[NODES + number] = own
        changed = key != state[NODES + self.count + number]
        new[NODES + self.count + number] = key
        if effects:
            changed = self._carry(new, effects) or changed
        return self.rest_in(new, changed)

    def rest_in(self, new: list[int], changed: bool) -> State:
        """Do the bookkeeping, let nodes read what makes them do nothing, forget old groups."""
        while changed:
            changed = False
            decision = self.decide(new, NOW)
            if decision.control != new[CONTROL]:
                new[CONTROL] = decision.control
            for number in range(self.count):
                read = self.unread(tuple(new), number)
                if read < 0:
                    continue
                at = NODES + number
                after, _, _, unseen = self._read(new[at], new[at + self.count], read)
                if unseen:
                    new[at] = after
        self._forget(new)
        return tuple(new)

    # ---- groups

    def _carry(self, new: list[int], effects: tuple[Effect, ...]) -> bool:
        """Carry out effects on the groups; returns whether a node's key has changed."""
        changed = False
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            before = new[NETWORK]
            found = self._effects.get((before, effect))
            if found is None:
                after = invariants.carried(self.networks[before], effect, self.spec)
                found = self._effects[before, effect] = self.networks.number(after)
            new[NETWORK] = found
            if effect[0] == "level":
                level = effect[3]
                step = (level + 2) // 3  # the highest state that it knows of: its own
                rest = self.rests[new[REST]]
                if level % 3 == 0 and step > rest.highest:
                    new[REST] = self.rests.number(rest._replace(highest=step))
            elif effect[0] == "arrive" and found != before:
                group = self.group(found, effect[1])
                assert group is not None
                arrival: Arrival = effect[3][0]
                rest = self.rests[new[REST]]
                if arrival.step > rest.highest:
                    new[REST] = self.rests.number(rest._replace(highest=arrival.step))
                if group.whole and not group.broken:
                    changed = self._join(new, group, todo) or changed
        return changed

    def _join(self, new: list[int], group: Group, todo: list[Effect]) -> bool:
        changed = False
        for number in range(self.count):
            at = NODES + number
            for process in self.machines[new[at]].processes:
                standing = process.standing
                if (
                    process.arrived == group.number == standing.stopped
                    and standing.joined < group.number
                    and not process.hung
                    and not process.reserve
                    and process.broken < group.number
                ):
                    key = (new[at], new[at + self.count], ("join", process.instance))
                    result = self._turns.get(key)
                    if result is None:
                        result = self._turns[key] = self._turned(*key)
                    changed = changed or result[1] != new[at + self.count]
                    new[at], new[at + self.count] = result[0], result[1]
                    todo.extend(result[2])
        return changed

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

    def _forget(self, new: list[int]) -> None:
        """Groups in which nobody can do anything any more."""
        needed: frozenset[int] = frozenset()
        for own in new[NODES : NODES + self.count]:
            mine = self._needed.get(own)
            if mine is None:
                mine = self._needed[own] = frozenset(
                    _in_group(one) for one in self.machines[own].processes if not one.hung
                )
            needed |= mine
        key = (new[NETWORK], needed)
        found = self._cleared.get(key)
        if found is None:
            kept = tuple(one for one in self.networks[new[NETWORK]] if one.number in needed)
            found = self._cleared[key] = self.networks.number(kept)
        new[NETWORK] = found

    # ---- the leader

    def lead(self, state: State, choice: Choice) -> State:
        """The leader makes a write."""
        invariants.at_write(self, state, choice.action)
        new = list(state)
        new[CONTROL] = choice.control
        return self.rest_in(new, True)

    # ---- what a trainer could do

    def options(self, own: int) -> tuple[Label, ...]:
        """What the trainers of a machine could do, if the others let them."""
        found = self._options.get(own)
        if found is None:
            found = self._options[own] = tuple(
                option
                for process in self.machines[own].processes
                if not process.hung
                for option in self._of_process(process)
            )
        return found

    def _of_process(self, me: Process) -> Iterator[Label]:
        standing = me.standing
        if not standing.ready:
            yield ("ready", me.instance)
        if _may_update(me) and me.broken < standing.joined:
            yield ("update", me)
        if standing.stopped > standing.joined:
            if standing.restored != standing.stopped:
                return
            number = standing.stopped
            if standing.phase is StepPhase.PREPARED:
                if standing.resume_step == standing.step + 1:
                    yield ("forward", me.instance)
            elif standing.phase is StepPhase.EMPTY:
                for source in me.sources:
                    yield ("pull", me, source.node, source.instance)
                if me.pull is not None:
                    yield ("pulled", me)
            if me.arrived == number and me.broken < number and not me.reserve:
                yield ("break", me, number)
        elif standing.joined and me.broken < standing.joined and not phases.at_boundary(standing):
            if standing.phase is StepPhase.COMPUTING:
                yield ("prepare", me)
            if standing.phase is not StepPhase.DONE:
                yield ("break", me, standing.joined)

    def serving(self, state: State, instance: str, me: Process) -> Process | None:
        """The source, if it serves what a process wants."""
        number = int(instance[1 : instance.index("t")])
        for source in self.machines[state[NODES + number]].processes:
            if source.instance == instance and not source.hung:
                standing = me.standing
                verdict = phases.may_serve(source.standing, standing.stopped, standing.resume_step)
                return source if verdict.do is Do.GO else None
        return None

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


def _may_update(process: Process) -> bool:
    """Whether a rank could begin to update by the agreement of its group."""
    standing = process.standing
    if standing.phase is not StepPhase.PREPARED or 0 < standing.resume_step == standing.step + 1:
        return False
    return phases.may_update(standing, agreed=True).do is Do.GO


def _in_group(process: Process) -> int:
    """The generation in whose group a process is, or waits for the others; 0 for none."""
    standing = process.standing
    if standing.stopped <= standing.joined or _may_update(process):
        return standing.joined
    waits = process.arrived == standing.stopped and not process.reserve
    return standing.stopped if waits else 0
