# SPDX-License-Identifier: Apache-2.0
"""What must hold. See also ``machine`` (a trainer's own) and ``leader.check`` (the records')."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.model import Generation, JobSpec, JobState, NodeFlags, Phase, Slot
from coordinator.plan import Action, DeclareDead, Transition, Wait, plan, status
from tests.modelcheck.leader import LATE, SETTINGS
from tests.modelcheck.planner import NODES, REST, State
from tests.modelcheck.trainers import Effect
from tests.modelcheck.values import JOB, Arrival, Group, Process, Violation, present
from workerd.protocol.page import StepPhase

if TYPE_CHECKING:
    from tests.modelcheck.system import System


def carried(network: tuple[Group, ...], effect: Effect, spec: JobSpec) -> tuple[Group, ...]:
    """Carry out what a rank does to its group, and check that it may."""
    what, number, rank, value = effect
    group = next((one for one in network if one.number == number), None)
    if what == "arrive":
        arrival, members = value
        empty = Group(number, members, (None,) * spec.ranks, (-1,) * spec.ranks)
        group = _arrived(group or empty, rank, arrival, spec)
    elif group is None:
        return network
    elif what == "wish":
        group = group._replace(wish=value)
    else:
        levels = (*group.levels[:rank], value, *group.levels[rank + 1 :])
        group = group._replace(levels=levels)
    others = [one for one in network if one.number != number]
    return tuple(sorted([*others, group]))


def _arrived(group: Group, rank: int, mine: Arrival, spec: JobSpec) -> Group:
    before = group.arrived[rank]
    if before is not None and before.instance != mine.instance:
        raise Violation(
            f"{mine.instance} and {before.instance} both join {group.number} as rank {rank}"
        )
    for other, there in enumerate(group.arrived):
        if there is None:
            continue
        if there.step != mine.step:
            raise Violation(
                f"generation {group.number} would go on from different steps: rank {other} from "
                f"{there.step}, rank {rank} from {mine.step}"
            )
        # positions begin from different states, but take the same gradients
        same = there.lineage[1:] == mine.lineage[1:]
        if spec.shard_position(other) == spec.shard_position(rank):
            same = there.lineage == mine.lineage
        if not same:
            raise Violation(
                f"generation {group.number} would go on from different states: rank {other} has "
                f"{there.lineage}, rank {rank} has {mine.lineage}"
            )
    arrived = (*group.arrived[:rank], mine, *group.arrived[rank + 1 :])
    return group._replace(arrived=arrived)


def may_update(group: Group, me: Process, step: int) -> None:
    """s+1 anywhere means PREPARED(s) everywhere, in the same generation."""
    missing = [rank for rank in group.members if group.levels[rank] < 3 * step + 1]
    if missing:
        raise Violation(
            f"rank {me.rank} goes on to {step + 1}, but ranks {missing} were not PREPARED"
        )


def at_write(system: System, state: State, action: Action) -> None:
    """What must hold of the machines when a leader writes something."""
    if isinstance(action, DeclareDead):
        _judged(system, state, action)
    if not isinstance(action, Transition):
        return
    record = action.generation
    if record.phase is Phase.RESTORE:
        highest = system.rests[state[REST]].highest
        if not record.initial and record.resume_step < highest - 1:
            raise Violation(f"S = {record.resume_step}, but a rank has come to state {highest}")
        if system.shape.faults == (("drain",),):
            _planned(system, state, record.resume_step, highest)
    elif record.phase is Phase.RUNNING:
        group = system.group(state[1], record.generation)
        if group is not None and any(group.levels[rank] < 0 for rank in group.members):
            raise Violation(f"RUNNING, but not all have joined: {group.levels}")
    elif record.phase is Phase.LOST:
        _lost(system, state, record)
    elif record.phase is Phase.FINISHED:
        _finished(system, state)
    elif record.phase is Phase.FAILED and ("trainer",) not in system.shape.faults:
        raise Violation(f"FAILED, although no trainer has ended by itself: {record.reason}")


def _planned(system: System, state: State, step: int, highest: int) -> None:
    """A planned change to which no failure comes costs no step."""
    begun = [
        process.rank
        for own in state[NODES : NODES + system.count]
        for process in system.machines[own].processes
        if process.standing.phase is StepPhase.PREPARED and process.standing.step == step
    ]
    if step < highest or begun:
        raise Violation(f"a planned change: ranks {begun} had computed step {step} in vain")


def _judged(system: System, state: State, action: DeclareDead) -> None:
    """Rule 8: who still has its lease isn't declared dead as the last holder of a position.

    Before RUNNING has been recorded for the first time, all may begin anew instead.
    """
    generation = system.controls[state[0]].generation
    if generation is None or not generation.last_running_generation:
        return
    number = int(action.node[1:])
    machine = system.machines[state[NODES + number]]
    key = system.keys[state[NODES + system.count + number]]
    if not machine.up or key is None or key.record.incarnation != action.incarnation:
        return
    if machine.local.incarnation != action.incarnation:
        return
    held = _positions(system, machine.processes)
    for other in range(system.count):
        if other == number or system.keys[state[NODES + system.count + other]] is None:
            continue  # without a lease nobody can count on it
        there = system.machines[state[NODES + other]]
        if not there.up:
            return  # the leader can't know yet that this one's state is gone
        held -= _positions(system, there.processes)
    if held:
        raise Violation(f"{action.node} is given up, the last holder of shard positions {held}")


def _positions(system: System, processes: tuple[Process, ...]) -> set[int]:
    return {
        system.spec.shard_position(one.rank)
        for one in processes
        if one.standing.phase is not StepPhase.EMPTY and one.rank >= 0
    }


def _lost(system: System, state: State, record: Generation) -> None:
    """LOST only where a position has no living holder.

    A node that was given up, and that hasn't noticed yet, may still hold state when a second
    fault takes the last owner: one fault alone must never come to that.
    """
    faults = len(system.shape.faults) - len(system.rests[state[REST]].budget)
    if not faults:
        raise Violation("LOST, although nothing has failed")
    control = system.controls[state[0]]
    owned = {slot.node: slot for slot in control.slots if slot is not None and slot.node}
    held: set[int] = set()
    for number, name in enumerate(system.names):
        machine = system.machines[state[NODES + number]]
        if not machine.up:
            continue
        processes = machine.processes
        if faults > 1:
            processes = _meant(owned.get(name), machine.local.incarnation, processes)
            flags = control.flags[number]
            if flags is not None and flags.is_dead(machine.local.incarnation):
                processes = ()
        held |= _positions(system, processes)
    if len(held) == system.spec.shard_positions:
        raise Violation(f"LOST ({record.reason}), although every position has a living holder")


def _meant(
    slot: Slot | None, incarnation: str, processes: tuple[Process, ...]
) -> tuple[Process, ...]:
    if slot is None or slot.incarnation != incarnation:
        return ()
    named = {rank.instance for rank in slot.ranks}
    return tuple(one for one in processes if one.instance in named)


def _finished(system: System, state: State) -> None:
    control = system.controls[state[0]]
    assert control.generation is not None
    members = present(system.spec, control.generation)
    names = {rank.instance for slot in control.slots if slot for rank in slot.ranks}
    for own in state[NODES : NODES + system.count]:
        for process in system.machines[own].processes:
            standing = process.standing
            whole = standing.phase is StepPhase.DONE and standing.step == system.shape.steps
            if process.instance in names and process.rank in members and not whole:
                raise Violation(
                    f"FINISHED, but rank {process.rank} is in "
                    f"{standing.phase.name}({standing.step})"
                )


def at_deadline(system: System, state: State, action: DeclareDead) -> None:
    """Who is given up when nothing else happens any more can't answer: nobody waits in silence."""
    machine = system.machines[state[NODES + int(action.node[1:])]]
    hung = any(one.hung for one in machine.processes)
    if machine.connected and not hung and machine.local.incarnation == action.incarnation:
        raise Violation(f"{action.node} is well, and given up: {action.reason}")


def at_end(system: System, state: State) -> str:
    """Nothing can happen any more: say what it has come to, if that is an end."""
    control, _, seen = system.view(state)
    generation = control.generation
    faults = len(system.shape.faults) - len(system.rests[state[REST]].budget)
    if generation is not None and generation.phase.ended:
        if generation.phase is not Phase.FINISHED and faults < 2 and system.shape.replicas > 1:
            raise Violation(f"{faults} failures have cost the job: {generation.reason}")
        return generation.phase.name
    actions = plan(seen, LATE, SETTINGS)
    wait = next((one for one in actions if isinstance(one, Wait)), None)
    told = status.of(seen.jobs[JOB], wait)
    if told.state is not JobState.WAITING or not told.reason:
        raise Violation(f"no end: {generation and generation.phase.name}, {told}")
    if "violated" in told.reason:
        raise Violation(told.reason)
    shape = system.shape
    if faults <= shape.spares or (shape.fewest and faults <= shape.replicas - shape.fewest):
        raise Violation(f"{faults} failures and it waits: {told.reason}")
    hopeless = [
        own
        for own in state[NODES : NODES + system.count]
        if not system.machines[own].connected
        or any(one.hung for one in system.machines[own].processes)
    ]
    if not hopeless:
        raise Violation(f"WAITING although every node is well: {told.reason}")
    free = [
        name
        for number, name in enumerate(system.names)
        if system.machines[state[NODES + number]].connected
        and control.assignments[number] is None
        and not (control.flags[number] or NodeFlags()).draining
    ]
    members = () if generation is None else present(system.spec, generation)
    empty = () if generation is None else generation.empty_slots
    waits = [one for one in empty if system.spec.rank(one, 0) in members]
    if free and waits:
        raise Violation(f"slots {waits} are empty although {free} are free")
    return "WAITING"
