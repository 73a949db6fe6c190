# SPDX-License-Identifier: Apache-2.0
"""States that differ only by which replica, position or node is which are one.

Replicas and shard positions of a job are alike, and so are nodes; names alone tell them apart.
Each state is renamed before it is looked up. Where the planner decides by names (which of two free
nodes, which of two empty slots), it is asked under other names too, and all answers are followed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from coordinator.model import Generation
from tests.modelcheck.leader import Jobs
from tests.modelcheck.past import Unread
from tests.modelcheck.planner import CONTROL, NETWORK, NODES, REST, Planner, State
from tests.modelcheck.values import Control, Group, Process, Table
from workerd.protocol.phases import Standing

_NAME = re.compile(r"n(\d+)((?:-|t)\d+)?")


class Names(NamedTuple):
    """What everything is called now; each by what it was called."""

    slots: tuple[int, ...]
    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    positions: tuple[int, ...]

    def inverse(self) -> Names:
        """Back again."""
        return Names(*[tuple(one.index(number) for number in range(len(one))) for one in self])


class Symmetry:
    """Renames the states of one system."""

    def __init__(self, system: Planner) -> None:
        self.system = system
        spec = system.spec
        self._same: dict[Names, Names] = {}
        """Names by their value: there is one of each, so that it can be told by its identity."""
        self._known: dict[int, tuple[dict[int, int], ...]] = {}
        self._owners: dict[int, int] = {}
        self._all_owners: Table[tuple[int, ...]] = Table()
        self._named: dict[tuple[int, ...], Names] = {}
        self._marks: list[dict[tuple[int, int], int]] = [{} for _ in system.names]
        self._numbers: dict[Any, int] = {}
        self.slots = [self._of(*one) for one in self._permutations()]
        nodes = tuple(range(system.count))
        turned = self._of(
            tuple(reversed(range(spec.replicas))), tuple(reversed(range(spec.shard_positions)))
        )
        if spec.ranks_per_node not in (1, spec.shard_positions):
            turned = self.slots[0]
        back = tuple(reversed(nodes))
        self.others = [
            turned._replace(nodes=nodes),
            self.slots[0]._replace(nodes=back),
            turned._replace(nodes=back),
        ]
        """Other names under which the planner is asked."""

    def _permutations(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        spec = self.system.spec
        replicas = itertools.permutations(range(spec.replicas))
        alike = spec.ranks_per_node == 1
        positions = [tuple(range(spec.shard_positions))]
        if alike:
            positions = list(itertools.permutations(range(spec.shard_positions)))
        if not alike and spec.ranks_per_node != spec.shard_positions:
            yield tuple(range(spec.replicas)), positions[0]
            return
        yield from itertools.product(replicas, positions)

    def _of(self, replicas: tuple[int, ...], positions: tuple[int, ...]) -> Names:
        spec = self.system.spec
        if spec.ranks_per_node > 1:
            positions = tuple(range(spec.shard_positions))
        ranks = tuple(
            replicas[spec.replica(rank)] * spec.shard_positions
            + positions[spec.shard_position(rank)]
            for rank in range(spec.ranks)
        )
        each = spec.ranks_per_node
        slots = tuple(ranks[slot * each] // each for slot in range(spec.slots))
        return Names(slots, (), ranks, replicas, positions)

    # ---- states

    def canonical(self, state: State) -> State:
        """The state by the names that all its likes have."""
        system, count = self.system, self.system.count
        if system.rests[state[REST]].pending is not None:
            return state  # what is on its way has names of its own
        number = state[CONTROL]
        owners = self._owners.get(number)
        if owners is None:
            owners = self._owners[number] = self._owned(system.controls[number])
        marks = []
        for at in range(NODES, NODES + count):
            own, key = state[at], state[at + count]
            found = self._marks[at - NODES].get((own, key))
            marks.append(self._mark(own, key, at - NODES) if found is None else found)
        looks = (owners, *marks)
        names = self._named.get(looks)
        if names is None:
            names = self._named[looks] = self._names(owners, marks)
        return self.renamed(state, names)

    def _owned(self, control: Control) -> int:
        """A number for who owns which slot."""
        owners = tuple(
            -1 if slot is None or not slot.node else int(slot.node[1:]) for slot in control.slots
        )
        return self._all_owners.number(owners)

    def _names(self, number: int, marks: list[int]) -> Names:
        owners = self._all_owners[number]
        told = [-1 if owner < 0 else marks[owner] for owner in owners]
        best: list[int] = []
        names = self.slots[0]
        for one in self.slots:
            found = [0] * len(told)
            for slot, mark in enumerate(told):
                found[one.slots[slot]] = mark
            if not best or found < best:
                best, names = found, one
        count = self.system.count
        nodes = [-1] * count
        for slot, owner in enumerate(owners):
            if owner >= 0:
                nodes[owner] = names.slots[slot]
        free = sorted(set(range(count)) - set(nodes))
        others = sorted((marks[one], one) for one in range(count) if nodes[one] < 0)
        for (_, other), name in zip(others, free, strict=True):
            nodes[other] = name
        names = names._replace(nodes=tuple(nodes))
        return self._same.setdefault(names, names)

    def renamed(self, state: State, names: Names) -> State:
        """The state by other names."""
        known = self._known.get(id(names))
        if known is None:
            names = self._same.setdefault(names, names)
            known = self._known.setdefault(id(names), ({}, {}, {}, {}))
        controls, networks, machines, keys = known
        new = list(state)
        found = controls.get(state[CONTROL])
        new[CONTROL] = self.part(0, state[CONTROL], names) if found is None else found
        found = networks.get(state[NETWORK])
        new[NETWORK] = self.part(1, state[NETWORK], names) if found is None else found
        count = self.system.count
        for before, name in enumerate(names.nodes, NODES):
            after = NODES + name
            found = machines.get(state[before])
            new[after] = self.part(2, state[before], names) if found is None else found
            found = keys.get(state[before + count])
            new[after + count] = (
                self.part(3, state[before + count], names) if found is None else found
            )
        return tuple(new)

    def part(self, kind: int, number: int, names: Names) -> int:
        """A part by other names: of the control keys, groups, machines or nodes' keys."""
        names = self._same.setdefault(names, names)
        known = self._known.setdefault(id(names), ({}, {}, {}, {}))[kind]
        found = known.get(number)
        if found is None:
            system = self.system
            table: Any = (system.controls, system.networks, system.machines, system.keys)[kind]
            found = known[number] = table.number(_rename(table[number], names, ""))
        return found

    def _mark(self, own: int, key: int, number: int) -> int:
        """A number for a machine, whatever things are called."""
        spec = self.system.spec
        nodes = tuple(0 if one == number else 1 for one in range(self.system.count))
        nothing = Names(
            (0,) * spec.slots,
            nodes,
            (0,) * spec.ranks,
            (0,) * spec.replicas,
            (0,) * spec.shard_positions,
        )
        value = _rename((self.system.machines[own], self.system.keys[key]), nothing, "")
        found = self._numbers.setdefault(value, len(self._numbers))
        self._marks[number][own, key] = found
        return found


_NUMBERS: dict[str, Callable[[Names], tuple[int, ...]]] = {
    "rank": lambda names: names.ranks,
    "members": lambda names: names.ranks,
    "slot": lambda names: names.slots,
    "empty_slots": lambda names: names.slots,
    "changed_slots": lambda names: names.slots,
    "absent_replicas": lambda names: names.replicas,
    "shard_position": lambda names: names.positions,
}


_FIELDS: dict[Any, tuple[str, ...]] = {}


def _fields(cls: Any) -> tuple[str, ...]:
    found = _FIELDS.get(cls)
    if found is None:
        names = [one.name for one in fields(cls)] if is_dataclass(cls) else ()
        found = _FIELDS[cls] = tuple(names) or tuple(getattr(cls, "_fields", ()))
    return found


def _rename(value: Any, names: Names, field: str) -> Any:
    if isinstance(value, str):
        match = _NAME.fullmatch(value)
        return f"n{names.nodes[int(match[1])]}{match[2] or ''}" if match else value
    if type(value) is int:
        numbers = _NUMBERS.get(field)
        return value if numbers is None or value < 0 else numbers(names)[value]
    if value is None or isinstance(value, int | float | Standing | Unread):
        return value
    if isinstance(value, Jobs):
        return Jobs({key: _rename(one, names, "") for key, one in value.items()})
    if isinstance(value, frozenset):
        return value
    known = _fields(type(value))
    if known:
        return _ordered(
            value,
            {name: _rename(getattr(value, name), names, name) for name in known},
            names,
        )
    inner = tuple(_rename(one, names, field) for one in value)
    return tuple(sorted(inner)) if field in _NUMBERS else inner


def _ordered(value: Any, changes: dict[str, Any], names: Names) -> Any:
    """With everything that has an order in the new one."""
    record: Any = value
    match value:
        case Control():
            changes["slots"] = _moved(changes["slots"], names.slots)
            for name in ("assignments", "spares", "flags"):
                changes[name] = _moved(changes[name], names.nodes)
            return value._replace(**changes)
        case Group():
            for name in ("arrived", "levels"):
                changes[name] = _moved(changes[name], names.ranks)
            return value._replace(**changes)
        case Process() | Generation():
            sources = sorted(changes["sources"], key=lambda one: (one.rank, one.instance))
            changes["sources"] = tuple(sources)
    return replace(record, **changes) if is_dataclass(value) else record._replace(**changes)


def _moved(values: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    if len(set(places)) < len(places):
        return values  # names that tell nothing
    moved = [None] * len(values)
    for before, after in enumerate(places):
        moved[after] = values[before]
    return tuple(moved)
