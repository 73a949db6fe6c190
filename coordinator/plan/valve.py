# SPDX-License-Identifier: Apache-2.0
"""The operator's safety valve: a job whose automatic recovery is paused.

Nothing is decided for such a job but its end (the script's or the operator's): no generation begins
or goes on, none of its owners is declared dead. What would be done is said instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coordinator.model import ClusterView, JobView, Phase
from coordinator.plan.actions import Action, DeclareDead, Transition, Wait

_PASS = frozenset({Phase.FINISHED, Phase.STOPPED})


def owners(view: ClusterView) -> dict[tuple[str, str], str]:
    """The job of every owner, by node and incarnation, whose job's recovery is paused."""
    return {
        (slot.node, slot.incarnation): name
        for name, job in view.jobs.items()
        if job.job.recovery_paused and not (job.generation and job.generation.phase.ended)
        for slot in job.slots.values()
        if slot.node
    }


def described(one: Transition) -> str:
    """What a transition does, in words."""
    generation = one.generation
    if generation.hold and generation.phase is Phase.RUNNING:
        return f"hold generation {generation.generation} at the end of the step under way"
    return f"write generation {generation.generation} {generation.phase.name}"


def withhold(job: JobView, decided: Iterable[Action]) -> Iterator[Action]:
    """What remains of a paused job's decisions, and the word of what doesn't."""
    held: list[str] = []
    for one in decided:
        if isinstance(one, Transition) and one.generation.phase not in _PASS:
            held.append(f"{described(one)}: {one.reason}")
        elif isinstance(one, DeclareDead):
            held.append(f"declare {one.node} ({one.incarnation}) dead: {one.reason}")
        elif isinstance(one, Wait):
            held.append(f"wait: {one.reason}")
        else:
            yield one
    if held:
        why = f"automatic recovery is paused ({job.job.recovery_paused}), else it would "
        yield Wait(job.job.spec.name, why + "; ".join(held), blocked=True)
