# SPDX-License-Identifier: Apache-2.0
"""What can happen in a state: by itself, once every deadline has passed, and as a fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from coordinator.model import Line, NodeFlags, TrainerExit, Verdict
from coordinator.plan import DeclareDead, Transition, plan
from tests.modelcheck import invariants, leader, machine
from tests.modelcheck.leader import LATE, NOW, SETTINGS, SETTLED
from tests.modelcheck.machine import Event
from tests.modelcheck.planner import CONTROL, NETWORK, NODES, REST, Choice, State
from tests.modelcheck.system import Label, Move, System
from tests.modelcheck.values import Group, Machine, Process, Violation
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.protocol import phases
from workerd.protocol.phases import Do

FAULTS = (
    "crash",
    "reboot",
    "trainer",
    "hang",
    "cut",
    "mute",
    "glitch",
    "verdict",
    "misjudge",
    "late",
    "lead",
    "stall",
    "drain",
)
"""A machine is gone; it is gone and comes back at some time; a trainer ends; one stands still; a
node is cut off from etcd; its workerd is silent; a group breaks although everybody is well; every
deadline passes at once; a living node, with a lease or without, is taken for dead; a node's write
arrives late or never; another leads, while a write of the one before is still on its way; a
leader's write is; an operator drains a node, which is no failure but meets with some."""


def moves(system: System, state: State) -> Iterator[Move]:
    """Everything that can happen without a fault and before a deadline has passed."""
    yield from _leaders(system, state)
    count = system.count
    network, control = state[NETWORK], state[CONTROL]
    for number, nodes in enumerate(system.nodes):
        own, key = state[NODES + number], state[NODES + count + number]
        node = nodes.get((own, key, control)) or system.node(number, own, key, control)
        if node.lost:
            yield (("lease", number), _expired(system, state, number))
        if node.registers:
            yield (("register", number), system.turn(state, number, ("register",)))
        if isinstance(node.read, Violation):
            raise node.read
        if node.read is not None:
            yield (("read", number), system.settled(state, number, node.read))
        for write in range(node.writes):
            yield (("write", number), system.turn(state, number, ("write", write)))
        able = system.able.get((network, own))
        if able is None:
            able = system.able[network, own] = tuple(_able(system, network, own))
        for label, event in able:
            yield ((label[0], number, *label[1:]), system.turn(state, number, event))
        for option in system.options(own):
            if option[0] in _AMONG_NODES:
                yield from _option(system, state, number, option)


_AMONG_NODES = ("pull", "pulled", "break")
"""What depends on what other machines do now."""


def _able(system: System, network: int, own: int) -> Iterator[tuple[Label, Event]]:
    """What the trainers of a machine can do in their groups, and by themselves."""
    for option in system.options(own):
        what = option[0]
        if what in ("ready", "forward"):
            yield (option, option)
        elif what in ("prepare", "update"):
            me: Process = option[1]
            group = system.group(network, me.standing.joined)
            if group is not None:
                for event in _in_group(system, group, what, me):
                    yield ((event[0], me.instance, me.standing.step), event)


def _in_group(system: System, group: Group, what: str, me: Process) -> Iterator[Event]:
    """The gradients; the agreement along the replica, then along the DP group; the update."""
    step = me.standing.step
    if what == "prepare":
        if not group.broken and system.all_at(group, system.dp[me.rank], 3 * step):
            yield ("prepare", me.instance)
        return
    along, agreed = system.agreement(group, me.rank, step)
    if along:
        yield ("agree", me.instance)
        return
    stop = group.wish == step
    if phases.may_update(me.standing, agreed, stop).do is Do.GO:
        invariants.may_update(group, me, step)
        yield ("update", me.instance, agreed, stop)


def _option(system: System, state: State, number: int, option: Label) -> Iterator[Move]:
    what = option[0]
    me: Process = option[1]
    event: Event
    if what == "pull":
        source = system.serving(state, str(option[3]), me)
        if source is None:
            return
        if me.pull is not None and system.serving(state, me.pull[0], me) is not None:
            return
        event = ("pull", me.instance, source.instance, source.lineage)
        yield ((what, number, me.instance, source.instance), system.turn(state, number, event))
    elif what == "pulled":
        assert me.pull is not None
        source = system.serving(state, me.pull[0], me)
        if source is not None:
            if source.lineage != me.pull[1]:
                raise Violation(f"the state that rank {me.rank} pulled changed under the pull")
            yield ((what, number, me.instance), system.turn(state, number, (what, me.instance)))
    elif system.machines[state[NODES + number]].connected:
        generation: int = option[2]
        if system.broken(state, me, generation):
            event = (what, me.instance, generation)
            yield ((what, number, me.instance, generation), system.turn(state, number, event))


def _leaders(system: System, state: State) -> Iterator[Move]:
    pending = system.rests[state[REST]].pending
    if pending is not None:
        yield (("pending", pending.what), _write_pending(system, state))
        if not pending.deposed:
            return
    for choice in _choices(system, state):
        if choice.control >= 0:
            yield (("leader", choice.what), system.lead(state, choice))


def _choices(system: System, state: State) -> tuple[Choice, ...]:
    """What the leader wants to write, at once or a while later."""
    decision = system.decide(state, NOW)
    if decision.choices or not decision.waits:
        return decision.choices
    return system.decide(state, SETTLED).choices


def _write_pending(system: System, state: State) -> State:
    rest = system.rests[state[REST]]
    assert rest.pending is not None
    control, held, _ = system.view(state)
    for one in rest.pending.transactions:
        after = leader.commit(one, control, held)
        if after is None:
            break
        leader.check(control, after)
        control = after
    new = list(state)
    new[CONTROL] = system.controls.number(control)
    new[REST] = system.rests.number(rest._replace(pending=None))
    return system.rest_in(new)


def _expired(system: System, state: State, number: int) -> State:
    new = list(state)
    new[NODES + system.count + number] = system.nothing
    return system.rest_in(new)


# ---- later


def mends(system: System, state: State) -> Iterator[Move]:
    """What may get well by itself, or never."""
    for number in range(system.count):
        there = system.machines[state[NODES + number]]
        if there.up and (there.cut or there.mute):
            yield (("heal", number), system.turn(state, number, ("heal",)))
        elif there.mute:
            again = Machine(
                local=machine.fresh(system.names[number], there.lives, len(there.local.devices)),
                lease=there.lease,
                lives=there.lives + 1,
            )
            # it registers at once: until then nobody could tell it from one that is still away
            new = list(state)
            new[NODES + number] = system.machines.number(again)
            yield (("back", number), system.turn(tuple(new), number, ("register",)))


def overdue(system: System, state: State, *, early: bool = False) -> State | None:
    """What the leader does once every deadline has passed; None if nothing.

    ``early``: although somebody could still do something.
    """
    if system.rests[state[REST]].pending is not None:
        return None
    choices = system.decide(state, LATE).choices
    before = state
    for choice in choices:
        if choice.control < 0:
            continue
        if isinstance(choice.action, DeclareDead) or state is before:
            # one pass, one write after the other: bookkeeping waits
            _, held, seen = system.view(state)
            again = system.choice(choice.action, state[CONTROL], held, seen)
            if again is not None and again.control >= 0:
                invariants.at_write(system, state, again.action)
                if isinstance(again.action, DeclareDead) and not early:
                    invariants.at_deadline(system, state, again.action)
                state = (again.control, *state[1:])
    return None if state is before else system.rest_in(list(state))


def faults(system: System, state: State) -> Iterator[Move]:
    """Everything that can go wrong now."""
    rest = system.rests[state[REST]]
    for kind in dict.fromkeys(kind for kinds in rest.budget for kind in kinds):
        left = list(rest.budget)
        left.remove(next(kinds for kinds in rest.budget if kind in kinds))
        fewer = system.rests.number(rest._replace(budget=tuple(left)))
        for label, after in _of_kind(system, state, kind):
            more = system.rests[after[REST]]
            spent = (
                fewer if more == rest else system.rests.number(more._replace(budget=tuple(left)))
            )
            yield (("***", kind, *label), (*after[:REST], spent, *after[REST + 1 :]))


def _of_kind(system: System, state: State, kind: str) -> Iterator[Move]:
    if kind == "glitch":
        yield from _glitches(system, state)
    elif kind == "verdict":
        if (after := overdue(system, state, early=True)) is not None:
            yield ((), after)
    elif kind == "misjudge":
        yield from _misjudged(system, state)
    elif kind in ("lead", "stall"):
        yield from _held_up(system, state, kind)
    elif kind == "drain":
        yield from _drained(system, state)
    else:
        for number in range(system.count):
            there = system.machines[state[NODES + number]]
            if there.up:
                yield from _of_node(system, state, kind, number, there)


def _of_node(
    system: System, state: State, kind: str, number: int, there: Machine
) -> Iterator[Move]:
    event: Event
    if kind in ("crash", "reboot"):
        local = machine.fresh(there.local.node, 0, len(there.local.devices))
        gone = Machine(local, up=False)
        if kind == "reboot":
            gone = gone._replace(mute=True, lease=there.lease, lives=there.lives)
        yield ((number,), _changed(system, state, number, gone))
    elif kind == "trainer":
        for one in there.processes:
            event = ("end", one.instance, TrainerExit(code=1))
            yield ((number, one.instance), system.turn(state, number, event))
    elif kind == "hang":
        for one in there.processes:
            if not one.hung:
                event = ("hang", one.instance)
                yield ((number, one.instance), system.turn(state, number, event))
    elif there.connected:
        if kind == "cut":
            yield ((number,), _changed(system, state, number, there._replace(cut=True)))
        elif kind == "mute":
            yield ((number,), _changed(system, state, number, there._replace(mute=True)))
        elif kind == "late" and not there.slow:
            for what in (NODE, ACK, PROGRESS):
                slow = there._replace(slow=what)
                yield ((number, what), _changed(system, state, number, slow))


def _changed(system: System, state: State, number: int, after: Machine) -> State:
    new = list(state)
    new[NODES + number] = system.machines.number(after)
    return system.rest_in(new)


def _glitches(system: System, state: State) -> Iterator[Move]:
    network = system.networks[state[NETWORK]]
    for group in network:
        if not group.broken:
            broken = tuple(one._replace(broken=True) if one is group else one for one in network)
            new = list(state)
            new[NETWORK] = system.networks.number(broken)
            yield ((group.number,), tuple(new))


def _drained(system: System, state: State) -> Iterator[Move]:
    control = system.controls[state[CONTROL]]
    for number, name in enumerate(system.names):
        flags = control.flags[number] or NodeFlags()
        if any(slot is not None and slot.node == name for slot in control.slots):
            drained = replace(flags, draining="drained")
            all_flags = (*control.flags[:number], drained, *control.flags[number + 1 :])
            new = list(state)
            new[CONTROL] = system.controls.number(control._replace(flags=all_flags))
            yield ((number,), system.rest_in(new))


def _misjudged(system: System, state: State) -> Iterator[Move]:
    _, held, seen = system.view(state)
    alive = [who for who, one in seen.suspects.items() if one.verdict is not Verdict.DEAD]
    alive += [who for who, one in seen.contacts.items() if one.line is Line.ANSWERS]
    for who in alive:
        _, _, wrong = system.view(state, who)
        for action in plan(wrong, NOW, SETTINGS):
            if isinstance(action, DeclareDead) and (action.node, action.incarnation) == who:
                choice = system.choice(action, state[CONTROL], held, wrong)
                if choice is not None:
                    yield ((who[0],), system.lead(state, choice))


def _held_up(system: System, state: State, kind: str) -> Iterator[Move]:
    rest = system.rests[state[REST]]
    if rest.pending is not None:
        return
    for choice in _choices(system, state):
        if choice.pending is None or not isinstance(choice.action, Transition | DeclareDead):
            continue
        pending = choice.pending._replace(deposed=kind == "lead")
        new = list(state)
        new[REST] = system.rests.number(rest._replace(pending=pending))
        if kind == "stall":
            yield ((choice.what,), tuple(new))
            continue
        control = system.controls[state[CONTROL]]
        after = control._replace(leader=control.leader + 1)
        parts = range(len(pending.transactions)) if len(pending.transactions) > 1 else range(1)
        for done in parts:  # it may have come to some of them
            written = control
            _, held, _ = system.view(state)
            for one in pending.transactions[:done]:
                written = leader.commit(one, written, held) or written
            rest_of = pending._replace(transactions=pending.transactions[done:])
            new[REST] = system.rests.number(rest._replace(pending=rest_of))
            new[CONTROL] = system.controls.number(written._replace(leader=after.leader))
            yield ((choice.what,), system.rest_in(list(new)))
