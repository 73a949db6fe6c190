# SPDX-License-Identifier: Apache-2.0
"""Why the leader does or doesn't do something now, and what it would do after a change.

Both ask the planner itself: nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.model import ClusterView, JobView, Line, Settings
from coordinator.plan import holders
from coordinator.plan.actions import (
    Action,
    AskWitnesses,
    DeclareDead,
    HoldBack,
    KeepWarm,
    Probe,
    SettleFlags,
    Transition,
    Unassign,
    UpdateIncident,
    UpdateStatus,
    Wait,
)
from coordinator.plan.placement import refusal, unusable
from coordinator.plan.valve import described

Planner = Callable[[ClusterView, float, Settings], tuple[Action, ...]]


@dataclass(frozen=True, slots=True)
class Told:
    """An action in words."""

    kind: str
    what: str
    reason: str
    job: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What stands against a node. ``place`` is its slot, "spare" or "free"."""

    node: str
    place: str
    note: str


def difference(
    plan: Planner, before: ClusterView, after: ClusterView, now: float, settings: Settings
) -> tuple[Told, ...]:
    """What would be done after a change that isn't done without it."""
    known = frozenset(plan(before, now, settings))
    return tuple(
        _told(view=after, actions=(x for x in plan(after, now, settings) if x not in known))
    )


def actions(
    plan: Planner, view: ClusterView, job: str, now: float, settings: Settings
) -> tuple[Told, ...]:
    """What is done for a job now, or what it waits for; about its nodes too."""
    nodes = {slot.node for slot in view.jobs[job].slots.values()}
    told = _told(view=view, actions=plan(view, now, settings))
    return tuple(one for one in told if one.job == job or (not one.job and one.node in nodes))


def _told(*, view: ClusterView, actions: Iterator[Action] | tuple[Action, ...]) -> Iterator[Told]:
    for action in actions:
        match action:
            case Probe(node=node, reason=reason):
                yield Told("probe", f"ask {node} whether it lives", reason, node=node)
            case AskWitnesses(node=node, witnesses=witnesses, reason=reason):
                names = " and ".join(one for one, _ in witnesses)
                yield Told("probe", f"have {names} try to reach {node}", reason, node=node)
            case HoldBack(node=node, incarnation=incarnation, reason=reason):
                yield Told("held", f"no verdict on {node} ({incarnation})", reason, node=node)
            case DeclareDead(node=node, incarnation=incarnation, reason=reason):
                what = f"declare {node} ({incarnation}) dead"
                yield Told("death", what, reason, node=node)
            case Transition(generation=generation, reason=reason):
                yield Told("generation", described(action), reason, job=generation.job)
            case Unassign(node=node, job=job, reason=reason):
                yield Told("free", f"free {node}", reason, job=job, node=node)
            case SettleFlags(node=node, reason=reason):
                yield Told("flags", f"let {node} take places again", reason, node=node)
            case KeepWarm(node=node, job=job, reason=reason):
                what = f"keep {node} warm" if job else f"keep {node} warm for nothing"
                held = view.spares.get(node)
                about = job or (held.job if held is not None else "")
                yield Told("spare", what, reason, job=about, node=node)
            case Wait(job=job, reason=reason, blocked=blocked):
                kind = "blocked" if blocked else "wait"
                yield Told(kind, "nothing", reason, job=job)
            case UpdateStatus() | UpdateIncident():
                pass  # books are kept, nothing is done


def notes(view: ClusterView, job: JobView) -> Iterator[Note]:
    """What stands against this job's nodes, and against free ones that it can't take."""
    each = job.job.spec.ranks_per_node
    mine = {}
    for slot in holders.owners(job):
        mine[slot.node] = f"slot {slot.slot}"
        if why := _owner(view, slot.node, slot.incarnation, each):
            yield Note(slot.node, mine[slot.node], why)
    for node in sorted(view.nodes.keys() - mine.keys() - view.assignments.keys()):
        if why := refusal(view, node, job.job.spec):
            yield Note(node, "spare" if node in view.spares else "free", why)


def _owner(view: ClusterView, node: str, incarnation: str, ranks_per_node: int) -> str:
    suspect = view.suspects.get((node, incarnation))
    if suspect is not None:
        said = f": {suspect.detail}" if suspect.detail else ""
        return f"suspect, its lease is gone; its probe says {suspect.verdict.name}{said}"
    contact = view.contacts.get((node, incarnation))
    if contact is not None and contact.line is not Line.ANSWERS:
        return f"suspect, it does not answer: {contact.line.name}, {contact.detail}"
    return unusable(view, node, ranks_per_node)
