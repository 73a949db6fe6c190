# SPDX-License-Identifier: Apache-2.0
"""What a trainer process can do next. Whether it may is decided by ``workerd.protocol.phases``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from coordinator import model
from coordinator.model import Pull, Rendezvous, TrainerExit
from tests.sim.world import Network, Process, Violation, World, find, peers
from workerd.agent.actions import SendHold, SendRelease, SendRestore, SendStop, SendWelcome
from workerd.agent.state import Stopped
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do

Move: TypeAlias = tuple[str, Callable[[], World]]


def moves(world: World, name: str, me: Process) -> Iterator[Move]:
    """Everything that this process could do now."""
    if me.hung:
        return
    label = f"{name}/{me.instance}"
    standing = me.standing
    if me.inbox:
        what = type(me.inbox[0]).__name__
        yield f"{label} receives {what}", partial(_receive, world, name, me)
    answer = phases.may_answer(standing)
    if answer.do is Do.GO:
        yield f"{label} answers {standing.stopped}", partial(_answer, world, name, me)
    if me.welcomed and not standing.ready:
        yield f"{label} is ready", partial(_ready, world, name, me)
    if standing.phase is StepPhase.UPDATING:
        yield f"{label} has updated", partial(_updated, world, name, me)
    elif standing.stopped > standing.joined:
        if standing.restored == standing.stopped:
            yield from _restoring(world, name, me, label)
    elif standing.joined:
        yield from _running(world, name, me, label)


# ---- the background thread


def _receive(world: World, name: str, me: Process) -> World:
    message, rest = me.inbox[0], me.inbox[1:]
    me = replace(me, inbox=rest)
    if isinstance(message, SendWelcome):
        return _set(world, name, replace(me, welcomed=True, spare=message.spare))
    if isinstance(message, SendStop):
        verdict = phases.on_stop(me.standing, message.generation)
        me = replace(me, standing=verdict.standing, rank=message.rank, pull=None)
        return _set(world, name, me)
    if isinstance(message, SendRestore):
        return _restore(world, name, me, message)
    if isinstance(message, SendHold):
        return _set(world, name, replace(me, wish=message.generation))
    if isinstance(message, SendRelease):
        return end(world, name, me, TrainerExit())
    return _set(world, name, me)


def _restore(world: World, name: str, me: Process, message: SendRestore) -> World:
    same = any(one.initial_digest == me.digest for one in message.sources)
    before = me.standing
    verdict = phases.on_restore(
        before, message.generation, message.resume_step, message.initial, same
    )
    if verdict.do is Do.REFUSE:
        raise Violation(f"rank {me.rank} on {name} refuses RESTORE: {verdict.reason}")
    me = replace(me, standing=verdict.standing, sources=message.sources, reserve=message.reserve)
    if verdict.do is Do.ADOPT:
        me = replace(me, lineage=(me.digest,))
    return _set(world, name, me)


def _answer(world: World, name: str, me: Process) -> World:
    verdict = phases.may_answer(me.standing)
    standing = verdict.standing
    digest = me.digest if standing.phase is StepPhase.EMPTY and standing.pristine else ""
    stopped = Stopped(
        generation=standing.stopped,
        phase=model.StepPhase(standing.phase),
        step=standing.step,
        initial_digest=digest,
        shard_address=f"{name}:{me.instance}",
        offer=Rendezvous(f"{name}:{me.instance}", f"{me.instance}.{standing.stopped}"),
        held=phases.at_boundary(standing),
    )
    return _tell(world, name, replace(me, standing=standing), stopped=stopped)


def _ready(world: World, name: str, me: Process) -> World:
    standing = phases.ready(me.standing).standing
    if me.spare:
        standing = phases.dirty(standing).standing
    return _tell(world, name, replace(me, standing=standing), ready=True)


# ---- between RESTORE and the new group


def _restoring(world: World, name: str, me: Process, label: str) -> Iterator[Move]:
    standing = me.standing
    number = standing.stopped
    if phases.holds(standing, number).do is Do.GO:
        if me.restored < number:
            yield f"{label} has restored", partial(_restored, world, name, me)
        elif not me.reserve and len(world.network.arrived[number]) == len(
            world.network.members[number]
        ):
            yield f"{label} joins {number}", partial(_join, world, name, me)
    if standing.phase is StepPhase.PREPARED and standing.resume_step == standing.step + 1:
        yield f"{label} rolls forward", partial(_roll_forward, world, name, me)
    elif standing.phase is StepPhase.EMPTY and me.pull is None:
        for source in me.sources:
            if _serving(world, source.instance, number, standing.resume_step):
                yield (
                    f"{label} pulls from {source.node}/{source.instance}",
                    partial(_pull, world, name, me, source.instance),
                )
    elif standing.phase is StepPhase.EMPTY and me.pull is not None:
        if _serving(world, me.pull[0], number, standing.resume_step):
            yield f"{label} has pulled", partial(_pulled, world, name, me)
        else:
            yield f"{label}'s pull breaks", partial(_set, world, name, replace(me, pull=None))


def _serving(world: World, instance: str, generation: int, step: int) -> bool:
    found = find(world, instance)
    return (
        found is not None
        and not found[1].hung
        and phases.may_serve(found[1].standing, generation, step).do is Do.GO
    )


def _pull(world: World, name: str, me: Process, instance: str) -> World:
    verdict = phases.pulling(me.standing, me.standing.stopped)
    found = find(world, instance)
    if verdict.do is not Do.GO or found is None:
        raise Violation(f"rank {me.rank} may not pull: {verdict.reason}")
    me = replace(me, standing=verdict.standing, pull=(instance, found[1].lineage))
    return _set(world, name, me)


def _pulled(world: World, name: str, me: Process) -> World:
    assert me.pull is not None
    found = find(world, me.pull[0])
    assert found is not None
    if found[1].lineage != me.pull[1] or found[1].standing.phase is StepPhase.UPDATING:
        raise Violation(f"the state that rank {me.rank} pulled changed under the pull")
    verdict = phases.pulled(me.standing, me.standing.stopped)
    me = replace(me, standing=verdict.standing, lineage=me.pull[1], pull=None)
    return _tell(world, name, me, pull=Pull(source=found[0], bytes=1))


def _roll_forward(world: World, name: str, me: Process) -> World:
    verdict = phases.may_update(me.standing, agreed=False)
    if verdict.do is not Do.GO:
        raise Violation(f"rank {me.rank} can't roll forward: {verdict.reason}")
    return _set(world, name, replace(me, standing=verdict.standing))


def _restored(world: World, name: str, me: Process) -> World:
    number = me.standing.stopped
    there = world.network.arrived.get(number, {})
    mine = (me.instance, me.standing.step, me.lineage)
    before = there.get(me.rank)
    if before is not None and before[0] != me.instance and not me.reserve:
        raise Violation(f"{me.instance} and {before[0]} both join {number} as rank {me.rank}")
    for rank, other in there.items():
        if other[1] != mine[1]:
            raise Violation(
                f"generation {number} would go on from different steps: rank {rank} from "
                f"{other[1]}, rank {me.rank} from {mine[1]}"
            )
        if world.spec.shard_position(rank) == world.spec.shard_position(me.rank):
            same = other[2] == mine[2]
        else:  # positions begin from different states, but take the same gradients
            same = other[2][1:] == mine[2][1:]
        if not same:
            raise Violation(
                f"generation {number} would go on from different states: rank {rank} has "
                f"{other[2]}, rank {me.rank} has {mine[2]}"
            )
    if not me.reserve:
        arrived = {**world.network.arrived, number: {**there, me.rank: mine}}
        world = replace(world, network=replace(world.network, arrived=arrived))
    return _tell(world, name, replace(me, restored=number), restored=number)


def _join(world: World, name: str, me: Process) -> World:
    number = me.standing.stopped
    verdict = phases.joined(me.standing, number)
    if verdict.do is not Do.GO:
        raise Violation(f"rank {me.rank} can't join {number}: {verdict.reason}")
    before = world.history.joined.get(number, frozenset())
    joined = {**world.history.joined, number: before | {me.rank}}
    world = replace(world, history=replace(world.history, joined=joined))
    world = _enter(world, me.rank, number, 3 * verdict.standing.step)
    return _tell(world, name, replace(me, standing=verdict.standing), joined=number)


# ---- in the group


def _running(world: World, name: str, me: Process, label: str) -> Iterator[Move]:
    standing = me.standing
    number, step = standing.joined, standing.step
    if standing.phase is StepPhase.DONE or me.broken == number:
        return
    if phases.at_boundary(standing):
        return
    if standing.phase is StepPhase.COMPUTING and step >= world.total:
        yield f"{label} is done", partial(_finish, world, name, me)
        return
    if number in world.network.broken or _peer_is_gone(world, me):
        yield f"{label} sees group {number} break", partial(_breaks, world, name, me)
    replica = peers(world, number, me.rank, replica=True)
    group = peers(world, number, me.rank, replica=False)
    level = world.network.levels[number, me.rank]
    if standing.phase is StepPhase.COMPUTING:
        if _entered(world.network, number, group, 3 * step):
            yield f"{label} is PREPARED({step})", partial(_prepare, world, name, me)
    elif standing.phase is StepPhase.PREPARED:
        if len(replica) > 1 and level == 3 * step + 1:
            if _entered(world.network, number, replica, level):
                yield (
                    f"{label}: its replica agrees",
                    partial(_enter, world, me.rank, number, level + 1),
                )
        elif _entered(world.network, number, group, level):
            yield f"{label} is UPDATING({step})", partial(_update, world, name, me)


def _entered(network: Network, number: int, ranks: Any, level: int) -> bool:
    return all(network.levels.get((number, rank), -1) >= level for rank in ranks)


def _enter(world: World, rank: int, number: int, level: int) -> World:
    levels = {**world.network.levels, (number, rank): level}
    return replace(world, network=replace(world.network, levels=levels))


def _peer_is_gone(world: World, me: Process) -> bool:
    here = {
        other.rank: other
        for node in world.nodes.values()
        if node.up
        for other in node.processes.values()
        if other.standing.joined == me.standing.joined
    }
    for rank, (instance, _, _) in world.network.arrived[me.standing.joined].items():
        other = here.get(rank)
        if other is None or other.instance != instance:
            found = find(world, instance)
            if found is None:
                return True
            other = found[1]
        if other.standing.stopped > me.standing.joined or other.broken == me.standing.joined:
            return True
    return False


def _breaks(world: World, name: str, me: Process) -> World:
    number = me.standing.joined
    return _tell(
        world, name, replace(me, broken=number), broken_generation=number, broken="a peer is gone"
    )


def _prepare(world: World, name: str, me: Process) -> World:
    verdict = phases.prepare(me.standing)
    if verdict.do is not Do.GO:
        raise Violation(f"rank {me.rank} can't prepare: {verdict.reason}")
    number, step = me.standing.joined, me.standing.step
    before = world.history.prepared.get((number, step), frozenset())
    prepared = {**world.history.prepared, (number, step): before | {me.rank}}
    world = replace(world, history=replace(world.history, prepared=prepared))
    world = _enter(world, me.rank, number, 3 * step + 1)
    if me.wish == number:
        wishes = world.network.wishes | {(number, step)}
        world = replace(world, network=replace(world.network, wishes=wishes))
    return _set(world, name, replace(me, standing=verdict.standing, prepared_in=number))


def _update(world: World, name: str, me: Process) -> World:
    number, step = me.standing.joined, me.standing.step
    stop_after = (number, step) in world.network.wishes
    verdict = phases.may_update(me.standing, agreed=True, stop_after=stop_after)
    if verdict.do is not Do.GO:
        raise Violation(f"rank {me.rank} can't update: {verdict.reason}")
    prepared = world.history.prepared.get((number, step), frozenset())
    if prepared != world.network.members[number]:
        raise Violation(
            f"rank {me.rank} goes on to {step + 1}, but only {sorted(prepared)} were PREPARED"
        )
    return _set(world, name, replace(me, standing=verdict.standing))


def _updated(world: World, name: str, me: Process) -> World:
    verdict = phases.updated(me.standing)
    standing = verdict.standing
    me = replace(me, standing=standing, lineage=(*me.lineage, f"g{me.prepared_in}"))
    if len(me.lineage) != standing.step + 1:
        raise Violation(f"rank {me.rank} has applied {me.lineage} to come to state {standing.step}")
    highest = max(world.history.highest, standing.step)
    world = replace(world, history=replace(world.history, highest=highest))
    if standing.stopped > standing.joined:
        return _set(world, name, me)
    if phases.at_boundary(standing):
        return _tell(world, name, me, committed=standing.joined, held=standing.joined)
    world = _enter(world, me.rank, standing.joined, 3 * standing.step)
    return _tell(world, name, me, committed=standing.joined)


def _finish(world: World, name: str, me: Process) -> World:
    verdict = phases.finish(me.standing)
    if verdict.do is not Do.GO:
        raise Violation(f"rank {me.rank} can't finish: {verdict.reason}")
    digest = "/".join(me.lineage)
    me = replace(me, standing=verdict.standing)
    return _tell(world, name, me, done_step=verdict.standing.step, digest=digest)


# ---- the link to workerd


def _set(world: World, name: str, me: Process) -> World:
    node = world.nodes[name]
    return world.node(name, processes={**node.processes, me.instance: me})


def _tell(world: World, name: str, me: Process, **facts: Any) -> World:
    """Change a process, and what workerd knows of it."""
    local = world.nodes[name].local
    facts |= {"step": me.standing.step, "phase": model.StepPhase(me.standing.phase)}
    trainers = tuple(
        replace(one, **facts) if one.instance == me.instance else one for one in local.trainers
    )
    world = _set(world, name, me)
    return world.node(name, local=replace(local, trainers=trainers), idle=False)


def end(world: World, name: str, me: Process, how: TrainerExit) -> World:
    """The process is gone, and workerd knows."""
    node = world.nodes[name]
    trainers = tuple(
        replace(one, ended_at=0.0, exit=how, cleared=True, connected=False)
        if one.instance == me.instance
        else one
        for one in node.local.trainers
    )
    processes = {key: one for key, one in node.processes.items() if key != me.instance}
    return world.node(
        name, processes=processes, local=replace(node.local, trainers=trainers), idle=False
    )
