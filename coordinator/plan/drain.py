# SPDX-License-Identifier: Apache-2.0
"""Nodes whose place another node is to take, by an operator's wish.

The replacement is warmed first. It takes over at a step's boundary, by a generation like any other:
no step is computed again. Who leaves stays, stopped, and serves its state until the others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from coordinator.model import Cause, ClusterView, JobView, NodeFlags, Slot
from coordinator.plan import holders
from coordinator.plan.actions import SettleFlags, Transition, Wait
from coordinator.plan.builder import Builder
from coordinator.plan.placement import Candidates, candidates
from coordinator.plan.spread import Pool


def wish(flags: NodeFlags) -> str:
    """Why a node's place is to be another's; empty when it isn't."""
    if flags.draining:
        return f"draining: {flags.draining}"
    return f"to be replaced: {flags.replacing}" if flags.replacing else ""


def leaving(view: ClusterView, job: JobView) -> list[Slot]:
    """The slots whose owners live and are to leave. Whose owner is lost is no matter of a plan."""
    return [
        slot
        for slot in holders.owners(job)
        if wish(view.flags_of(slot.node)) and view.alive(slot.node, slot.incarnation)
    ]


def change(view: ClusterView, job: JobView, taken: Set[str]) -> Transition | Wait | None:
    """The generation in which hot spares take the places of those who are to leave.

    None when nobody is to.
    """
    going = leaving(view, job)
    if not going:
        return None
    name = job.job.spec.name
    who = ", ".join(
        f"{slot.node} (slot {slot.slot}) is {wish(view.flags_of(slot.node))}" for slot in going
    )
    out = {slot.slot for slot in going}
    if job.incident is not None and not job.incident.closed:
        return Wait(name, f"{who}; not before the first step after incident {job.incident.id}")
    found = candidates(view, job.job, taken)
    if not found.hot:
        warming = [node for node, kept in sorted(view.spares.items()) if kept.job == name]
        what = f"{', '.join(warming)} is not warm yet" if warming else "no node is free for it"
        return Wait(name, f"{who}; the replacement is warmed first, and {what}")
    build = Builder(view, job, job.current.generation + 1)
    reasons = []
    stay = {slot.slot: slot.node for slot in holders.owners(job) if slot.slot not in out}
    pool = Pool(view, job.job.spec, Candidates(hot=found.hot), stay)
    leave = going[: len(pool)]
    for slot in leave:
        node = pool.take(slot.slot)
        build.place(slot.slot, node, leaving=slot)
        reasons.append(
            f"slot {slot.slot}: {slot.node} -> hot spare {node}, "
            f"it is {wish(view.flags_of(slot.node))}"
        )
    nodes = tuple(slot.node for slot in leave)
    return build.transition((Cause.PLANNED, nodes), "; ".join(reasons))


def settled(view: ClusterView) -> Iterator[SettleFlags]:
    """Nodes that have been replaced: they take places again."""
    for node, flags in sorted(view.flags.items()):
        if flags.replacing and node not in view.assignments:
            yield SettleFlags(node, f"it has no place any more; was {wish(flags)}")
