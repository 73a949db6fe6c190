# SPDX-License-Identifier: Apache-2.0
"""What the leader writes for one failure is the same, however many nodes there are."""

from __future__ import annotations

from dataclasses import replace

from coordinator.controller.transactions import Context, build
from coordinator.model import ClusterView, JobView, Phase, StepPhase
from coordinator.plan import Transition
from coordinator.store import Created, Put
from tests.unit.plan.views import (
    acked,
    cluster,
    fresh,
    node,
    open_incident,
    running,
    said,
    spec,
    the,
)

_DIGITS = 24
"""Bytes by which the numbers of more nodes may be longer in one phase's records."""


def _written(view: ClusterView) -> tuple[int, int]:
    """Puts and deletes of the one transition that is due, and their bytes."""
    context = Context(Created("election/c", 1), view, lambda key: 7, 1)
    writes = [one for made in build(the(Transition, view), context) for one in made.writes]
    values = sum(len(one.value) for one in writes if isinstance(one, Put))
    return len(writes), sum(len(one.key) for one in writes) + values


def _phases(nodes: int) -> list[tuple[int, int]]:
    """PAUSE, RESTORE and RUNNING after the loss of one node, which m0 replaces."""
    of = spec(replicas=nodes)
    lost = _written(cluster(running(of), nodes=[node("m0")], dead=["n7"]))

    job: JobView = open_incident(running(of, 5, Phase.PAUSE), "detected")
    job = fresh(job, 7, "m0")
    for number in range(nodes):
        empty = number == 7
        phase = StepPhase.EMPTY if empty else StepPhase.COMPUTING
        job = acked(job, number, phase, offer=number < 3, names="new" if empty else "")
    paused = _written(cluster(job))

    job = open_incident(running(of, 5, Phase.RESTORE), "detected", "paused", "pulled")
    for number in range(nodes):
        job = said(job, number, generation=5, step=5, restored=5)
    return [lost, paused, _written(cluster(replace(job, acks={})))]


def test_writes_do_not_grow_with_the_nodes() -> None:
    few, many = _phases(64), _phases(1024)
    assert [writes for writes, _ in few] == [writes for writes, _ in many]
    for (_, small), (_, large) in zip(few, many, strict=True):
        assert small <= large <= small + _DIGITS
