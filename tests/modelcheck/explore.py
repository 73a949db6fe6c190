# SPDX-License-Identifier: Apache-2.0
"""Breadth first through all states: every move of every state, once."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

from tests.modelcheck import invariants, moves
from tests.modelcheck.leader import NOW
from tests.modelcheck.planner import CONTROL, NODES, REST, State
from tests.modelcheck.system import Label, Move, System
from tests.modelcheck.values import Shape, Violation

ENDLESS = 2000
"""More moves than a job takes to run without a fault."""


@dataclass
class Result:
    """What was found."""

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    """Of the processor, which others may use too."""
    complete: bool = True
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """States a second."""
        return self.states / max(self.seconds, 1e-9)


def begin(system: System) -> State:
    """Where the search starts."""
    state = system.submitted()
    if system.shape.from_start:
        return state
    for _ in range(ENDLESS):
        possible = [one for one in moves.moves(system, state) if one[0][0] != "prepare"]
        if not possible:
            return state
        state = system.booked(possible[0][1])[0]
    raise AssertionError("the job never ran")


def successors(system: System, state: State) -> tuple[list[Move], list[Move], str]:
    """Moves by themselves, and others; and the end that this is, if it is one."""
    generation = system.controls[state[CONTROL]].generation
    if generation is not None and generation.phase.ended:
        return [], [], invariants.at_end(system, state)
    own = list(moves.moves(system, state))
    others = list(moves.mends(system, state))
    end = ""
    if not own:
        later = moves.overdue(system, state)
        if later is not None:
            own.append((("deadline",), later))
        else:
            end = invariants.at_end(system, state)
    if system.rests[state[REST]].budget:
        others.extend(moves.faults(system, state))
    return own, others, end


class Search:
    """One search. Raises Violation with the shortest trace to it."""

    def __init__(self, shape: Shape, states: int = 10_000_000, seconds: float = 1e9) -> None:
        self.system = System(shape)
        self.result = Result()
        self._limits = (states, seconds)
        self._parents = array("i", [-1])
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._from = array("i")
        self._to = array("i")

    def run(self) -> Result:
        """All states; then whether an end can be reached from each of them."""
        started = time.process_time()
        first = self._named(begin(self.system))
        numbers = self._numbers
        numbers[first] = 0
        self.states = states = [first]
        ended = bytearray(1)
        result, limits = self.result, self._limits
        at = 0
        while at < len(states):
            if at > limits[0] or (at % 1000 == 0 and time.process_time() - started > limits[1]):
                result.complete = False
                break
            try:
                own, others, end = successors(self.system, states[at])
                if end:
                    ended[at] = 1
                    result.ends[end] += 1
                for group in (own, others):
                    for _, found in group:
                        for state in (found,) if found in numbers else self._settled(found):
                            number = numbers.get(state)
                            if number is None:
                                number = numbers[state] = len(states)
                                states.append(state)
                                self._parents.append(at)
                                ended.append(0)
                            if group is own:
                                self._from.append(at)
                                self._to.append(number)
                    result.transitions += len(group)
            except Violation as error:
                raise Violation(self.trace(at, str(error))) from error
            at += 1
        result.states = at
        if result.complete:
            self._live(ended)
        result.seconds = time.process_time() - started
        return result

    def _live(self, reach: bytearray) -> None:
        """From every state an end is reachable without another fault, and without mending."""
        source, target = self._from, self._to
        found = True
        while found:
            found = False
            for edge in range(len(source) - 1, -1, -1):
                if reach[target[edge]] and not reach[source[edge]]:
                    reach[source[edge]] = 1
                    found = True
        stuck = reach.find(0)
        if stuck >= 0:
            raise Violation(self.trace(stuck, "no end can be reached any more"))

    def trace(self, at: int, error: str) -> str:
        """The shortest way to a state, in words."""
        path = [at]
        while path[-1] > 0:
            path.append(self._parents[path[-1]])
        path.reverse()
        lines = []
        state = self.states[0]
        for before, after in itertools.pairwise(path):
            label, state = self._step(state, self.states[before], self.states[after])
            lines.append(label)
        return "\n  ".join([error, *lines, *describe(self.system, state)])

    def _step(self, state: State, before: State, after: State) -> tuple[str, State]:
        """By the names that the run began with, as far as that goes."""
        for said, start in (("", state), ("(by other names) ", before)):
            own, others, _ = successors(self.system, start)
            for label, found in [*own, *others]:
                if after in self._settled(found):
                    booked = (one for one in self.system.booked(found) if self._named(one) == after)
                    return said + say(label), next(booked, after)
        raise AssertionError("a state that nothing leads to")

    def _settled(self, state: State) -> list[State]:
        """A state with the leader's books in order, by the names that all its likes have."""
        state = self._named(state)
        if state in self._numbers:
            return [state]
        booked = self.system.booked(state)
        return [one if one is state else self._named(one) for one in booked]

    def _named(self, state: State) -> State:
        symmetry = self.system.symmetry
        return state if symmetry is None else symmetry.canonical(state)


def say(label: Label) -> str:
    """A move in words."""
    what, more = label[0], " ".join(str(one) for one in label[1:])
    if what == "***":
        return f"*** {more}"
    if what in ("leader", "pending", "deadline"):
        return f"{what}: {more}"
    return f"n{label[1]}: {what} {' '.join(str(one) for one in label[2:])}"


def describe(system: System, state: State) -> list[str]:
    """A state in a few lines."""
    control = system.controls[state[CONTROL]]
    generation = control.generation
    lines = ["--"]
    if generation is not None:
        slots = ", ".join(
            f"{one.slot}:{one.node or '-'}" for one in control.slots if one is not None
        )
        lines.append(
            f"g{generation.generation} {generation.phase.name} S={generation.resume_step} {slots}"
        )
    for number, name in enumerate(system.names):
        there = system.machines[state[NODES + number]]
        key = system.keys[state[NODES + system.count + number]]
        flags = [one for one in ("up", "cut", "mute") if getattr(there, one)]
        trainers = "; ".join(
            f"{one.instance} {one.standing.phase.name}({one.standing.step}) rank {one.rank} "
            f"joined {one.standing.joined} stopped {one.standing.stopped} "
            f"{'/'.join(one.lineage)}{' hung' if one.hung else ''}"
            for one in there.processes
        )
        lines.append(f"{name} {' '.join(flags)}{' lease' if key else ''}: {trainers}")
    decided = system.decide(state, NOW)
    lines.append(f"leader: {[one.what for one in decided.choices]}")
    return lines
