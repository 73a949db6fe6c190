# SPDX-License-Identifier: Apache-2.0
"""What holds of the planner's answers whatever it is shown, also views that no protocol makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from coordinator.model import (
    Cause,
    ClusterView,
    JobView,
    Leaver,
    Line,
    Phase,
    RankAck,
    Settings,
    Slot,
    StepPhase,
)
from coordinator.plan import (
    DeclareDead,
    KeepWarm,
    Probe,
    Transition,
    Unassign,
    UpdateIncident,
    UpdateStatus,
    Wait,
    drain,
    holders,
    plan,
    recover,
)
from tests.property.plan.strategies import pauses, views

SETTINGS = Settings()


many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(views())
def test_it_always_answers_and_always_the_same(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    first = plan(view, now, SETTINGS)
    assert first == plan(view, now, SETTINGS)
    assert all(one.reason for one in first)
    jobs = [one.generation.job for one in first if isinstance(one, Transition)]
    assert len(jobs) == len(set(jobs))


@many
@given(views())
def test_no_node_gets_two_places(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    moves = [one for one in plan(view, now, SETTINGS) if isinstance(one, Transition)]
    placed = [place.node for move in moves for place in move.assign]
    assert len(placed) == len(set(placed))
    for move in moves:
        slots = {one.slot: one for one in move.slots}
        for place in move.assign:
            slot = slots[place.slot]
            assert (slot.node, slot.incarnation) == (place.node, place.incarnation)
            assert place.generation == slot.generation == move.generation.generation
            held = view.assignments.get(place.node)
            if held is not None:
                _check_moved(view.jobs[move.generation.job], held.slot, slot, slots)
                continue
            assert view.alive(place.node, place.incarnation)
            assert not view.nodes[place.node].record.unhealthy
            flags = view.flags_of(place.node)
            assert not flags.cordoned
            assert not drain.wish(flags)
            assert all(rank.instance == "" for rank in slot.ranks)
        for gone in move.unassign:
            assert view.assignments[gone].job == move.generation.job
            assert gone not in placed
    warm = [one for one in plan(view, now, SETTINGS) if isinstance(one, KeepWarm) and one.job]
    assert not {one.node for one in warm} & {*placed, *view.assignments}
    assert not any(drain.wish(view.flags_of(one.node)) for one in warm)
    assert not any(view.flags_of(one.node).cordoned for one in warm)


def _check_moved(job: JobView, before: int, slot: Slot, slots: dict[int, Slot]) -> None:
    """An owner has left a slot of the same shard positions, and taken its trainers along.

    Or who was leaving a slot takes it back.
    """
    of = job.job.spec
    old: Slot | Leaver | None = job.slots[before]
    if before == slot.slot:
        old = job.slots[before].leaving
    else:
        assert slots[before].node != slot.node
    assert old is not None
    assert (old.node, old.incarnation) == (slot.node, slot.incarnation)
    assert before % of.block_slots == slot.slot % of.block_slots
    for was, now in zip(old.ranks, slot.ranks, strict=True):
        assert now == was or (now.instance, now.since) == ("", slot.generation)


@many
@given(views())
def test_a_generation_has_whole_replicas_and_enough(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    for move in plan(view, now, SETTINGS):
        if not isinstance(move, Transition) or move.generation.generation == 1:
            continue
        job, new = view.jobs[move.generation.job], move.generation
        of, before = job.job.spec, job.current.absent_replicas
        blocks = {one // of.block_replicas for one in new.absent_replicas}
        assert len(new.absent_replicas) == len(blocks) * of.block_replicas
        assert len(new.absent_replicas) <= max(len(before), of.replicas - of.fewest)
        slots = {**job.slots, **{one.slot: one for one in move.slots}}
        members = [one for one in slots.values() if one.slot // of.block_slots not in blocks]
        owners = [one.node for one in slots.values() if one.node]
        assert len(owners) == len(set(owners))
        if new.phase is Phase.RESTORE:
            assert all(one.node for one in members)
        elif new.phase is Phase.RUNNING:
            assert all(not one.node for one in slots.values() if one not in members)
        if len(new.absent_replicas) < len(before):
            grown = [one.node for one in move.assign if one.slot // of.block_slots not in blocks]
            assert grown or any(holders.reserves(job)), "nobody makes up the replica"


@many
@given(views())
def test_generation_and_phase_only_rise(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    for move in plan(view, now, SETTINGS):
        if not isinstance(move, Transition):
            continue
        job = view.jobs[move.generation.job]
        new, old = move.generation, job.generation
        if old is None:
            assert new.generation == 1
            assert new.phase in (Phase.PAUSE, Phase.STOPPED)
            continue
        assert not old.phase.ended
        if new.hold and new.generation == old.generation:
            assert old.phase is Phase.RUNNING
            if new.phase is Phase.RUNNING:
                assert not old.hold
                assert (new, move.slots, move.assign) == (replace(old, hold=new.hold), (), ())
            continue
        if new.generation == old.generation:
            assert new.phase > old.phase
        else:
            assert new.generation == old.generation + 1
            assert new.phase is Phase.PAUSE
            assert new.resume_step == -1
            assert new.sources == ()
        slots = {**job.slots, **{one.slot: one for one in move.slots}}
        if not new.phase.ended:
            assert new.empty_slots == tuple(
                number for number in sorted(slots) if not slots[number].node
            )
        assert new.last_running_generation >= old.last_running_generation
        owned = {slot.node for slot in (*job.slots.values(), *move.slots) if slot.node}
        assert all(source.node in owned for source in new.sources)


def check_resume(view: ClusterView, now: float) -> None:
    """A RESTORE follows from acks of this generation by the instances that the slots name."""
    for move in plan(view, now, SETTINGS):
        if not isinstance(move, Transition) or move.generation.phase is not Phase.RESTORE:
            continue
        job = view.jobs[move.generation.job]
        named = {**job.slots, **{one.slot: one for one in move.slots}}
        steps = []
        for number, slot in named.items():
            ack = job.acks[slot.node]
            assert ack.generation == move.generation.generation
            assert ack.incarnation == slot.incarnation
            for local, rank in enumerate(slot.ranks):
                (one,) = (one for one in ack.ranks if one.rank == job.job.spec.rank(number, local))
                assert one.instance == rank.instance
                before = job.slots[number].ranks[local].instance
                assert before in ("", rank.instance)
                if one.phase is not StepPhase.EMPTY:
                    steps.append(one.step)
        assert move.generation.resume_step == max(steps, default=0)
        assert move.generation.initial == (not steps)


@many
@given(views() | pauses())
def test_a_resume_step_follows_from_this_generations_acks(
    shown: tuple[ClusterView, float],
) -> None:
    check_resume(*shown)


@many
@given(views())
def test_lost_only_without_a_holder(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    for move in plan(view, now, SETTINGS):
        if not isinstance(move, Transition) or move.generation.phase is not Phase.LOST:
            continue
        job = view.jobs[move.generation.job]
        said: list[tuple[bool, list[RankAck]]] = []
        unclear: set[int] = set()
        for slot in holders.owners(job):
            given_ = holders.acks(job, slot)
            if given_ is not None:
                holding = [one for one in given_ if one.phase is not StepPhase.EMPTY]
                said.append((holders.absent(job, slot.slot), holding))
            else:
                assert holders.absent(job, slot.slot), "who has not answered may hold a state"
                over = holders.ended(view, job, slot)
                if not over and not view.flags_of(slot.node).is_dead(slot.incarnation):
                    unclear |= holders.held(view, job, slot)
        step = max((one.step for _, ranks in said for one in ranks), default=-1)
        held = {
            job.job.spec.shard_position(one.rank)
            for reserve, ranks in said
            # a reserve follows the RESTORE with all of its ranks, or not at all
            if not reserve or all(recover.reaches(one, step) for one in ranks)
            for one in ranks
            if recover.reaches(one, step)
        }
        held |= unclear
        assert len(held) < job.job.spec.shard_positions


@many
@given(views())
def test_a_verdict_leaves_every_position_a_holder(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    actions = plan(view, now, replace(SETTINGS, disruption=1))
    judged = {
        (one.node, one.incarnation)
        for one in actions
        if isinstance(one, DeclareDead) and (one.node, one.incarnation) not in view.suspects
    }
    for job in view.jobs.values():
        ended = job.generation is None or job.generation.phase.ended
        if ended or not holders.has_run(job):
            continue
        before, after = set(), set()
        for slot in holders.owners(job):
            if view.flags_of(slot.node).is_dead(slot.incarnation):
                continue
            for local in range(len(slot.ranks)):
                if local in holders.ended(view, job, slot):
                    continue
                position = job.job.spec.shard_position(job.job.spec.rank(slot.slot, local))
                if holders.holds_state(job, slot, local):
                    before.add(position)
                    if (slot.node, slot.incarnation) not in judged:
                        after.add(position)
        if judged & {(slot.node, slot.incarnation) for slot in holders.owners(job)}:
            assert before == after


@many
@given(views())
def test_nobody_is_declared_dead_twice_or_in_an_outage(
    shown: tuple[ClusterView, float],
) -> None:
    view, now = shown
    declared = set()
    for one in plan(view, now, replace(SETTINGS, disruption=1)):
        if isinstance(one, DeclareDead):
            assert (one.node, one.incarnation) not in declared
            declared.add((one.node, one.incarnation))
            assert not view.flags_of(one.node).is_dead(one.incarnation)
            live = view.nodes.get(one.node)
            replaced = live is not None and live.record.incarnation != one.incarnation
            assert replaced or now >= view.no_eviction_before
        if isinstance(one, Probe):
            who = (one.node, one.incarnation)
            assert who in view.suspects or view.contacts[who].line is Line.ANSWERS


@many
@given(views())
def test_ended_jobs_are_left_alone(shown: tuple[ClusterView, float]) -> None:
    view, now = shown
    ended = {
        name for name, job in view.jobs.items() if job.generation and job.generation.phase.ended
    }
    for one in plan(view, now, SETTINGS):
        if isinstance(one, Transition):
            assert one.generation.job not in ended
        elif isinstance(one, UpdateIncident):
            assert one.incident.job not in ended
        elif isinstance(one, Wait | KeepWarm):
            assert one.job not in ended
        elif isinstance(one, UpdateStatus) and one.job in ended:
            assert one.status.state.ended
        elif isinstance(one, Unassign):
            held = view.assignments[one.node]
            job = view.jobs[held.job]
            slot = job.slots.get(held.slot)
            assert (
                held.job in ended
                or slot is None
                or slot.node != one.node
                or (slot.incarnation != held.incarnation)
            )


@many
@given(views())
def test_a_planned_change_stops_nobody_in_the_middle_of_a_step(
    shown: tuple[ClusterView, float],
) -> None:
    view, now = shown
    for move in plan(view, now, SETTINGS):
        if not isinstance(move, Transition) or move.incident is None:
            continue
        job = view.jobs[move.generation.job]
        fresh = job.incident is None or job.incident.closed
        if job.generation is None or not fresh or move.incident.cause is not Cause.PLANNED:
            continue
        assert job.generation.phase is Phase.RUNNING
        taken = {one.slot for one in move.slots}
        stays = [slot for number, slot in job.slots.items() if slot.node and number not in taken]
        progress = [
            holders.progress(job, slot, local) for slot in stays for local in range(len(slot.ranks))
        ]
        number = job.generation.generation
        assert any(one is not None and one.held == number for one in progress)


@many
@given(views())
def test_nothing_is_decided_for_a_paused_job_but_its_end(
    shown: tuple[ClusterView, float],
) -> None:
    view, now = shown
    paused = {
        name: job
        for name, job in view.jobs.items()
        if job.job.recovery_paused and not (job.generation and job.generation.phase.ended)
    }
    owners = {
        (slot.node, slot.incarnation) for job in paused.values() for slot in job.slots.values()
    }
    free = replace(
        view,
        jobs={
            name: replace(job, job=replace(job.job, recovery_paused=""))
            for name, job in view.jobs.items()
        },
    )
    would = {one.generation.job for one in plan(free, now, SETTINGS) if isinstance(one, Transition)}
    actions = plan(view, now, SETTINGS)
    moved = set()
    for one in actions:
        if isinstance(one, Transition) and one.generation.job in paused:
            assert one.generation.phase in (Phase.FINISHED, Phase.STOPPED)
            moved.add(one.generation.job)
        if isinstance(one, DeclareDead):
            assert (one.node, one.incarnation) not in owners
    said = {one.job for one in actions if isinstance(one, Wait) and one.blocked}
    first = min(would & paused.keys() - moved, default=None)
    # of later jobs it may be otherwise: the first one has taken no nodes from them
    assert first is None or first in said


@pytest.mark.parametrize("rule", ["generation", "instance", "incarnation"])
def test_dropping_a_rule_of_acks_is_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above bites: it fails as soon as one of the three is ignored."""

    def loose(job: JobView, slot: Slot) -> Any:
        ack = job.acks.get(slot.node)
        if ack is None or (rule != "generation" and ack.generation != job.current.generation):
            return None
        if rule != "incarnation" and ack.incarnation != slot.incarnation:
            return None
        found = []
        for local, rank in enumerate(slot.ranks):
            number = job.job.spec.rank(slot.slot, local)
            one = next((one for one in ack.ranks if one.rank == number), None)
            if one is None:
                return None
            if rule != "instance" and rank.instance and one.instance != rank.instance:
                return None
            found.append(one)
        return tuple(found)

    monkeypatch.setattr(holders, "acks", loose)

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(pauses())
    def search(shown: tuple[ClusterView, float]) -> None:
        check_resume(*shown)

    with pytest.raises(AssertionError):
        search()
