# SPDX-License-Identifier: Apache-2.0
"""Small views of a cluster to decide on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.model import (
    Ack,
    Assignment,
    ClusterView,
    DeadIncarnation,
    Device,
    DeviceKind,
    Generation,
    Incident,
    IncidentMark,
    Job,
    JobSpec,
    JobView,
    LiveNode,
    Node,
    NodeFlags,
    Phase,
    Progress,
    RankAck,
    RankProgress,
    Rendezvous,
    Settings,
    Slot,
    SlotRank,
    SpareAssignment,
    StepPhase,
    Suspect,
    Trainer,
    TrainerExit,
    TrainerState,
    Verdict,
    Warm,
)
from coordinator.plan import Action, plan

JOB = "train"
SETTINGS = Settings()
T = TypeVar("T")


def node(name: str, life: int = 0, *, devices: int = 8, hot: bool = False, **more: Any) -> LiveNode:
    """A node whose lease lives; its incarnation is <name>-<life>."""
    record = Node(
        node=name,
        incarnation=f"{name}-{life}",
        control_address=f"{name}:1",
        devices=tuple(Device(DeviceKind.CPU, index) for index in range(devices)),
        warm=Warm(JOB, 7) if hot else None,
        **more,
    )
    return LiveNode(record, lease=1, create_revision=1)


def spec(replicas: int = 3, positions: int = 1, ranks_per_node: int = 1, **more: Any) -> JobSpec:
    """A job that allows three restarts and keeps one spare."""
    values: dict[str, Any] = {"spares": 1, "restarts": 3, "command": ("train",), "name": JOB}
    return JobSpec(
        replicas=replicas,
        shard_positions=positions,
        ranks_per_node=ranks_per_node,
        **{**values, **more},
    )


def instance(slot: int, local: int = 0) -> str:
    """The trainer that a slot of a running job names."""
    return f"i{slot}.{local}"


def running(of: JobSpec, generation: int = 4, phase: Phase = Phase.RUNNING, **more: Any) -> JobView:
    """A job on nodes n0, n1, ...: all joined, at step 5, nothing wrong. Its ranks came with
    generation 1."""
    slots = {
        number: Slot(
            slot=number,
            node=f"n{number}",
            incarnation=f"n{number}-0",
            ranks=tuple(
                SlotRank(instance(number, local), since=1) for local in range(of.ranks_per_node)
            ),
            generation=1,
        )
        for number in range(of.slots)
    }
    record = Generation(
        job=of.name,
        generation=generation,
        phase=phase,
        spec_revision=7,
        last_running_generation=generation if phase >= Phase.RUNNING else generation - 1,
        resume_step=5 if phase >= Phase.RESTORE else -1,
        rendezvous_slots=(0, 1, 2),
        reason="as it is",
    )
    joined = generation if phase >= Phase.RUNNING else generation - 1
    view = JobView(job=Job(spec=of, spec_revision=7), generation=record, slots=slots, progress={})
    for slot in slots.values():
        view = said(view, slot.slot, generation=joined, step=5, restored=joined)
    return replace(view, **more)


def said(job: JobView, number: int, **fields: Any) -> JobView:
    """With the progress of all ranks of a slot."""
    slot, of = job.slots[number], job.job.spec
    values: dict[str, Any] = {"phase": StepPhase.COMPUTING, **fields}
    ranks = tuple(
        RankProgress(rank=of.rank(number, local), instance=rank.instance, **values)
        for local, rank in enumerate(slot.ranks)
    )
    return replace(job, progress={**job.progress, slot.node: Progress(slot.incarnation, ranks)})


def held(job: JobView, *slots: int) -> JobView:
    """With a hold, and with slots whose ranks have come to the step's boundary."""
    number = job.current.generation
    job = replace(job, generation=replace(job.current, hold="a move"))
    for slot in slots:
        job = said(job, slot, generation=number, step=6, restored=number, held=number)
    return job


def acked(
    job: JobView,
    number: int,
    phase: StepPhase = StepPhase.COMPUTING,
    step: int = 5,
    *,
    generation: int | None = None,
    offer: bool = True,
    names: str = "",
    digest: str = "",
) -> JobView:
    """With the ack of a slot's owner: all its ranks in one phase and step."""
    slot, of = job.slots[number], job.job.spec
    ranks = tuple(
        RankAck(
            rank=of.rank(number, local),
            instance=names or rank.instance or f"new{number}.{local}",
            phase=phase,
            step=-1 if phase is StepPhase.EMPTY else step,
            initial_digest=digest,
            shard_address=f"{slot.node}:{local}",
            offer=Rendezvous(f"{slot.node}:9", f"nonce{number}") if offer and not local else None,
        )
        for local, rank in enumerate(slot.ranks)
    )
    number_of = job.current.generation if generation is None else generation
    ack = Ack(number_of, slot.incarnation, ranks)
    return replace(job, acks={**job.acks, slot.node: ack})


def emptied(job: JobView, *slots: int) -> JobView:
    """With slots that nobody has."""
    changed = dict(job.slots)
    for number in slots:
        changed[number] = Slot(slot=number, generation=job.current.generation)
    record = replace(job.current, empty_slots=tuple(slots))
    progress = {
        name: one
        for name, one in job.progress.items()
        if name not in {f"n{number}" for number in slots}
    }
    return replace(job, slots=changed, generation=record, progress=progress)


def fresh(job: JobView, number: int, on: str, since: int | None = None) -> JobView:
    """With a slot that another node has just got, whose trainers no RESTORE has named."""
    at = job.current.generation if since is None else since
    slot = Slot(
        slot=number,
        node=on,
        incarnation=f"{on}-0",
        ranks=(SlotRank(since=at),) * job.job.spec.ranks_per_node,
        generation=at,
    )
    return replace(job, slots={**job.slots, number: slot})


def cluster(
    *jobs: JobView,
    nodes: Iterable[LiveNode] = (),
    without: Iterable[str] = (),
    dead: Iterable[str] = (),
    spares: Mapping[str, str] | None = None,
    suspects: Mapping[str, Verdict] | None = None,
    no_eviction_before: float = float("-inf"),
    **more: Any,
) -> ClusterView:
    """A view with the jobs' owners, and ``nodes``; ``without`` have no lease, ``dead`` (names of
    first incarnations) are recorded dead."""
    live = {}
    assignments = {}
    for job in jobs:
        ended = job.generation is not None and job.generation.phase.ended
        for slot in job.slots.values():
            if not slot.node:
                continue
            life = int(slot.incarnation.rpartition("-")[2])
            live[slot.node] = node(slot.node, life)
            assignments[slot.node] = Assignment(
                slot.node, slot.incarnation, job.job.spec.name, slot.slot, slot.generation
            )
        assert not ended or job.slots
    live.update({one.record.node: one for one in nodes})
    return ClusterView(
        nodes={name: one for name, one in live.items() if name not in set(without)},
        flags={name: NodeFlags(dead=(DeadIncarnation(f"{name}-0", "it was"),)) for name in dead},
        assignments=assignments,
        spares={name: SpareAssignment(name, job, 7) for name, job in (spares or {}).items()},
        jobs={job.job.spec.name: job for job in jobs},
        suspects={
            (name, f"{name}-0"): Suspect(name, f"{name}-0", f"{name}:1", verdict, "a reset")
            for name, verdict in (suspects or {}).items()
        },
        no_eviction_before=no_eviction_before,
        **more,
    )


def ended(view: ClusterView, number: int, local: int = 0, **how: Any) -> ClusterView:
    """With a trainer that has ended, by its node's own word."""
    job = view.jobs[JOB]
    slot = job.slots[number]
    rank = slot.ranks[local]
    exit_ = TrainerExit(**(how or {"code": 1, "message": "Traceback: boom"}))
    over = Trainer(rank.instance or "unnamed", local, TrainerState.ENDED, JOB, 7, rank.since, exit_)
    live = view.nodes[slot.node]
    grown = replace(live.record, trainers=(*live.record.trainers, over))
    return replace(view, nodes={**view.nodes, slot.node: replace(live, record=grown)})


def open_incident(job: JobView, *marks: str, **more: Any) -> JobView:
    """With an incident that has these marks."""
    number = job.current.generation
    incident = Incident(
        id=f"{JOB}.{number}",
        job=JOB,
        first_generation=number,
        last_generation=number,
        marks=tuple(IncidentMark(one, time_ns=1) for one in marks),
        **more,
    )
    return replace(job, incident=incident, generation=replace(job.current, incident=incident.id))


def decide(view: ClusterView, now: float = 0.0) -> tuple[Action, ...]:
    """What the planner says, twice the same."""
    actions = plan(view, now, SETTINGS)
    assert actions == plan(view, now, SETTINGS)
    return actions


def of(kind: type[T], view: ClusterView, now: float = 0.0) -> list[T]:
    """The actions of one kind."""
    return [one for one in decide(view, now) if isinstance(one, kind)]


def the(kind: type[T], view: ClusterView, now: float = 0.0) -> T:
    """The only action of one kind."""
    (one,) = of(kind, view, now)
    return one


def none(view: ClusterView, *kinds: type[Any], now: float = 0.0) -> bool:
    """Whether there is no action of these kinds."""
    return not any(isinstance(one, kinds) for one in decide(view, now))
