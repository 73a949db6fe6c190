# SPDX-License-Identifier: Apache-2.0
"""What must hold of everything that is written, and the time that each recovery takes.

What must hold of a trainer's steps is checked where they are taken (``group``, ``trainer``).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.controller.records import load
from coordinator.model import Assignment, Generation, NodeFlags, Phase, Slot
from coordinator.store import KeyKind, keys
from tests.simulator.etcd import Change
from tests.simulator.group import Violation
from workerd.protocol.page import StepPhase

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster


_OLD = 3.0  # seconds
_FORGOTTEN = 1500.0  # seconds after which a fault that has hurt nobody won't


@dataclass(frozen=True, slots=True)
class Recovery:
    """The way back to RUNNING, over one generation or several. Times are the clock's."""

    began: float
    """When the fault happened that it begins with; the first PAUSE where none is known."""
    why: str
    paused: float
    """PAUSE was written: the fault was detected, its replacement chosen."""
    restoring: float = 0.0
    """RESTORE was written: all have stopped."""
    running: float = 0.0
    """RUNNING was written: the state is where it is missing, and the group stands."""
    step: float = 0.0
    """The first step after it was done."""
    generations: int = 1
    resume_step: int = -1


class Checks:
    """Sees every write, at once. Raises Violation out of the write that breaks an invariant."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.generation: Generation | None = None
        self.recoveries: list[Recovery] = []
        self.open: Recovery | None = None
        self.highest = 0
        self.joined = 0
        """The newest generation whose ranks have all joined."""
        self._faults: dict[str, tuple[float, str]] = {}
        """By node: what has happened to it that no recovery has answered yet."""
        self._left: set[str] = set()
        """Nodes whose slots have been written since the last record."""
        self._slots: dict[int, Slot] = {}
        self._assigned: dict[str, Assignment] = {}
        self._told = hashlib.sha256()
        self._job = cluster.prefix + keys.job_prefix(cluster.spec.name)
        cluster.etcd.watch(self, [cluster.prefix])

    @property
    def fingerprint(self) -> str:
        """Of all that was written, and when: the same for the same seed."""
        return self._told.hexdigest()[:16]

    # ---- etcd's watcher

    def feed(self, revision: int, changes: list[Change], delay: float) -> None:
        """A transaction has been carried out."""
        now = self.cluster.clock.now()
        self._told.update(f"{revision} {now:.6f}".encode())
        generation: Generation | None = None
        slots = False
        for change in changes:
            key = change.key
            self._told.update(key.encode())
            if key.startswith(self._job):
                if key.endswith("/generation"):
                    generation = self._load(KeyKind.GENERATION, change)
                elif key.startswith(self._job + "slots/"):
                    self._slot(int(key.rpartition("/")[2]), self._load(KeyKind.SLOT, change))
                    slots = True
            elif key.startswith(self.cluster.prefix + keys.FLAGS):
                self._judged(key.rpartition("/")[2], change, now)
            elif key.startswith(self.cluster.prefix + keys.ASSIGNMENTS):
                self._assign(key.rpartition("/")[2], self._load(KeyKind.ASSIGNMENT, change))
        if generation is not None:
            self._written(generation, now)
        elif slots:
            self._one_owner()

    def _load(self, kind: KeyKind, change: Change) -> Any:
        return None if change.new is None else load(kind, change.new)

    def _slot(self, number: int, slot: Slot | None) -> None:
        if number in self._slots:
            self._left.add(self._slots[number].node)
        if slot is None:
            self._slots.pop(number, None)
        else:
            self._slots[number] = slot

    def _assign(self, node: str, value: Assignment | None) -> None:
        if value is None:
            self._assigned.pop(node, None)
        else:
            self._assigned[node] = value

    # ---- the leader's writes

    def _judged(self, name: str, change: Change, now: float) -> None:
        """Who is declared dead for not answering, before its lease ends, has no machine or no line.

        What is judged may be a few pings old. Where workerd alone is silent, the kernel answers.
        """
        flags: NodeFlags | None = self._load(KeyKind.FLAGS, change)
        node = self.cluster.nodes[name]
        well = node.up and not node.isolated and now - node.reached_since > _OLD
        for one in flags.dead[-1:] if flags is not None and well else ():
            if one.incarnation == node.incarnation and one.reason.startswith("it does not answer"):
                raise Violation(f"{name} can be reached, and is declared dead: {one.reason}")

    def _one_owner(self) -> None:
        owners: dict[str, int] = {}
        for number, slot in self._slots.items():
            if slot.node and slot.node in owners:
                raise Violation(f"{slot.node} owns slots {owners[slot.node]} and {number}")
            owners[slot.node] = number

    def _written(self, new: Generation, now: float) -> None:
        old, self.generation = self.generation, new
        self._one_owner()
        self.cluster.eventful()
        if old is not None and new == replace(old, hold=new.hold) and not old.hold:
            if new.phase is not Phase.RUNNING:
                raise Violation(f"generation {new.generation} is held in {new.phase.name}")
            return
        was = (0, 0) if old is None else (old.generation, int(old.phase))
        if (new.generation, int(new.phase)) <= was or new.generation > was[0] + 1:
            raise Violation(f"the record goes from {was} to {new.generation} {new.phase.name}")
        if new.generation > was[0] and new.phase is not Phase.PAUSE and not new.phase.ended:
            raise Violation(f"generation {new.generation} begins with {new.phase.name}")
        if new.phase is Phase.PAUSE:
            self._pause(now, new)
            self._left.clear()
        elif new.phase is Phase.RESTORE:
            self._restore(now, new)
            self._left.clear()
        elif new.phase is Phase.RUNNING:
            self._run(now, new)
        else:
            self._end(new)

    def _pause(self, now: float, new: Generation) -> None:
        began, why = self._cause(now, new)
        if self.open is None:
            self.open = Recovery(began, why, paused=now)
        else:
            self.open = replace(self.open, generations=self.open.generations + 1, restoring=0.0)

    def _cause(self, now: float, new: Generation) -> tuple[float, str]:
        """When what this generation mends has happened; now, where nobody knows of anything.

        One that changes nobody answers whatever has happened to an owner.
        """
        self._faults = {
            node: one for node, one in self._faults.items() if now - one[0] < _FORGOTTEN
        }
        nodes = self._left or {one for one in self._faults if self.is_owner(one)}
        known = [self._faults[one] for one in sorted(nodes) if one in self._faults]
        for one in self._left:
            self._faults.pop(one, None)
        return min(known, default=(now, new.reason))

    def _restore(self, now: float, new: Generation) -> None:
        if not new.initial and new.resume_step < self.highest - 1:
            raise Violation(f"S = {new.resume_step}, but a rank has come to state {self.highest}")
        spec = self.cluster.spec
        for number, slot in self._slots.items():
            replicas = {spec.replica(spec.rank(number, one)) for one in range(spec.ranks_per_node)}
            if replicas & set(new.absent_replicas):
                continue
            if not slot.node or not all(rank.instance for rank in slot.ranks):
                raise Violation(f"RESTORE, but slot {number} names {slot}")
        if self.open is not None:
            self.open = replace(self.open, restoring=now, resume_step=new.resume_step)

    def _run(self, now: float, new: Generation) -> None:
        if self.joined != new.generation:
            raise Violation(f"RUNNING {new.generation}, but only {self.joined} has been joined")
        for slot in self._slots.values():
            held = self._assigned.get(slot.node)
            if slot.node and (held is None or held.slot != slot.slot):
                raise Violation(f"slot {slot.slot} is {slot.node}'s, which is assigned {held}")
        if self.open is not None:
            self.open = replace(self.open, running=now)

    def _end(self, new: Generation) -> None:
        if new.phase is not Phase.LOST:
            raise Violation(f"the job has ended: {new.phase.name}: {new.reason}")
        positions = self.cluster.spec.shard_positions
        held = {
            one.rank % positions
            for node in self.cluster.nodes.values()
            if node.up and node.incarnation in self._owners()
            for one in node.trainers.values()
            if one.rank >= 0 and one.standing.phase is not StepPhase.EMPTY
        }
        if len(held) == positions:
            raise Violation(f"LOST ({new.reason}), although every position has a living holder")

    def _owners(self) -> set[str]:
        return {slot.incarnation for slot in self._slots.values()}

    def owner(self, number: int) -> str:
        """The node of a slot; empty when it has none."""
        slot = self._slots.get(number)
        return slot.node if slot is not None else ""

    def is_owner(self, node: str) -> bool:
        """Whether a node has a slot."""
        return any(slot.node == node for slot in self._slots.values())

    # ---- what trainers come to

    def reached(self, step: int) -> None:
        """A rank has come to a state."""
        self.highest = max(self.highest, step)

    def all_joined(self, generation: int) -> None:
        """Every rank has."""
        self.joined = generation

    def first_step(self, generation: int, now: float) -> None:
        """The first step in a generation is done: the recovery is over."""
        if self.open is None or self.generation is None:
            return
        if generation == self.generation.generation:
            running = self.open.running or now
            self.recoveries.append(replace(self.open, running=running, step=now))
            self.open = None

    def fault(self, node: str, what: str) -> None:
        """Something has happened to a node."""
        self._faults.setdefault(node, (self.cluster.clock.now(), what))
