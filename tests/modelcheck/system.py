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
from typing import Any, NamedTuple

from coordinator.model import Job, NodeFlags
from tests.modelcheck import invariants, leader, machine, past
from tests.modelcheck.groups import Groups, may_update
from tests.modelcheck.leader import NOW
from tests.modelcheck.machine import Event, Turn
from tests.modelcheck.planner import CONTROL, NETWORK, NODES, REST, Choice, State
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
    Violation,
)
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do

Label = tuple[Any, ...]
"""Formatted only when somebody wants to read it."""
Move = tuple[Label, State]
Turned = tuple[int, int, tuple[Effect, ...]]
"""What has become of a machine and of its keys, and what it has done to its groups."""
BOOKS = 100
"""More than a leader ever writes into its books at once."""


class Node(NamedTuple):
    """What a node could do, as far as its own keys and the leader's tell."""

    lost: bool
    """Nobody renews its lease."""
    registers: bool
    """It may register, for the first time or again."""
    read: Turned | Violation | None
    """What it does when it reads its orders, if it hasn't yet."""
    writes: int
    """How many writes of it are held up and could arrive."""
    rested: int
    """The machine, once it has read what makes it do nothing."""
    kept: int
    """Its keys, without what is over."""


class System(Groups):
    """All rules, and all that is remembered of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if not shape.from_start:  # there the lowest rank's own state is the job's
            self.symmetry = Symmetry(self)
        self._turns: dict[tuple[Any, ...], Turned] = {}
        self.nodes: list[dict[tuple[int, int, int], Node]] = [{} for _ in self.names]
        self.able: dict[tuple[int, int], tuple[tuple[Label, Event], ...]] = {}
        self._effects: dict[tuple[int, Effect], int] = {}
        self._options: dict[int, tuple[Label, ...]] = {}

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
            self.alone,
            self.rests.number(rest),
            *machines,
            *[self.nothing] * self.count,
        )
        for number in range(self.count):
            state = self.turn(state, number, ("register",))
        return self.booked(state)[0]

    # ---- a machine's events

    def turn(self, state: State, number: int, event: Event) -> State:
        """Something happens to a machine."""
        own, key = state[NODES + number], state[NODES + self.count + number]
        result = self._turns.get((own, key, event))
        if result is None:
            result = self._turns[own, key, event] = self._turned(own, key, event)
        return self.settled(state, number, result)

    def _turned(self, own: int, key: int, event: Event) -> Turned:
        turn = Turn(self.machines[own], self.keys[key], self.shape)
        turn.happen(event)
        after, held, effects = turn.finished()
        return self.machines.number(after), self.keys.number(held), effects

    def node(self, number: int, own: int, key: int, control: int) -> Node:
        """What a node could do by itself, whatever the others do."""
        found = self.nodes[number].get((own, key, control))
        if found is None:
            found = self.nodes[number][own, key, control] = self._node(number, own, key, control)
        return found

    def _node(self, number: int, own: int, key: int, control: int) -> Node:
        held, there = self.keys[key], self.machines[own]
        flags = self.controls[control].flags[number] or NodeFlags()
        lost = held is not None and (
            not there.up
            or there.cut
            or there.lease != held.lease
            or there.local.incarnation != held.record.incarnation
            or flags.is_dead(held.record.incarnation)
        )
        registers = (
            there.connected
            and (held is None or held.lease != there.lease or not there.local.registered)
            and not flags.is_dead(there.local.incarnation)
        )
        writes = len(there.outbox) if there.connected else 0
        read: Turned | Violation | None = None
        rested = own
        if there.connected:
            jobs = frozenset(one.job for one in there.local.trainers)
            orders = leader.orders(self.controls[control], number, jobs)
            if orders != there.orders:
                try:
                    after, held_then, effects = self._turned(own, key, ("read", orders))
                except Violation as error:
                    return Node(lost, registers, error, writes, own, key)
                same = self.machines[after].processes == there.processes
                if same and held_then == key and not effects:
                    rested = after
                else:
                    read = (after, held_then, effects)
        record = self.controls[control].generation
        kept = key if held is None else self.keys.number(past.key(held, record))
        return Node(lost, registers, read, writes, rested, kept)

    def settled(self, state: State, number: int, turned: Turned) -> State:
        """What follows at once from what has become of a machine."""
        own, key, effects = turned
        new = list(state)
        new[NODES + number] = own
        new[NODES + self.count + number] = key
        if effects:
            self._carry(new, effects)
            return self.rest_in(new)
        self._rest(new, number)
        if new[NETWORK] != self.alone:
            self.forget(new)
        return tuple(new)

    def rest_in(self, new: list[int]) -> State:
        """Let nodes read what makes them do nothing, forget what is over."""
        for number in range(self.count):
            self._rest(new, number)
        if new[NETWORK] != self.alone:
            self.forget(new)
        return tuple(new)

    def _rest(self, new: list[int], number: int) -> None:
        own, key, control = new[NODES + number], new[NODES + self.count + number], new[CONTROL]
        found = self.nodes[number].get((own, key, control))
        if found is None:
            found = self.node(number, own, key, control)
        new[NODES + number], new[NODES + self.count + number] = found.rested, found.kept

    def booked(self, state: State) -> list[State]:
        """With the leader's bookkeeping done: one state, or more where names tell."""
        todo, done = [state], list[State]()
        for _ in range(BOOKS):
            if not todo:
                return done
            state = todo.pop()
            controls = self.decide(state, NOW).booked
            if not controls:
                done.append(state)
            for control in controls:
                todo.append(self.rest_in([control, *state[1:]]))
        raise Violation("the bookkeeping never ends")

    # ---- groups

    def _carry(self, new: list[int], effects: tuple[Effect, ...]) -> None:
        """Carry out effects on the groups."""
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
                    self._join(new, group, todo)

    def _join(self, new: list[int], group: Group, todo: list[Effect]) -> None:
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
                    new[at], new[at + self.count] = result[0], result[1]
                    todo.extend(result[2])

    # ---- the leader

    def lead(self, state: State, choice: Choice) -> State:
        """The leader makes a write."""
        invariants.at_write(self, state, choice.action)
        new = list(state)
        new[CONTROL] = choice.control
        return self.rest_in(new)

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
        if may_update(me) and me.broken < standing.joined:
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
