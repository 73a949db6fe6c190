# SPDX-License-Identifier: Apache-2.0
"""Planned changes wait for a step's boundary, so that no work is lost.

First the record says ``hold``: then the ranks agree, in the barrier before an update, to stop after
it, all after the same step. As soon as one of them says that it has come there, the generation that
makes the change may begin: whoever is still before its update applies it then. (Who leaves
acknowledges, too: else the state that it has come to would go with it.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from coordinator.model import Cause, ClusterView, JobView, Phase
from coordinator.plan import holders, membership
from coordinator.plan.actions import Transition, Wait


def reached(job: JobView) -> bool:
    """Whether a rank of this generation stands at the boundary that all have agreed on."""
    number = job.current.generation
    for slot in holders.owners(job):
        for local in range(len(slot.ranks)):
            seen = holders.progress(job, slot, local)
            if seen is not None and seen.held == number:
                return True
    return False


def is_planned(change: Transition | Wait | None, job: JobView) -> TypeGuard[Transition]:
    """Whether a change is a planned one, of a job that runs."""
    return (
        isinstance(change, Transition)
        and job.current.phase is Phase.RUNNING
        and change.incident is not None
        and change.incident.cause is Cause.PLANNED
    )


def at(job: JobView, change: Transition) -> Transition | Wait:
    """The change, where it costs no step; before that the wish for a stop, then the wait for it."""
    current = job.current
    if current.phase is not Phase.RUNNING or reached(job):
        return change
    if current.hold:
        return Wait(job.job.spec.name, f"until the step under way is done: {change.reason}")
    why = f"all ranks are to stop after the step under way, for a planned change: {change.reason}"
    return Transition(replace(current, hold=change.reason), why)


def leave(view: ClusterView, job: JobView) -> Transition | Wait | None:
    """Lets ranks go on that stopped for a change which can't be made any more."""
    hold = job.current.hold
    if not hold:
        return None
    why = f"the planned change can't be made any more: {hold}"
    if reached(job):
        return membership.regroup(view, job, Cause.PLANNED, why)
    return Wait(job.job.spec.name, f"until the step under way is done: {why}")
