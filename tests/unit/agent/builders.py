# SPDX-License-Identifier: Apache-2.0
"""Values that the agent decides on, made short."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import (
    Ack,
    Assignment,
    Device,
    Generation,
    Job,
    JobSpec,
    Node,
    Phase,
    Slot,
    SlotRank,
    SpareAssignment,
)
from workerd.agent import actions as do
from workerd.agent.decide import decide
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import (
    JobOrders,
    Local,
    Orders,
    Placement,
    TrainerFacts,
)

SPEC = JobSpec(name="j", command=("x",), replicas=3, restarts=1)
JOB = Job(spec=SPEC, spec_revision=1)
PLACE = Placement("j", 1, 1)
EVERYTHING_BUSY = frozenset({NODE, ACK, PROGRESS})


def orders(
    phase: Phase = Phase.PAUSE,
    number: int = 1,
    *,
    since: int = 1,
    instance: str = "",
    spec: JobSpec = SPEC,
    acked: int = 0,
    **generation: object,
) -> Orders:
    """Node n, incarnation i, owns slot 1."""
    job = JobOrders(
        job=replace(JOB, spec=spec),
        generation=replace(
            Generation(job="j", generation=number, phase=phase, spec_revision=1),
            **generation,  # type: ignore[arg-type]
        ),
        slot=Slot(1, "n", "i", (SlotRank(instance, since),) * spec.ranks_per_node, since),
        ack=Ack(acked, "i") if acked else None,
    )
    return Orders(assignment=Assignment("n", "i", "j", 1, 1), jobs={"j": job})


def with_job(told: Orders, **changes: object) -> Orders:
    return replace(told, jobs={"j": replace(told.jobs["j"], **changes)})  # type: ignore[arg-type]


def trainer(**facts: object) -> TrainerFacts:
    """A placed, connected trainer."""
    base = TrainerFacts(
        "t", 0, "j", 1, placement=PLACE, connected=True, welcomed=True, started_at=100.0
    )
    return replace(base, **facts)  # type: ignore[arg-type]


def local(*trainers: TrainerFacts, now: float = 100.0, **changes: object) -> Local:
    template = Node(node="n", incarnation="i", devices=(Device(),))
    base = Local(now=now, template=template, trainers=trainers, registered=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def decided(
    told: Orders | None, here: Local, kind: type[do.Action] | None = None
) -> list[do.Action]:
    """What is decided, without the writes unless they are asked for."""
    if kind is None or kind not in (do.WriteNode, do.WriteAck, do.WriteProgress):
        here = replace(here, busy=EVERYTHING_BUSY)
    found = decide(told, here)
    return [one for one in found if kind is None or isinstance(one, kind)]


def kinds(told: Orders | None, here: Local) -> list[str]:
    return [type(one).__name__ for one in decided(told, here)]


SPARE = replace(orders(Phase.RUNNING), assignment=None, spare=SpareAssignment("n", "j", 1))
