# SPDX-License-Identifier: Apache-2.0
"""Which nodes could take a slot."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from coordinator.model import ClusterView, Job, JobSpec, JobView, SpareAssignment, Warm


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that may take a slot of one job; best first."""

    hot: tuple[str, ...] = ()
    """Their trainers wait, warm for this job."""
    cold: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Hot ones first."""
        return self.hot + self.cold


def unusable(view: ClusterView, node: str, ranks_per_node: int) -> str:
    """Why a node can't take a slot; empty when it can."""
    live = view.nodes.get(node)
    if live is None:
        return "it has no lease"
    flags = view.flags_of(node)
    record = live.record
    if flags.is_dead(record.incarnation):
        return f"incarnation {record.incarnation} is recorded dead"
    for mark, why in (
        ("cordoned", flags.cordoned),
        ("draining", flags.draining),
        ("to be replaced", flags.replacing),
        ("quarantined", flags.quarantined),
        ("unhealthy", record.unhealthy),
    ):
        if why:
            return f"{mark}: {why}"
    if len(record.devices) < ranks_per_node:
        return f"it has {len(record.devices)} devices, the job needs {ranks_per_node} a node"
    return ""


def refusal(view: ClusterView, node: str, spec: JobSpec) -> str:
    """Why a node without a place can't take a slot of this job; empty when it can."""
    why = unusable(view, node, spec.ranks_per_node)
    kept = view.spares.get(node)
    if why or kept is None or node in view.assignments:
        return why
    return reserved(view, kept, spec)


def reserved(view: ClusterView, kept: SpareAssignment, spec: JobSpec) -> str:
    """Why a job can't have a node that is kept warm; empty when it can."""
    if kept.job == spec.name:
        return ""
    other = view.jobs.get(kept.job)
    if other is None:
        return f"it is kept for job {kept.job}, whose records can't be read"
    if other.generation is not None and other.generation.phase.ended:
        return ""
    if other.job.spec.priority < spec.priority:
        return ""
    return f"it is kept for job {kept.job} of priority {other.job.spec.priority}"


def in_turn(view: ClusterView) -> list[JobView]:
    """All jobs, in the order in which they get nodes: by priority, then as they were submitted."""
    return sorted(
        view.jobs.values(),
        key=lambda job: (-job.job.spec.priority, job.created, job.job.spec.name),
    )


def candidates(view: ClusterView, job: Job, taken: Set[str]) -> Candidates:
    """The nodes without a place that could take a slot of this job.

    A node that is kept warm for another job is that one's reserve. It comes last, and only if the
    other's priority is lower: taking it is better than waiting then.
    """
    warm_for = Warm(job=job.spec.name, spec_revision=job.spec_revision)
    hot, cold, others = [], [], []
    for node in sorted(view.nodes.keys() - view.assignments.keys() - taken):
        if unusable(view, node, job.spec.ranks_per_node):
            continue
        kept = view.spares.get(node)
        if kept is not None and reserved(view, kept, job.spec):
            continue
        if view.nodes[node].record.warm == warm_for:
            hot.append(node)
        elif kept is None or kept.job == job.spec.name:
            cold.append(node)
        else:
            others.append(node)
    return Candidates(hot=tuple(hot), cold=tuple(cold + others))
