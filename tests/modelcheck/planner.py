# SPDX-License-Identifier: Apache-2.0
"""The production planner, asked once for each view of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.controller.transactions import Stale
from coordinator.model import ClusterView, Generation, Phase
from coordinator.plan import (
    Action,
    AskWitnesses,
    DeclareDead,
    HoldBack,
    KeepWarm,
    Probe,
    Transition,
    Wait,
    membership,
    plan,
)
from tests.modelcheck import leader
from tests.modelcheck.leader import NOW, SETTINGS
from tests.modelcheck.values import (
    JOB,
    Control,
    Group,
    Key,
    Machine,
    Pending,
    Rest,
    Shape,
    Table,
)

if TYPE_CHECKING:
    from tests.modelcheck.symmetry import Symmetry

State = tuple[int, ...]
CONTROL, NETWORK, REST, NODES = 0, 1, 2, 3


class Choice(NamedTuple):
    """A write that the leader wants to make."""

    what: str
    action: Action
    control: int
    """As it is afterwards; -1 if it fails."""
    pending: Pending | None
    """None for what is decided under other names."""


class Decision(NamedTuple):
    """What the planner says."""

    booked: tuple[int, ...] = ()
    """The control keys after its bookkeeping, if it has any to do: then it is asked again. More
    than one where names tell who is to be kept warm."""
    choices: tuple[Choice, ...] = ()
    waits: bool = False
    """Whether it may do more a while later: a broken group and a restart are given time."""


class Planner:
    """What a leader sees in a state, and what it makes of it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.spec = shape.spec
        self.count = shape.nodes
        self.names = [f"n{number}" for number in range(self.count)]
        self.controls: Table[Control] = Table()
        self.machines: Table[Machine] = Table()
        self.rests: Table[Rest] = Table()
        self.networks: Table[tuple[Group, ...]] = Table()
        self.keys: Table[Key | None] = Table()
        self.symmetry: Symmetry | None = None
        self.nothing = self.keys.number(None)
        self._plans: dict[tuple[Any, ...], Decision] = {}
        self._living: dict[int, int] = {}
        self._lives: Table[str] = Table()
        self._booked: dict[tuple[int, Action], int] = {}
        self._choices: dict[tuple[Action, int, tuple[int, ...]], Choice | None] = {}

    def decide(self, state: list[int] | State, now: float) -> Decision:
        """What the planner says in a state: it sees the records, and who answers."""
        there = NODES + self.count
        answers = map(self._answers, state[NODES:there])
        key = (now, state[CONTROL], *state[there:], *answers)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._decided(state, now)
        return found

    def _answers(self, own: int) -> int:
        """A number for what a machine says to the leader."""
        found = self._living.get(own)
        if found is None:
            there = self.machines[own]
            said = there.local.incarnation if there.up else ""
            found = self._living[own] = self._lives.number(said)
        return found

    def view(
        self, state: list[int] | State, wrong: tuple[str, str] | None = None
    ) -> tuple[Control, dict[str, Key], ClusterView]:
        """What a leader sees in a state."""
        control = self.controls[state[CONTROL]]
        held, living = {}, {}
        for number, name in enumerate(self.names):
            key = self.keys[state[NODES + self.count + number]]
            if key is not None:
                held[name] = key
            found = self.machines[state[NODES + number]]
            if found.up:
                living[name] = found.local.incarnation
        return control, held, leader.view(control, held, living, wrong)

    def _decided(self, state: list[int] | State, now: float) -> Decision:
        decision, named = self._told(state, now)
        if self.symmetry is None or not named:
            return decision
        booked, choices = list(decision.booked), list(decision.choices)
        for names in self.symmetry.others:
            back = names.inverse()
            other, _ = self._told(self.symmetry.renamed(tuple(state), names), now)
            for control in other.booked:
                booked.append(self.symmetry.part(0, control, back))
            for choice in other.choices:
                if _by_name(choice.action) and choice.control >= 0:
                    control = self.symmetry.part(0, choice.control, back)
                    if all(control != one.control for one in choices):
                        choices.append(choice._replace(control=control, pending=None))
        return decision._replace(booked=tuple(dict.fromkeys(booked)), choices=tuple(choices))

    def _told(self, state: list[int] | State, now: float) -> tuple[Decision, bool]:
        """And whether names may have decided."""
        number = state[CONTROL]
        _, held, seen = self.view(state)
        actions = plan(seen, now, SETTINGS)
        if now == NOW:
            control = number
            for action in actions:
                if leader.primary(action):
                    break  # what comes after it is decided anew once it is written
                if not isinstance(action, Probe | AskWitnesses | HoldBack | Wait):
                    control = self._bookkept(action, control, held, seen)
            if control != number:
                named = any(isinstance(one, KeepWarm) and one.job for one in actions)
                return Decision((control,)), named
        choices = []
        for action in actions:
            if leader.primary(action):
                choice = self.choice(action, number, held, seen)
                if choice is not None:
                    choices.append(choice)
        job = seen.jobs[JOB]
        waits = job.broken_at is not None or (
            job.generation is not None and bool(membership.find(seen, job))
        )
        decision = Decision((), tuple(choices), waits)
        return decision, any(_by_name(one.action) for one in choices)

    def _bookkept(
        self, action: Action, number: int, held: dict[str, Key], seen: ClusterView
    ) -> int:
        found = self._booked.get((number, action))
        if found is None:
            control = self.controls[number]
            after = control
            for one in leader.build(action, control, seen):
                after = leader.commit(one, after, held) or after
            leader.check(control, after)
            found = self._booked[number, action] = self.controls.number(after)
        return found

    def choice(
        self, action: Action, number: int, held: dict[str, Key], seen: ClusterView
    ) -> Choice | None:
        """What a write of the leader would come to."""
        leases = tuple(key.lease if key else 0 for key in map(held.get, self.names))
        memory = (action, number, leases)
        if memory not in self._choices:
            self._choices[memory] = self._chosen(action, self.controls[number], held, seen)
        return self._choices[memory]

    def _chosen(
        self, action: Action, control: Control, held: dict[str, Key], seen: ClusterView
    ) -> Choice | None:
        try:
            transactions = leader.build(action, control, seen)
        except Stale:
            return None
        after = control
        for one in transactions:
            written = leader.commit(one, after, held)
            if written is None:
                break
            leader.check(after, written)
            after = written
        number = self.controls.number(after)
        what = describe(action)
        return Choice(what, action, number, Pending(what, transactions, False))


def _by_name(action: Action) -> bool:
    """Whether names may have told which node has which slot."""
    return isinstance(action, Transition) and bool(
        action.assign or action.unassign or action.generation.empty_slots
    )


def describe(action: Action) -> str:
    """An action in a few words."""
    if isinstance(action, Transition):
        record: Generation = action.generation
        more = f" S={record.resume_step}" if record.phase is Phase.RESTORE else ""
        return f"{record.phase.name} g{record.generation}{more} ({action.reason.splitlines()[0]})"
    if isinstance(action, DeclareDead):
        return f"{action.incarnation} is dead ({action.reason})"
    return type(action).__name__
