# SPDX-License-Identifier: Apache-2.0
"""Which nodes could take a slot."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from coordinator.model import ClusterView, Job, Warm


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
        ("quarantined", flags.quarantined),
        ("unhealthy", record.unhealthy),
    ):
        if why:
            return f"{mark}: {why}"
    if len(record.devices) < ranks_per_node:
        return f"it has {len(record.devices)} devices, the job needs {ranks_per_node} a node"
    return ""


def candidates(view: ClusterView, job: Job, taken: Set[str]) -> Candidates:
    """The nodes without a place that could take a slot of this job.

    A node that is kept warm for another job comes last: taking it is better than waiting.
    """
    warm_for = Warm(job=job.spec.name, spec_revision=job.spec_revision)
    hot, cold, others = [], [], []
    for node in sorted(view.nodes):
        if node in taken or node in view.assignments:
            continue
        if unusable(view, node, job.spec.ranks_per_node):
            continue
        kept = view.spares.get(node)
        if view.nodes[node].record.warm == warm_for:
            hot.append(node)
        elif kept is None or kept.job == job.spec.name:
            cold.append(node)
        else:
            others.append(node)
    return Candidates(hot=tuple(hot), cold=tuple(cold + others))
