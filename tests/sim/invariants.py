# SPDX-License-Identifier: Apache-2.0
"""What must hold after every write of a leader, and at the end of a run.

What must hold of every step of a trainer is checked where the step is taken.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import Cause, Generation, JobSpec, JobState, Phase, Slot
from coordinator.store import KeyKind, keys
from tests.sim import operators
from tests.sim.etcd import Etcd, parsed
from tests.sim.world import JOB, Process, Violation, World
from workerd.protocol.page import StepPhase


def slots(etcd: Etcd, job: str = JOB) -> dict[int, Slot]:
    """The slots of a job."""
    return {
        parsed(key).number: etcd.get(key)
        for key in etcd.items
        if parsed(key).kind is KeyKind.SLOT and parsed(key).job == job
    }


def members_of(spec: JobSpec, generation: Generation) -> frozenset[int]:
    """The ranks of the replicas that a generation has."""
    gone = generation.absent_replicas
    return frozenset(one for one in range(spec.ranks) if spec.replica(one) not in gone)


def after_write(before: World, world: World) -> World:
    """Check a leader's write; returns the world with its history."""
    old: Generation | None = before.etcd.get(keys.generation(JOB))
    new: Generation | None = world.etcd.get(keys.generation(JOB))
    _one_place(world.etcd)
    _judged(before, world)
    if new is None or new == old:
        return world
    was = (0, 0) if old is None else (old.generation, old.phase)
    if old is not None and new == replace(old, hold=new.hold) and not old.hold:
        if new.phase is not Phase.RUNNING:
            raise Violation(f"generation {new.generation} is held in {new.phase.name}")
        return world
    if (new.generation, new.phase) <= was or new.generation > was[0] + 1:
        raise Violation(f"the record goes from {was} to {(new.generation, new.phase)}")
    if new.generation == was[0] + 1 and new.phase not in (Phase.PAUSE, Phase.STOPPED):
        raise Violation(f"generation {new.generation} begins with {new.phase.name}")
    if new.generation == was[0] and was[1] == Phase.PAUSE and new.phase is Phase.RUNNING:
        raise Violation(f"generation {new.generation} runs without a RESTORE")
    _empty_slots(world.etcd, new)
    if new.phase is Phase.RESTORE:
        _restore(world, new)
        members = {**world.network.members, new.generation: members_of(world.spec, new)}
        world = replace(world, network=replace(world.network, members=members))
    elif new.phase is Phase.RUNNING:
        joined = world.history.joined.get(new.generation, frozenset())
        if joined != world.network.members[new.generation]:
            raise Violation(f"RUNNING, but only ranks {sorted(joined)} have joined")
    elif new.phase is Phase.LOST:
        _lost(world, new)
    elif new.phase is Phase.FINISHED:
        _finished(world)
    elif new.phase is Phase.FAILED and not any("trainer" in one for one in world.history.faults):
        raise Violation(f"FAILED, although no trainer has ended by itself: {new.reason}")
    history = replace(world.history, generations=max(world.history.generations, new.generation))
    return replace(world, history=history)


def _one_place(etcd: Etcd) -> None:
    """No node has two places, and who owns a slot has its assignment."""
    seen: dict[str, int] = {}
    for number, slot in slots(etcd).items():
        if not slot.node:
            continue
        if slot.node in seen:
            raise Violation(f"node {slot.node} owns slots {seen[slot.node]} and {number}")
        seen[slot.node] = number
    generation = etcd.get(keys.generation(JOB))
    if generation is None or generation.phase.ended:
        return
    for node, number in seen.items():
        held = etcd.get(keys.assignment(node))
        if held is None or held.slot != number:
            raise Violation(f"slot {number} is {node}'s, which is assigned {held}")


def _judged(before: World, world: World) -> None:
    """Rule 8: who still has its lease isn't declared dead as the last holder of a position.

    Before RUNNING has been recorded for the first time, all may begin anew instead.
    """
    generation = before.etcd.get(keys.generation(JOB))
    if generation is None or not generation.last_running_generation:
        return
    for name, node in world.nodes.items():
        key = keys.flags(name)
        if world.etcd.mod_revision(key) == before.etcd.mod_revision(key) or not node.up:
            continue
        live = before.etcd.get(keys.node(name))
        if live is None or not world.etcd.get(key).is_dead(live.incarnation):
            continue
        if live.incarnation != node.local.incarnation:
            continue
        held = {
            world.spec.shard_position(one.rank)
            for one in node.processes.values()
            if one.standing.phase is not StepPhase.EMPTY
        }
        for other, there in world.nodes.items():
            if other == name or before.etcd.get(keys.node(other)) is None:
                continue  # without a lease nobody can count on it
            if not there.up:
                return  # the leader can't know yet that this one's state is gone
            held -= {
                world.spec.shard_position(one.rank)
                for one in there.processes.values()
                if one.standing.phase is not StepPhase.EMPTY
            }
        if held:
            raise Violation(f"{name} is given up, the last holder of shard positions {held}")


def _empty_slots(etcd: Etcd, generation: Generation) -> None:
    empty = tuple(sorted(number for number, slot in slots(etcd).items() if not slot.node))
    if not generation.phase.ended and empty != generation.empty_slots:
        raise Violation(f"slots {empty} are empty, the record says {generation.empty_slots}")


def _restore(world: World, new: Generation) -> None:
    if not new.initial and new.resume_step < world.history.highest - 1:
        raise Violation(
            f"S = {new.resume_step}, but a rank has come to state {world.history.highest}"
        )
    present = members_of(world.spec, new)
    if len(new.absent_replicas) > world.spec.replicas - world.spec.fewest:
        raise Violation(f"replicas {new.absent_replicas} are absent, {world.spec.fewest} needed")
    for number, slot in slots(world.etcd).items():
        ranks = {world.spec.rank(number, one) for one in range(world.spec.ranks_per_node)}
        if not ranks & present and not slot.node:
            continue
        if bool(ranks & present) != (ranks <= present):
            raise Violation(f"slot {number} has ranks of absent replicas and of others")
        if not slot.node or not all(rank.instance for rank in slot.ranks):
            raise Violation(f"RESTORE, but slot {number} names {slot}")
    _planned(world, new)
    for source in new.sources:
        ack = world.etcd.get(keys.ack(JOB, source.node))
        if ack is not None and ack.generation != new.generation:
            raise Violation(f"source {source} is named by an ack of generation {ack.generation}")


def _planned(world: World, new: Generation) -> None:
    """A planned change to which nothing else comes costs no step."""
    incident = world.etcd.get(keys.incident(new.incident)) if new.incident else None
    if incident is None or incident.cause is not Cause.PLANNED:
        return
    if any(one.startswith("*** ") and not _by_operator(one) for one in world.history.faults):
        return
    if incident.lost_steps:
        raise Violation(f"a planned change costs {incident.lost_steps} steps: {incident.detail}")
    begun = world.history.prepared.get((new.generation - 1, new.resume_step))
    if begun:
        raise Violation(f"ranks {sorted(begun)} had computed step {new.resume_step} in vain")


def _by_operator(fault: str) -> bool:
    words = ("is cordoned", "is drained", "is replaced", "is paused", "is scaled to")
    return any(one in fault for one in words)


def holders(world: World) -> dict[int, list[Process]]:
    """The living trainers that hold the state to go on from, by shard position.

    Those that ran in the last generation that did, or that a slot names, whose incarnations
    aren't recorded dead: the others have been replaced, even if they don't know it yet.
    """
    generation: Generation = world.etcd.get(keys.generation(JOB))
    named = {rank.instance for slot in slots(world.etcd).values() for rank in slot.ranks}
    living: list[Process] = []
    for name, node in world.nodes.items():
        flags = world.etcd.get(keys.flags(name))
        if not node.up or (flags is not None and flags.is_dead(node.local.incarnation)):
            continue
        living += [
            one
            for one in node.processes.values()
            if one.standing.phase is not StepPhase.EMPTY
            and one.rank >= 0
            and (one.standing.joined >= generation.last_running_generation or one.instance in named)
        ]
    step = max((one.standing.step for one in living), default=-1)
    gradients = {one.lineage[-1] for one in living if one.standing.step == step}
    found: dict[int, list[Process]] = {}
    for one in living:
        rolls = one.standing.phase is StepPhase.PREPARED and f"g{one.prepared_in}" in gradients
        if one.standing.step == step or (one.standing.step == step - 1 and rolls):
            found.setdefault(world.spec.shard_position(one.rank), []).append(one)
    return found


def _lost(world: World, new: Generation) -> None:
    if not world.history.faults:
        raise Violation("LOST, although nothing has failed")
    if len(holders(world)) == world.spec.shard_positions:
        raise Violation(f"LOST ({new.reason}), although every shard position has a living holder")


def _finished(world: World) -> None:
    names = {rank.instance for slot in slots(world.etcd).values() for rank in slot.ranks}
    for node in world.nodes.values():
        for process in node.processes.values():
            if process.instance in names and node.up:
                standing = process.standing
                if standing.phase is not StepPhase.DONE or standing.step != world.total:
                    raise Violation(
                        f"FINISHED, but rank {process.rank} is in "
                        f"{standing.phase.name}({standing.step})"
                    )


def at_end(world: World) -> str:
    """Nothing can happen any more: say what it has come to, if that is an end."""
    etcd = world.etcd
    generation: Generation | None = etcd.get(keys.generation(JOB))
    status = etcd.get(keys.job_status(JOB))
    if status is None:
        raise Violation("the job has no status")
    if generation is not None and generation.phase.ended:
        if status.state.name != generation.phase.name:
            raise Violation(f"the job is {generation.phase.name}, its status {status.state.name}")
        told = status.step == world.total and all(status.digests)
        if status.state is JobState.FINISHED and not told:
            raise Violation(f"FINISHED with {status}")
        _nothing_left(world)
        return str(status.state.name)
    if status.state is not JobState.WAITING or not status.reason:
        raise Violation(f"no end: {generation and generation.phase.name}, {status}")
    if "given up" in status.reason and world.history.highest == 0:
        ran = generation is not None and generation.last_running_generation
        if not ran:
            raise Violation(f"WAITING for a state that was never there: {status.reason}")
    hopeless = [
        name
        for name, node in world.nodes.items()
        if not node.connected or any(one.hung for one in node.processes.values())
    ]
    if not hopeless:
        raise Violation(f"WAITING although every node is well: {status.reason}")
    free = [
        name
        for name, node in world.nodes.items()
        if node.connected
        and etcd.get(keys.assignment(name)) is None
        and not operators.kept_off(world, name)
    ]
    if generation is not None:
        present = members_of(world.spec, generation)
        waits = [one for one in generation.empty_slots if world.spec.rank(one, 0) in present]
        if free and waits:
            raise Violation(f"slots {waits} are empty although {free} are free")
    return f"WAITING: {status.reason}"


def _nothing_left(world: World) -> None:
    """An ended job has no places, no spares and no trainers, but where a node can't hear of it."""
    for name, node in world.nodes.items():
        deaf = node.up and not node.connected
        if deaf or any(one.hung for one in node.processes.values()):
            continue
        if node.up and node.processes:
            raise Violation(f"{name} still runs {sorted(node.processes)}")
        for key in (keys.assignment(name), keys.spare(name)):
            if world.etcd.get(key) is not None:
                raise Violation(f"{key} is left over: {world.etcd.get(key)}")
