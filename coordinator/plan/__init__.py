# SPDX-License-Identifier: Apache-2.0
"""Pure decisions: what the leader does next, and why.

:func:`plan` knows no clock, randomness, thread, gRPC or etcd. Its actions are carried out one
by one, each as one guarded transaction; it is asked again after every change, so an action that
fails because the world moved on is simply decided anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.model import ClusterView, JobView, Phase, Settings
from coordinator.plan import (
    boundary,
    deaths,
    drain,
    evidence,
    incidents,
    ladder,
    membership,
    recover,
    status,
    valve,
    warm,
)
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
from coordinator.plan.placement import in_turn

__all__ = [
    "Action",
    "AskWitnesses",
    "DeclareDead",
    "HoldBack",
    "KeepWarm",
    "Probe",
    "SettleFlags",
    "Transition",
    "Unassign",
    "UpdateIncident",
    "UpdateStatus",
    "Wait",
    "doubtful",
    "plan",
]


def plan(view: ClusterView, now: float, settings: Settings) -> tuple[Action, ...]:
    """All that is to be done in this view of the cluster.

    ``now`` is the leader's monotonic time in seconds. At most one :class:`Transition` per job,
    and no node in two of them.
    """
    actions: list[Action] = []
    kept = valve.owners(view)
    withheld: dict[str, list[Action]] = {}
    judged = evidence.judge(view, now, settings)
    for one in (*deaths.of_suspects(view, now, settings), *deaths.of_contacts(view, judged)):
        if isinstance(one, DeclareDead) and (one.node, one.incarnation) in kept:
            withheld.setdefault(kept[one.node, one.incarnation], []).append(one)
        else:
            actions.append(one)
    back = {(one.node, one.incarnation): one for one in actions if isinstance(one, HoldBack)}
    judged_dead = {(one.node, one.incarnation) for one in actions if isinstance(one, DeclareDead)}
    taken: set[str] = set()
    for job in in_turn(view):
        name = job.job.spec.name
        decided = _job(view, job, taken, now, settings, judged)
        if job.job.recovery_paused:
            decided = list(valve.withhold(job, [*withheld.get(name, ()), *decided]))
        actions.extend(
            one
            for one in decided
            if not isinstance(one, DeclareDead) or (one.node, one.incarnation) not in judged_dead
        )
        moves = [one for one in decided if isinstance(one, Transition)]
        for move in moves:
            taken.update(place.node for place in move.assign)
        wait = next((one for one in decided if isinstance(one, Wait)), None)
        held = deaths.held(job, back)
        written = None if moves else status.update(job, wait, now, settings, held)
        if written is not None:
            actions.append(written)
    actions.extend(warm.leftovers(view))
    actions.extend(drain.settled(view))
    actions.extend(warm.spares(view, taken))
    return tuple(actions)


def doubtful(view: ClusterView, settings: Settings) -> bool:
    """Whether so many don't answer that the leader is rather cut off itself."""
    return evidence.crowded(view, settings) or bool(deaths.doubt(view, settings))


def _job(
    view: ClusterView,
    job: JobView,
    taken: set[str],
    now: float,
    settings: Settings,
    judged: Mapping[evidence.Who, evidence.Weighed],
) -> list[Action]:
    generation = job.generation
    if generation is not None and generation.phase.ended:
        return []
    if job.job.stop:
        return [membership.ended(job, Phase.STOPPED, f"stopped by an operator: {job.job.stop}")]
    if generation is None:
        return [membership.first(view, job, taken)]

    if generation.phase is Phase.RUNNING:
        over = recover.finished(job)
        if over is not None:
            return [status.told(job, over)]
    changed = ladder.change(view, job, taken, now, settings, judged)
    planned = changed if boundary.is_planned(changed, job) else None
    if changed is not None and planned is None:
        return [changed]
    # who doesn't answer may be why the group is broken: then it is replaced, not asked to join
    if generation.phase is not Phase.PAUSE and not deaths.soon_known(job, judged):
        again = recover.broken(view, job, now, settings)
        if again is not None:
            return [again]
    late = list(deaths.of_deadlines(view, job, now, settings, judged))
    if late:
        return late
    if generation.phase is Phase.PAUSE:
        return [recover.paused(view, job, now, settings)]
    noted = incidents.follow(job)
    if noted is not None:
        return [noted]  # before the next mark, so that the timeline stands in order
    if generation.phase is Phase.RESTORE:
        return [recover.restoring(job)]
    return _planned(view, job, taken, planned)


def _planned(
    view: ClusterView, job: JobView, taken: set[str], growing: Transition | None
) -> list[Action]:
    """A running job to which nothing has happened: operators' wishes, and growth after them."""
    change = drain.change(view, job, taken)
    if growing is not None and not isinstance(change, Transition):
        change = growing
    if isinstance(change, Transition):
        return [boundary.at(job, change)]
    left = boundary.leave(view, job)
    found = left or change or ladder.smaller(job)
    return [] if found is None else [found]
