# SPDX-License-Identifier: Apache-2.0
"""What can go wrong. Each yields its possible moves in a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from coordinator.model import TrainerExit, Verdict
from coordinator.plan import DeclareDead, Transition
from coordinator.store import keys
from tests.sim import leaders, nodes, trainers
from tests.sim.trainers import Move
from tests.sim.world import LATE, World

Fault = Callable[[World], Iterator[Move]]


def crash(world: World) -> Iterator[Move]:
    """A machine is gone, at once."""
    for name, node in world.nodes.items():
        if node.up:
            yield f"*** node {name} crashes", partial(nodes.crash, world, name)


def trainer(world: World) -> Iterator[Move]:
    """A trainer process ends, its node is well."""
    for name, node in world.nodes.items():
        for process in node.processes.values():
            how = TrainerExit(code=1, message="boom")
            yield (
                f"*** trainer {process.instance} ends",
                partial(trainers.end, world, name, process, how),
            )


def hang(world: World) -> Iterator[Move]:
    """A trainer process stands still."""
    for name, node in world.nodes.items():
        for process in node.processes.values():
            if not process.hung:
                stuck = {**node.processes, process.instance: replace(process, hung=True)}
                yield (
                    f"*** trainer {process.instance} hangs",
                    partial(world.node, name, processes=stuck),
                )


def cut(world: World) -> Iterator[Move]:
    """A node can't reach etcd any more; everything else reaches it."""
    for name, node in world.nodes.items():
        if node.connected:
            yield f"*** {name} is cut off", partial(world.node, name, cut=True)


def mute(world: World) -> Iterator[Move]:
    """A node's workerd stands still, but its lease lives."""
    for name, node in world.nodes.items():
        if node.connected:
            yield f"*** {name} is mute", partial(world.node, name, mute=True)


def glitch(world: World) -> Iterator[Move]:
    """A group breaks although everybody is well."""
    network = world.network
    for number in network.arrived:
        if number not in network.broken:
            broken = replace(network, broken=network.broken | {number})
            yield f"*** group {number} breaks", partial(replace, world, network=broken)


def verdict(world: World) -> Iterator[Move]:
    """The leader believes that every deadline has passed."""
    if world.leader.pending is None:
        yield "*** every deadline passes", partial(leaders.decide, world, LATE)


def misjudge(world: World) -> Iterator[Move]:
    """A probe of a living node gets no answer."""
    leader = world.leader
    for who, suspect in leaders.view(world.etcd, dict(leader.verdicts)).suspects.items():
        if suspect.verdict is not Verdict.DEAD:
            wrong = {**leader.verdicts, who: Verdict.DEAD}
            yield (
                f"*** {who[0]} doesn't answer a probe",
                partial(replace, world, leader=replace(leader, verdicts=wrong, idle=None)),
            )


def lead(world: World) -> Iterator[Move]:
    """The leader changes, and what it was about to write may still arrive."""
    pending = world.leader.pending
    if pending is not None and isinstance(pending.actions[0], Transition | DeclareDead):
        yield "*** another leads", partial(leaders.elect, world)


def stop(world: World) -> Iterator[Move]:
    """An operator stops the job."""
    yield "*** an operator stops the job", partial(leaders.stop, world)


ALL: Mapping[str, Fault] = {
    one.__name__: one for one in (crash, trainer, hang, cut, mute, glitch, verdict, misjudge, lead)
}


def mends(world: World) -> Iterator[Move]:
    """What may get well again by itself."""
    for name, node in world.nodes.items():
        if node.cut or node.mute:
            yield f"{name} is well again", partial(world.node, name, cut=False, mute=False)
        if not node.up:
            yield f"{name} comes back", partial(nodes.come_back, world, name)


def expiries(world: World) -> Iterator[Move]:
    """Leases that nobody renews."""
    for number, lease in world.etcd.leases.items():
        node = world.nodes[lease.node]
        flags = world.etcd.get(keys.flags(lease.node))
        kept = (
            node.up
            and not node.cut
            and node.lease == number
            and node.local.incarnation == lease.incarnation
            and not (flags is not None and flags.is_dead(lease.incarnation))
        )
        if not kept:
            yield (
                f"a lease of {lease.node} ends",
                partial(replace, world, etcd=world.etcd.expire(number)),
            )
