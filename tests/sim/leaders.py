# SPDX-License-Identifier: Apache-2.0
"""What the leader can do next: the production planner and transactions on a view of etcd.

To decide and to write are two steps, and each transaction is one of its own, so that whatever
can happen in between does. A deposed leader's writes still arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from coordinator.controller.transactions import Context, Stale, Transaction, build
from coordinator.model import ClusterView, Job, JobView, LiveNode, Suspect, Verdict
from coordinator.plan import DeclareDead, Probe, Wait, plan
from coordinator.store import Created, Delete, KeyKind, Put, Write, keys
from tests.sim import invariants
from tests.sim.etcd import Etcd, parsed, put, value
from tests.sim.trainers import Move
from tests.sim.world import LATE, NOW, SETTINGS, SETTLED, Leader, Pending, World


def view(etcd: Etcd, verdicts: dict[tuple[str, str], Verdict]) -> ClusterView:
    """What the leader sees: as ``coordinator.controller.view`` would have it."""
    of_node: dict[KeyKind, dict[str, Any]] = {}
    of_job: dict[str, dict[KeyKind, Any]] = {}
    incidents: dict[str, Any] = {}
    for key, item in etcd.items.items():
        at = parsed(key)
        record = value(key, item.value)
        if at.kind is KeyKind.NODE:
            record = LiveNode(record, item.lease, item.create_revision)
        if at.kind is KeyKind.INCIDENT:
            incidents[at.name] = record
        elif at.job:
            job = of_job.setdefault(at.job, {})
            if at.node:
                job.setdefault(at.kind, {})[at.node] = record
            elif at.kind is KeyKind.SLOT:
                job.setdefault(at.kind, {})[at.number] = record
            else:
                job[at.kind] = record
        elif at.node:
            of_node.setdefault(at.kind, {})[at.node] = record
    jobs = {}
    for name, job in of_job.items():
        generation = job.get(KeyKind.GENERATION)
        progress = job.get(KeyKind.PROGRESS, {})
        number = 0 if generation is None else generation.generation
        broken = any(
            one.broken_generation == number for all_ in progress.values() for one in all_.ranks
        )
        jobs[name] = JobView(
            job=job[KeyKind.JOB_SPEC],
            status=job.get(KeyKind.JOB_STATUS),
            generation=generation,
            slots=job.get(KeyKind.SLOT, {}),
            acks=job.get(KeyKind.ACK, {}),
            progress=progress,
            incident=incidents.get(generation.incident) if generation else None,
            broken_at=0.0 if broken else None,
            status_at=0.0,
        )
    nodes = of_node.get(KeyKind.NODE, {})
    flags = of_node.get(KeyKind.FLAGS, {})
    assignments = of_node.get(KeyKind.ASSIGNMENT, {})
    placed = {
        (slot.node, slot.incarnation)
        for job_view in jobs.values()
        if job_view.generation is None or not job_view.generation.phase.ended
        for slot in job_view.slots.values()
        if slot.node
    } | {(one.node, one.incarnation) for one in assignments.values()}
    suspects = {}
    for node, incarnation in placed:
        live = nodes.get(node)
        if live is not None and live.record.incarnation == incarnation:
            continue
        if node in flags and flags[node].is_dead(incarnation):
            continue
        verdict = verdicts.get((node, incarnation), Verdict.UNKNOWN)
        suspects[node, incarnation] = Suspect(node, incarnation, node, verdict, "a probe")
    return ClusterView(
        nodes=nodes,
        flags=flags,
        assignments=assignments,
        spares=of_node.get(KeyKind.SPARE, {}),
        jobs=jobs,
        suspects=suspects,
    )


def truth(world: World, node: str, incarnation: str) -> Verdict:
    """What an honest probe says."""
    there = world.nodes.get(node)
    alive = there is not None and there.up and there.local.incarnation == incarnation
    return Verdict.ALIVE if alive else Verdict.DEAD


def _stand(world: World) -> Any:
    """All that the leader's decisions depend on."""
    who = tuple((node.up, node.local.incarnation) for _, node in sorted(world.nodes.items()))
    return (world.etcd.revision, who)


def moves(world: World) -> Iterator[Move]:
    """Everything that the leader, and one deposed, could do now."""
    leader = world.leader
    if leader.pending is not None:
        what = type(leader.pending.actions[0]).__name__
        yield f"the leader writes {what}", partial(_write, world)
    else:
        idle = None if leader.idle is None or leader.idle[0] != _stand(world) else leader.idle[1]
        if idle is None:
            yield "the leader decides", partial(decide, world, NOW)
        elif idle < SETTLED:
            yield "the leader decides, a while later", partial(decide, world, SETTLED)
    for number, pending in enumerate(world.deposed):
        what = type(pending.actions[0]).__name__
        yield f"a DEPOSED leader writes {what}", partial(_write_deposed, world, number)


def decide(world: World, now: float) -> World:
    """Ask the planner at one of three times."""
    leader = world.leader
    seen = view(world.etcd, dict(leader.verdicts))
    generation = world.etcd.get(keys.generation(world.spec.name))
    phase = (0, 0) if generation is None else (generation.generation, int(generation.phase))
    if now == LATE:
        leader = replace(leader, late=phase)
    elif leader.late == phase:
        now = LATE
    actions = plan(seen, now, SETTINGS)
    verdicts = dict(leader.verdicts)
    for action in actions:
        if isinstance(action, Probe):
            verdicts[action.node, action.incarnation] = truth(
                world, action.node, action.incarnation
            )
    todo = tuple(one for one in actions if not isinstance(one, Probe | Wait))
    if todo:
        revisions = {
            key: one.mod_revision
            for key, one in world.etcd.items.items()
            if parsed(key).kind in (KeyKind.GENERATION, KeyKind.FLAGS)
        }
        pending = Pending(seen, todo, leader.guard, revisions)
        return replace(world, leader=replace(leader, pending=pending, verdicts=verdicts))
    idle = None if verdicts != dict(leader.verdicts) else (_stand(world), now)
    return replace(world, leader=replace(leader, idle=idle, verdicts=verdicts))


def _write(world: World) -> World:
    pending = world.leader.pending
    assert pending is not None
    world, rest = _carry_out(world, pending)
    return replace(world, leader=replace(world.leader, pending=rest))


def _write_deposed(world: World, number: int) -> World:
    world, rest = _carry_out(world, world.deposed[number])
    others = world.deposed[:number] + world.deposed[number + 1 :]
    return replace(world, deposed=others if rest is None else (*others, rest))


def _carry_out(world: World, pending: Pending) -> tuple[World, Pending | None]:
    """The next action, as one step: only the largest take more than one transaction."""
    action, rest = pending.actions[0], pending.actions[1:]
    revisions = dict(pending.revisions)
    context = Context(pending.guard, pending.view, lambda key: revisions.get(key, 0), wall_ns=1)
    try:
        transactions: tuple[Transaction, ...] = build(action, context)
    except Stale:
        return world, None
    for one in transactions:
        after = world.etcd.commit(one.guards, one.writes)
        if after is None:
            return world, None
        world = invariants.after_write(world, replace(world, etcd=after))
        for write in one.writes:
            if isinstance(write, Put) and parsed(write.key).kind in (
                KeyKind.GENERATION,
                KeyKind.FLAGS,
            ):
                revisions[write.key] = after.revision
    if isinstance(action, DeclareDead):
        live = pending.view.nodes.get(action.node)
        if live is not None and live.record.incarnation == action.incarnation:
            world = replace(world, etcd=world.etcd.expire(live.lease))
    return world, replace(pending, actions=rest, revisions=revisions) if rest else None


def elect(world: World) -> World:
    """Another leads; what the one before had decided may still arrive."""
    before = world.leader
    number = before.number + 1
    name = f"election/c{number}"
    writes: list[Write] = [Delete(before.guard.key), Put(name, b"{}")]
    etcd = world.etcd.commit([], writes)
    assert etcd is not None
    deposed = world.deposed if before.pending is None else (*world.deposed, before.pending)
    leader = Leader(number, Created(name, etcd.revision))
    return replace(world, etcd=etcd, leader=leader, deposed=deposed)


def submit(world: World) -> World:
    """The job file has been taken."""
    job = Job(spec=world.spec, spec_revision=1)
    etcd = world.etcd.commit([], [put(keys.job_spec(world.spec.name), job)])
    assert etcd is not None
    return replace(world, etcd=etcd)


def stop(world: World) -> World:
    """An operator wants the job ended."""
    job = replace(world.etcd.get(keys.job_spec(world.spec.name)), stop="enough")
    etcd = world.etcd.commit([], [put(keys.job_spec(world.spec.name), job)])
    assert etcd is not None
    return replace(world, etcd=etcd)


__all__ = ["LATE", "decide", "elect", "moves", "stop", "submit", "truth", "view"]
