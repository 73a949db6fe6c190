# SPDX-License-Identifier: Apache-2.0
"""What operators plan while the rest goes on. Each yields its possible moves in a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from coordinator.model import NodeFlags
from coordinator.store import keys
from tests.sim.etcd import put
from tests.sim.trainers import Move
from tests.sim.world import JOB, World


def _flags(world: World, name: str) -> NodeFlags:
    found = world.etcd.get(keys.flags(name))
    return NodeFlags() if found is None else found


def _flag(world: World, name: str, **marks: str) -> World:
    """What the admin service does: the record as it is, with something changed."""
    flags = replace(_flags(world, name), **marks)  # type: ignore[arg-type]
    etcd = world.etcd.commit([], [put(keys.flags(name), flags)])
    assert etcd is not None
    return replace(world, etcd=etcd)


def _recovery(world: World, reason: str) -> World:
    job = replace(world.etcd.get(keys.job_spec(JOB)), recovery_paused=reason)
    etcd = world.etcd.commit([], [put(keys.job_spec(JOB), job)])
    assert etcd is not None
    return replace(world, etcd=etcd)


def cordon(world: World) -> Iterator[Move]:
    """A node is to take no new place."""
    for name in world.nodes:
        yield f"*** {name} is cordoned", partial(_flag, world, name, cordoned="a fan")


def drain(world: World) -> Iterator[Move]:
    """A node's place is to be another's."""
    for name in world.nodes:
        yield f"*** {name} is drained", partial(_flag, world, name, draining="a move")


def substitute(world: World) -> Iterator[Move]:
    """A node that has a place is to be replaced."""
    for name in world.nodes:
        if world.etcd.get(keys.assignment(name)) is not None:
            yield f"*** {name} is replaced", partial(_flag, world, name, replacing="a doubt")


def pause(world: World) -> Iterator[Move]:
    """Nothing is to be decided but the end."""
    if not world.etcd.get(keys.job_spec(JOB)).recovery_paused:
        yield "*** recovery is paused", partial(_recovery, world, "look first")


def scale(world: World) -> Iterator[Move]:
    """Another number of replicas is to run."""
    spec, job = world.spec, world.etcd.get(keys.job_spec(JOB))
    for count in range(spec.fewest, spec.replicas + 1, spec.block_replicas):
        if count != job.wanted:
            yield f"*** the job is scaled to {count}", partial(_scaled, world, count)


def _scaled(world: World, count: int) -> World:
    job = replace(world.etcd.get(keys.job_spec(JOB)), wanted_replicas=count)
    etcd = world.etcd.commit([], [put(keys.job_spec(JOB), job)])
    assert etcd is not None
    return replace(world, etcd=etcd)


ALL: Mapping[str, Callable[[World], Iterator[Move]]] = {
    one.__name__: one for one in (cordon, drain, substitute, pause, scale)
}


def undone(world: World) -> Iterator[Move]:
    """What an operator may take back."""
    for name in world.nodes:
        if kept_off(world, name):
            marks = {"cordoned": "", "draining": "", "replacing": ""}
            yield f"{name} is uncordoned", partial(_flag, world, name, **marks)
    if world.etcd.get(keys.job_spec(JOB)).wanted_replicas:
        yield "the job is scaled back", partial(_scaled, world, 0)
    if world.etcd.get(keys.job_spec(JOB)).recovery_paused:
        yield "recovery is resumed", partial(_recovery, world, "")


def kept_off(world: World, name: str) -> bool:
    """Whether a node takes no new place by an operator's wish."""
    flags = _flags(world, name)
    return bool(flags.cordoned or flags.draining or flags.replacing)


def resumed(world: World) -> World:
    """Nobody leaves a job's recovery paused for ever."""
    return _recovery(world, "") if world.etcd.get(keys.job_spec(JOB)).recovery_paused else world
