# SPDX-License-Identifier: Apache-2.0
"""Views of a cluster: any, and those of a PAUSE."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from coordinator.model import (
    Ack,
    Answer,
    Assignment,
    ClusterView,
    Contact,
    DeadIncarnation,
    JobState,
    JobStatus,
    JobView,
    Leaver,
    Line,
    NodeFlags,
    Phase,
    Progress,
    RankAck,
    RankProgress,
    Rendezvous,
    Slot,
    SlotRank,
    Statement,
    StepPhase,
    Suspect,
    Trainer,
    TrainerExit,
    TrainerState,
    Verdict,
)
from tests.unit.plan.views import JOB, acked, cluster, node, open_incident, running, spec

NODES = [f"n{number}" for number in range(7)]
INSTANCES = ["", "a", "b", "c"]


@st.composite
def _leaver(draw: st.DrawFn, at: int, ranks: int) -> Leaver | None:
    """Who has left a slot, perhaps."""
    if draw(st.integers(0, 3)):
        return None
    name = draw(st.sampled_from(NODES))
    named = tuple(
        SlotRank(draw(st.sampled_from(INSTANCES[1:])), draw(st.integers(1, at)))
        for _ in range(ranks)
    )
    return Leaver(name, f"{name}-0", named, draw(st.integers(1, at)))


@st.composite
def _slot(draw: st.DrawFn, number: int, at: int, ranks: int, owner: str) -> Slot:
    """A slot: empty, or an owner's, of any generation."""
    if draw(st.integers(0, 5)) == 0:
        return Slot(slot=number, generation=draw(st.integers(1, at)))
    return Slot(
        slot=number,
        node=owner,
        incarnation=f"{owner}-{draw(st.sampled_from([0, 0, 0, 1]))}",
        ranks=tuple(
            SlotRank(draw(st.sampled_from(INSTANCES)), draw(st.integers(1, at)))
            for _ in range(ranks)
        ),
        # now and then one that was staged for the next
        generation=draw(st.sampled_from([at, at, at, at + 1])),
        leaving=draw(_leaver(at, ranks)),
    )


@st.composite
def _of_rank(draw: st.DrawFn, rank: int, named: str, at: int) -> tuple[RankAck, RankProgress]:
    instance = draw(st.sampled_from([named, named, named, *INSTANCES]))
    phase = draw(st.sampled_from(StepPhase))
    step = -1 if phase is StepPhase.EMPTY else draw(st.integers(0, 6))
    offer = draw(st.sampled_from([None, Rendezvous(f"{rank}:1", "nonce")]))
    digest = draw(st.sampled_from(["", "seed"]))
    ack = RankAck(rank, instance, phase, step, digest, f"{rank}:2", offer, draw(st.booleans()))
    number = st.sampled_from([0, at - 1, at, at])
    progress = RankProgress(
        rank=rank,
        instance=instance,
        generation=draw(number),
        phase=phase,
        step=step,
        broken_generation=draw(st.sampled_from([0, 0, at - 1, at])),
        digest=draw(st.sampled_from(["", "d", "e"])),
        restored=draw(number),
        held=draw(st.sampled_from([0, at - 1, at, at])),
    )
    return ack, progress


@st.composite
def _job(draw: st.DrawFn, name: str, owners: list[str]) -> JobView:
    of = spec(
        *draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 2, 2), (4, 1, 2)])),
        name=name,
        spares=draw(st.integers(0, 2)),
        restarts=draw(st.integers(0, 3)),
        min_replicas=draw(st.integers(0, 1)),
        priority=draw(st.integers(0, 1)),
        spread=draw(st.sampled_from([(), ("switch", "rack")])),
    )
    at = draw(st.integers(1, 5))
    job = running(of, at, draw(st.sampled_from([*Phase][1:])))
    job = replace(job, progress={}, slots={})
    if draw(st.booleans()):
        job = open_incident(job, "detected", closed=draw(st.booleans()))
    if draw(st.booleans()):
        job = replace(job, generation=replace(job.current, last_running_generation=0))
    job = replace(
        job, generation=replace(job.current, regroups=draw(st.integers(0, 4)), restarts=0)
    )
    if draw(st.integers(0, 9)) == 0:
        job = replace(job, job=replace(job.job, stop="enough"))
    if draw(st.integers(0, 4)) == 0:
        job = replace(job, job=replace(job.job, recovery_paused="wait"))
    slots, acks, progress = {}, {}, {}
    for number, owner in zip(range(of.slots), owners, strict=False):
        slot = draw(_slot(number, at, of.ranks_per_node, owner))
        slots[number] = slot
        if not slot.node:
            continue
        said = [
            draw(_of_rank(of.rank(number, local), rank.instance, at))
            for local, rank in enumerate(slot.ranks)
        ]
        life = draw(st.sampled_from([slot.incarnation] * 4 + [f"{owner}-9"]))
        if draw(st.integers(0, 3)):
            told = draw(st.sampled_from([at, at, at, at - 1, at + 1]))
            acks[owner] = Ack(told, life, tuple(ack for ack, _ in said))
        if draw(st.integers(0, 3)):
            progress[owner] = Progress(life, tuple(one for _, one in said))
    for number, slot in slots.items():
        left = slot.leaving
        if left is not None and left.node not in acks and draw(st.booleans()):
            ranks = [
                draw(_of_rank(of.rank(number, local), rank.instance, at))[0]
                for local, rank in enumerate(left.ranks)
            ]
            acks[left.node] = Ack(at, left.incarnation, tuple(ranks))
    empty = tuple(number for number, slot in slots.items() if not slot.node)
    gone = draw(st.sets(st.integers(0, of.blocks - 1), max_size=of.blocks - 1))
    absent = tuple(one for one in range(of.replicas) if one // of.block_replicas in gone)
    job = replace(
        job,
        generation=replace(job.current, empty_slots=empty, absent_replicas=absent),
        slots=slots,
        acks=acks,
        progress=progress,
        broken_at=draw(st.sampled_from([None, None, 0.0])),
        status=draw(
            st.sampled_from(
                [None, JobStatus(JobState.RUNNING, "", 1, 3, at), JobStatus(JobState.STOPPED)]
            )
        ),
    )
    if job.current.phase is Phase.RUNNING and draw(st.booleans()):
        job = replace(job, generation=replace(job.current, hold="a move"))
    if draw(st.integers(0, 7)) == 0:
        job = replace(job, generation=None, incident=None)
    return job


@st.composite
def views(draw: st.DrawFn) -> tuple[ClusterView, float]:
    """A view, and the time at which it is looked at."""
    owners = draw(st.permutations(NODES))
    jobs = [draw(_job(JOB, owners[:4]))]
    if draw(st.booleans()):
        jobs.append(draw(_job("other", owners[4:])))
    spare = st.sampled_from(NODES)
    view = cluster(
        *jobs,
        nodes=[
            node(
                name,
                draw(st.sampled_from([0, 0, 1])),
                devices=draw(st.sampled_from([8, 8, 0])),
                hot=draw(st.booleans()),
                unhealthy=draw(st.sampled_from(["", "", "sick"])),
            )
            for name in NODES[:6]
        ],
        without=draw(st.sets(spare, max_size=2)),
        spares=draw(st.dictionaries(spare, st.sampled_from([JOB, "other", "gone"]), max_size=3)),
        no_eviction_before=draw(st.sampled_from([float("-inf"), 5.0])),
    )
    places = dict(view.assignments)
    for job in jobs:
        for number, slot in job.slots.items():
            left = slot.leaving
            if left is not None and left.node not in places:
                places[left.node] = Assignment(
                    left.node, left.incarnation, job.job.spec.name, number, 1
                )
    view = replace(view, assignments=places)
    dead = draw(st.dictionaries(spare, st.sampled_from([0, 1]), max_size=2))
    flags = {
        name: NodeFlags(dead=(DeadIncarnation(f"{name}-{life}"),)) for name, life in dead.items()
    }
    for name in draw(st.sets(spare, max_size=2)):
        marks = st.sampled_from([("", "x", ""), ("", "", "x"), ("x", "", ""), ("x", "x", "")])
        cordoned, draining, replacing = draw(marks)
        flags[name] = replace(
            flags.get(name, NodeFlags()),
            cordoned=cordoned,
            draining=draining,
            replacing=replacing,
        )
    view = replace(view, flags=flags)
    suspects = {}
    for job in jobs:
        for slot in job.slots.values():
            live = view.nodes.get(slot.node)
            if slot.node and (live is None or live.record.incarnation != slot.incarnation):
                who = (slot.node, slot.incarnation)
                verdict = draw(st.sampled_from(Verdict))
                suspects[who] = Suspect(*who, "address", verdict, "as asked")
            elif slot.node and live is not None and draw(st.integers(0, 3)) == 0:
                local = draw(st.integers(0, len(slot.ranks) - 1))
                rank = slot.ranks[local]
                over = Trainer(
                    rank.instance or "x",
                    local,
                    TrainerState.ENDED,
                    job.job.spec.name,
                    7,
                    rank.since,
                    TrainerExit(1),
                )
                record = replace(live.record, trainers=(over,))
                view = replace(view, nodes={**view.nodes, slot.node: replace(live, record=record)})
    contacts = {}
    for name, live in view.nodes.items():
        who = (name, live.record.incarnation)
        line = draw(st.sampled_from([None, Line.ANSWERS, Line.ANSWERS, *Line]))
        if line is not None:
            said = draw(st.lists(st.builds(Statement, st.just("n9"), st.sampled_from(Answer))))
            contacts[who] = Contact(*who, ("address",), line, "as seen", said=tuple(said))
    view = replace(view, suspects=suspects, contacts=contacts)
    return view, draw(st.sampled_from([0.0, 1.0, 20.0, 1e6]))


@st.composite
def pauses(draw: st.DrawFn) -> tuple[ClusterView, float]:
    """Nothing but a PAUSE in which everybody has answered, but perhaps one wrongly."""
    job = running(spec(*draw(st.sampled_from([(3, 1, 1), (4, 1, 2)]))), 4, Phase.PAUSE)
    held = st.sampled_from(
        [(StepPhase.COMPUTING, 5), (StepPhase.PREPARED, 4), (StepPhase.EMPTY, -1)]
    )
    for number in job.slots:
        job = acked(job, number, *draw(held))
    number = draw(st.sampled_from(sorted(job.slots)))
    name = job.slots[number].node
    ack = job.acks[name]
    wrong = (
        ack,
        replace(ack, generation=draw(st.sampled_from([3, 5]))),
        replace(ack, incarnation=f"{name}-9"),
        replace(ack, ranks=tuple(replace(one, instance="stranger") for one in ack.ranks)),
    )
    job = replace(job, acks={**job.acks, name: draw(st.sampled_from(wrong))})
    return cluster(job), 0.0
