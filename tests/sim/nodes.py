# SPDX-License-Identifier: Apache-2.0
"""What a node can do next: read its orders, decide by ``workerd.agent``, write, register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from coordinator.model import (
    Device,
    DeviceKind,
    Node,
    NodeFlags,
    Phase,
    TrainerExit,
)
from coordinator.store import Absent, Created, Delete, Unchanged, Write, keys
from tests.sim import trainers
from tests.sim.etcd import Etcd, Lease, put
from tests.sim.trainers import Move
from tests.sim.world import LIMITS, Process, SimNode, World
from workerd.agent.actions import Action as NodeAction
from workerd.agent.actions import (
    AskStacks,
    ClearPlace,
    EndTrainer,
    ForgetTrainer,
    KillTrainer,
    PlaceTrainer,
    Renew,
    SendHold,
    SendRelease,
    SendRestore,
    SendRunning,
    SendStop,
    SendWelcome,
    StartTrainer,
    WriteAck,
    WriteNode,
    WriteProgress,
)
from workerd.agent.decide import decide
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import JobOrders, Local, Orders, TrainerFacts, Written

_KIND = {WriteNode: NODE, WriteAck: ACK, WriteProgress: PROGRESS, ClearPlace: PROGRESS}


def fresh(name: str, life: int, devices: int) -> Local:
    """A workerd that has just started."""
    return Local(
        now=0.0,
        template=Node(
            node=name,
            incarnation=f"{name}-{life}",
            control_address=name,
            devices=tuple(Device(DeviceKind.CPU, index) for index in range(devices)),
        ),
    )


def moves(world: World, name: str) -> Iterator[Move]:
    """Everything that could happen on this node now."""
    node = world.nodes[name]
    if not node.up:
        return
    if node.connected:
        if node.local.registered and world.etcd.created(keys.node(name)) != node.created:
            yield f"{name} notices that its lease is gone", partial(_unregistered, world, name)
        if read(world.etcd, name, node.local) != node.orders:
            yield f"{name} reads its orders", partial(_read, world, name)
        if not node.local.registered and not _dead(world.etcd, node.local):
            yield f"{name} registers", partial(_register, world, name)
        for number, write in enumerate(node.outbox):
            yield f"{name}: {type(write).__name__}", partial(_write, world, name, number)
    if not node.mute and not node.idle:
        yield f"{name} decides", partial(_decide, world, name)
    for facts in node.local.trainers:
        process = node.processes.get(facts.instance)
        if process is not None and facts.ending:
            gone = partial(trainers.end, world, name, process, TrainerExit(signal=15))
            yield f"{name}/{facts.instance} ends as told", gone
    for process in node.processes.values():
        yield from trainers.moves(world, name, process)


def _dead(etcd: Etcd, local: Local) -> bool:
    flags = etcd.get(keys.flags(local.node))
    return flags is not None and bool(flags.is_dead(local.incarnation))


def read(etcd: Etcd, name: str, local: Local) -> Orders:
    """What etcd says to a node, at one revision."""
    assignment = etcd.get(keys.assignment(name))
    spare = etcd.get(keys.spare(name))
    wanted = {one.job for one in local.trainers}
    wanted |= {one.job for one in (assignment, spare) if one is not None}
    jobs = {}
    for job in sorted(wanted):
        mine = assignment is not None and assignment.job == job
        jobs[job] = JobOrders(
            job=etcd.get(keys.job_spec(job)),
            generation=etcd.get(keys.generation(job)),
            slot=etcd.get(keys.slot(job, assignment.slot)) if mine else None,
            ack=etcd.get(keys.ack(job, name)),
        )
    flags = etcd.get(keys.flags(name)) or NodeFlags()
    return Orders(flags=flags, assignment=assignment, spare=spare, jobs=jobs)


def _read(world: World, name: str) -> World:
    orders = read(world.etcd, name, world.nodes[name].local)
    return world.node(name, orders=orders, idle=False)


# ---- the node's own keys


def _unregistered(world: World, name: str) -> World:
    local = world.nodes[name].local
    local = replace(local, registered=False, node_written=None, written=None)
    return world.node(name, local=local, idle=False)


def _register(world: World, name: str) -> World:
    node = world.nodes[name]
    etcd, lease = world.etcd.grant(Lease(name, node.local.incarnation))
    flags = keys.flags(name)
    revision = etcd.mod_revision(flags)
    guard = Unchanged(flags, revision) if revision else Absent(flags)
    record = node.local.template
    without = etcd.commit([], [Delete(keys.node(name))])
    assert without is not None
    after = without.commit([guard], [put(keys.node(name), record, lease)])
    assert after is not None
    local = replace(node.local, registered=True, node_written=record, written=None)
    world = replace(world, etcd=after)
    return world.node(
        name, local=local, lease=lease, created=after.created(keys.node(name)), idle=False
    )


def _write(world: World, name: str, number: int) -> World:
    node = world.nodes[name]
    action = node.outbox[number]
    local, writes = node.local, list[Write]()
    if isinstance(action, WriteNode):
        writes.append(put(keys.node(name), action.record, node.lease))
        local = replace(local, node_written=action.record)
    elif isinstance(action, WriteAck):
        writes.append(put(keys.ack(action.job, name), action.ack, node.lease))
        local = replace(local, acked=(action.job, action.ack.generation))
    elif isinstance(action, WriteProgress):
        writes.append(put(keys.progress(action.job, name), action.progress, node.lease))
        local = replace(
            local, written=Written(action.job, action.progress, action.marks, local.now)
        )
    elif isinstance(action, ClearPlace):
        writes = [Delete(keys.ack(action.job, name)), Delete(keys.progress(action.job, name))]
        local = replace(local, written=None)
    outbox = node.outbox[:number] + node.outbox[number + 1 :]
    busy = node.local.busy - {_KIND[type(action)]}
    after = world.etcd.commit([Created(keys.node(name), node.created)], writes)
    if after is None:
        local = replace(node.local, registered=False, node_written=None, written=None, busy=busy)
        return world.node(name, local=local, outbox=outbox, idle=False)
    world = replace(world, etcd=after)
    return world.node(name, local=replace(local, busy=busy), outbox=outbox, idle=False)


# ---- decisions


def _decide(world: World, name: str) -> World:
    node = world.nodes[name]
    actions = decide(node.orders, node.local, LIMITS)
    if not actions:
        return world.node(name, idle=True)
    for action in actions:
        world = _do(world, name, action)
    return world.node(name, idle=False)


def _do(world: World, name: str, action: NodeAction) -> World:
    node = world.nodes[name]
    local = node.local
    match action:
        case StartTrainer():
            instance = f"{name}t{node.lives}"
            facts = TrainerFacts(
                instance=instance,
                local_rank=action.local_rank,
                job=action.job,
                spec_revision=action.spec_revision,
                placement=action.placement,
                attempt=action.attempt,
                connected=True,
            )
            world = world.node(
                name,
                processes={**node.processes, instance: Process(instance)},
                lives=node.lives + 1,
            )
            return world.node(name, local=replace(local, trainers=(*local.trainers, facts)))
        case PlaceTrainer():
            return _facts(world, name, action.instance, placement=action.placement)
        case EndTrainer() | KillTrainer():
            return _facts(world, name, action.instance, ending=action.reason)
        case AskStacks():
            return world  # its trainers' pages, which would ask for it, aren't played here
        case ForgetTrainer():
            kept = tuple(one for one in local.trainers if one.instance != action.instance)
            return world.node(name, local=replace(local, trainers=kept))
        case Renew():
            lives = node.lives + 1
            renewed = fresh(name, lives, len(local.devices))
            return world.node(name, local=renewed, orders=None, outbox=(), lives=lives)
        case SendWelcome():
            return _send(world, name, action)
        case SendStop():
            world = _facts(world, name, action.instance, stop_sent=action.generation)
            return _send(world, name, action)
        case SendRestore():
            world = _facts(world, name, action.instance, restore_sent=action.generation)
            return _send(world, name, action)
        case SendRunning():
            return _facts(world, name, action.instance, running_sent=action.generation)
        case SendHold():
            world = _facts(world, name, action.instance, hold_sent=action.generation)
            return _send(world, name, action)
        case SendRelease():
            world = _facts(world, name, action.instance, released_at=0.0)
            return _send(world, name, action)
        case WriteNode() | WriteAck() | WriteProgress() | ClearPlace():
            busy = local.busy | {_KIND[type(action)]}
            return world.node(name, local=replace(local, busy=busy), outbox=(*node.outbox, action))


def _facts(world: World, name: str, instance: str, **changes: object) -> World:
    local = world.nodes[name].local
    changed = tuple(
        replace(one, **changes) if one.instance == instance else one  # type: ignore[arg-type]
        for one in local.trainers
    )
    return world.node(name, local=replace(local, trainers=changed))


def _send(
    world: World, name: str, action: SendWelcome | SendStop | SendRestore | SendHold | SendRelease
) -> World:
    node = world.nodes[name]
    process = node.processes.get(action.instance)
    if process is None:
        return world
    if isinstance(action, SendWelcome):
        world = _facts(world, name, action.instance, welcomed=True)
        node = world.nodes[name]
    grown = replace(process, inbox=(*process.inbox, action))
    return world.node(name, processes={**node.processes, action.instance: grown})


def crash(world: World, name: str) -> World:
    """The whole machine is gone."""
    return world.node(name, up=False, processes={}, outbox=())


def come_back(world: World, name: str) -> World:
    """The machine is there again, with another incarnation."""
    node = world.nodes[name]
    lives = node.lives + 1
    again = SimNode(local=fresh(name, lives, len(node.local.devices)), lives=lives)
    return replace(world, nodes={**world.nodes, name: again})


def phase_of(world: World) -> Phase:
    """The phase of the job's generation."""
    generation = world.etcd.get(keys.generation(world.spec.name))
    return Phase.PHASE_UNSPECIFIED if generation is None else Phase(generation.phase)
