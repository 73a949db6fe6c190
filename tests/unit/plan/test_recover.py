# SPDX-License-Identifier: Apache-2.0
"""From PAUSE to RESTORE: the resume step, who serves it, and when there is none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from coordinator.model import (
    JobState,
    JobStatus,
    JobView,
    Phase,
    Rendezvous,
    SlotRank,
    StepPhase,
)
from coordinator.plan import Transition, UpdateStatus, Wait
from tests.unit.plan.views import (
    SETTINGS,
    acked,
    cluster,
    emptied,
    fresh,
    instance,
    of,
    open_incident,
    running,
    spec,
    the,
)

COMPUTING, PREPARED, DONE, EMPTY = (
    StepPhase.COMPUTING,
    StepPhase.PREPARED,
    StepPhase.DONE,
    StepPhase.EMPTY,
)


def pause(**more: int) -> JobView:
    return running(spec(**more), phase=Phase.PAUSE)


class TestResumeStep:
    def test_waits_for_every_owner(self) -> None:
        wait = the(Wait, cluster(acked(pause(), 1)))
        assert wait.reason == "PAUSE: no acknowledgement yet from n0 (slot 0), n2 (slot 2)"
        assert not wait.blocked

    def test_says_how_many_more(self) -> None:
        assert "n4 (slot 4) and others" in the(Wait, cluster(pause(replicas=7))).reason

    @pytest.mark.parametrize(
        "held",
        list(
            itertools.product([(COMPUTING, 5), (PREPARED, 5), (COMPUTING, 6), (DONE, 6)], repeat=3)
        ),
    )
    def test_is_the_highest_that_was_acknowledged(
        self, held: tuple[tuple[StepPhase, int], ...]
    ) -> None:
        job = pause()
        for number, (phase, step) in enumerate(held):
            job = acked(job, number, phase, step)
        highest = max(step for _, step in held)
        stuck = [one for one in held if one[1] < highest and one[0] is not PREPARED]
        view = cluster(job)
        if stuck:
            wait = the(Wait, view)
            assert wait.blocked
            assert f"can't reach the resume step {highest}" in wait.reason
            assert the(UpdateStatus, view).status.state is JobState.WAITING
            return
        change = the(Transition, view).generation
        assert (change.generation, change.phase) == (4, Phase.RESTORE)
        assert change.resume_step == highest
        assert not change.initial
        assert change.sources == ()

    def test_a_rank_too_far_behind_stops_everything(self) -> None:
        job = acked(acked(acked(pause(), 0, step=7), 1, PREPARED, 5), 2, step=7)
        assert "rank 1 holds state 5 PREPARED" in the(Wait, cluster(job)).reason

    def test_an_older_generations_ack_is_none(self) -> None:
        job = acked(acked(acked(pause(), 0), 1), 2, step=9, generation=3)
        assert "n2 (slot 2)" in the(Wait, cluster(job)).reason

    def test_another_instances_ack_is_none(self) -> None:
        job = acked(acked(acked(pause(), 0), 1), 2, step=9, names="stranger")
        assert "n2 (slot 2)" in the(Wait, cluster(job)).reason

    def test_another_incarnations_ack_is_none(self) -> None:
        job = acked(acked(acked(pause(), 0), 1), 2)
        other = replace(job.acks["n2"], incarnation="n2-9")
        job = replace(job, acks={**job.acks, "n2": other})
        assert "n2 (slot 2)" in the(Wait, cluster(job)).reason

    def test_who_lost_its_slot_has_no_say(self) -> None:
        """A freed node's ack may still stand there, with a higher step."""
        job = acked(acked(acked(pause(), 0), 1), 2, step=9)
        job = acked(fresh(job, 2, "z"), 2, EMPTY)
        assert "n2" in job.acks
        assert the(Transition, cluster(job)).generation.resume_step == 5

    def test_a_part_of_the_ranks_is_no_ack(self) -> None:
        job = acked(acked(running(spec(4, 1, 2), phase=Phase.PAUSE), 0), 1)
        short = replace(job.acks["n1"], ranks=job.acks["n1"].ranks[:1])
        job = replace(job, acks={**job.acks, "n1": short})
        assert "n1 (slot 1)" in the(Wait, cluster(job)).reason


class TestSources:
    def test_none_when_nobody_is_empty(self) -> None:
        job = acked(acked(acked(pause(), 0), 1, PREPARED, 4), 2)
        assert the(Transition, cluster(job)).generation.sources == ()

    def test_who_holds_the_step_comes_before_who_rolls_forward(self) -> None:
        job = acked(acked(acked(pause(replicas=4), 0, PREPARED, 4), 1, step=5), 2, step=5)
        job = acked(fresh(job, 3, "z"), 3, EMPTY)
        change = the(Transition, cluster(job))
        assert [one.rank for one in change.generation.sources] == [1, 2, 0]
        first = change.generation.sources[0]
        assert (first.node, first.instance, first.address) == ("n1", instance(1), "n1:0")
        assert first.initial_digest == ""

    def test_only_of_the_positions_that_need_one_and_not_too_many(self) -> None:
        job = running(spec(6, 2), phase=Phase.PAUSE)
        for number in range(11):
            job = acked(job, number)
        job = acked(fresh(job, 11, "z"), 11, EMPTY)
        sources = the(Transition, cluster(job)).generation.sources
        assert [one.rank for one in sources] == [1, 3, 5, 7]
        assert {one.shard_position for one in sources} == {1}

    def test_the_new_instances_are_named_with_the_record(self) -> None:
        job = acked(acked(acked(fresh(pause(), 1, "z"), 0), 1, EMPTY), 2)
        change = the(Transition, cluster(job))
        (slot,) = change.slots
        assert (slot.slot, slot.node) == (1, "z")
        assert slot.ranks == (SlotRank("new1.0", 4),)
        assert slot.generation == 4

    def test_only_the_new_ranks_of_a_slot(self) -> None:
        job = running(spec(4, 1, 2), phase=Phase.PAUSE)
        half = replace(job.slots[1], ranks=(SlotRank("", 4), job.slots[1].ranks[1]))
        job = acked(replace(job, slots={**job.slots, 1: half}), 0)
        job = acked(job, 1)
        ranks = list(job.acks["n1"].ranks)
        ranks[0] = replace(ranks[0], phase=EMPTY, step=-1)
        job = replace(job, acks={**job.acks, "n1": replace(job.acks["n1"], ranks=tuple(ranks))})
        change = the(Transition, cluster(job))
        assert change.slots[0].ranks == (SlotRank("new1.0", 4), SlotRank(instance(1, 1), 1))
        assert [one.rank for one in change.generation.sources] == [0, 1, 3]


class TestRendezvous:
    def test_the_first_offer(self) -> None:
        job = acked(acked(acked(pause(), 0, offer=False), 1), 2)
        assert the(Transition, cluster(job)).generation.rendezvous == Rendezvous("n1:9", "nonce1")

    def test_each_regroup_in_a_row_takes_another(self) -> None:
        seen = []
        for regroups in range(4):
            job = pause()
            job = replace(job, generation=replace(job.current, regroups=regroups))
            for number in range(3):
                job = acked(job, number)
            change = the(Transition, cluster(job)).generation
            assert change.rendezvous is not None
            assert change.regroups == regroups
            seen.append(change.rendezvous.address)
        assert seen == ["n0:9", "n1:9", "n2:9", "n0:9"]

    def test_no_offer_is_asked_for_again_but_not_at_once(self) -> None:
        job = pause()
        for number in range(3):
            job = acked(job, number, offer=False)
        view = cluster(job)
        assert "no owner could offer a rendezvous store" in the(Wait, view).reason
        change = the(Transition, view, now=SETTINGS.regroup)
        assert change.generation.generation == 5
        assert change.generation.regroups == 1


class TestInitial:
    def job(self, positions: int = 1) -> JobView:
        job = running(spec(3, positions), 1, Phase.PAUSE, progress={})
        slots = {
            number: replace(slot, ranks=(SlotRank("", 1),)) for number, slot in job.slots.items()
        }
        record = replace(job.current, last_running_generation=0)
        return replace(job, slots=slots, generation=record)

    def test_all_begin_from_the_lowest_ranks_state(self) -> None:
        job = self.job()
        for number, digest in enumerate(["", "seed", "odd"]):
            job = acked(job, number, EMPTY, digest=digest)
        change = the(Transition, cluster(job))
        assert change.generation.initial
        assert change.generation.resume_step == 0
        (source,) = change.generation.sources
        assert (source.rank, source.instance, source.initial_digest) == (1, "new1.0", "seed")
        assert len(change.slots) == 3
        assert change.incident is None

    def test_each_position_has_its_own(self) -> None:
        job = self.job(2)
        for number in range(6):
            job = acked(job, number, EMPTY, digest=f"of{number % 2}")
        sources = the(Transition, cluster(job)).generation.sources
        assert [(one.shard_position, one.rank, one.initial_digest) for one in sources] == [
            (0, 0, "of0"),
            (1, 1, "of1"),
        ]

    def test_dirty_ranks_are_started_afresh(self) -> None:
        job = self.job(2)
        for number in range(6):
            job = acked(job, number, EMPTY, digest="" if number % 2 else "seed")
        change = the(Transition, cluster(job))
        assert (change.generation.generation, change.generation.phase) == (2, Phase.PAUSE)
        assert [one.slot for one in change.slots] == [1, 3, 5]
        assert all(one.ranks == (SlotRank("", 2),) for one in change.slots)
        assert change.generation.restarts == 0

    def test_but_not_for_ever(self) -> None:
        job = self.job()
        job = replace(job, generation=replace(job.current, regroups=3))
        for number in range(3):
            job = acked(job, number, EMPTY)
        change = the(Transition, cluster(job)).generation
        assert change.phase is Phase.FAILED
        assert "afresh 3 times" in change.reason

    def test_an_empty_slot_waits(self) -> None:
        job = emptied(self.job(), 1)
        job = acked(acked(job, 0, EMPTY, digest="seed"), 2, EMPTY, digest="seed")
        assert "slots 1 are empty" in the(Wait, cluster(job)).reason

    def test_a_failure_before_the_first_run_goes_on_from_state_0(self) -> None:
        job = self.job()
        job = acked(acked(acked(job, 0, EMPTY, digest="seed"), 1, COMPUTING, 0), 2, COMPUTING, 0)
        change = the(Transition, cluster(job)).generation
        assert (change.resume_step, change.initial) == (0, False)
        assert [one.rank for one in change.sources] == [1, 2]

    def test_all_begin_anew_when_a_position_is_lost_before_the_first_run(self) -> None:
        job = self.job(2)
        for number in range(6):
            job = acked(job, number, EMPTY if number % 2 else COMPUTING, 0, digest="seed")
        change = the(Transition, cluster(job))
        assert change.generation.phase is Phase.PAUSE
        assert [one.slot for one in change.slots] == [0, 2, 4]
        assert "all begin anew" in change.reason

    @pytest.mark.parametrize("told", [True, False])
    def test_steps_that_nobody_recorded_are_work_to_lose(self, told: bool) -> None:
        """Trainers may go on before RUNNING is recorded."""
        job = self.job(2)
        step = 0 if told else 3
        for number in range(6):
            job = acked(job, number, EMPTY if number % 2 else COMPUTING, step, digest="seed")
        if told:
            job = replace(job, status=JobStatus(JobState.STARTING, step=3))
        assert the(Transition, cluster(job)).generation.phase is Phase.LOST


class TestLost:
    def test_when_no_owner_holds_a_state(self) -> None:
        job = pause()
        for number in range(3):
            job = acked(fresh(job, number, f"z{number}"), number, EMPTY)
        change = the(Transition, cluster(open_incident(job, "detected")))
        assert change.generation.phase is Phase.LOST
        assert "no living trainer holds shard positions 0 any more" in change.reason
        assert change.incident is not None
        assert change.incident.closed

    def test_names_the_position(self) -> None:
        job = running(spec(2, 2), phase=Phase.PAUSE)
        job = acked(acked(job, 0), 2)
        for number in (1, 3):
            job = acked(fresh(job, number, f"z{number}"), number, EMPTY)
        assert "shard positions 1 any more" in the(Transition, cluster(job)).reason

    def test_before_waiting_for_nodes(self) -> None:
        job = emptied(running(spec(2, 2), phase=Phase.PAUSE), 1, 3)
        job = acked(acked(job, 0), 2)
        assert the(Transition, cluster(job)).generation.phase is Phase.LOST
        everything = emptied(pause(), 0, 1, 2)
        assert the(Transition, cluster(everything)).generation.phase is Phase.LOST

    def test_not_while_an_owner_has_not_answered(self) -> None:
        job = pause()
        for number in range(2):
            job = acked(fresh(job, number, f"z{number}"), number, EMPTY)
        assert of(Transition, cluster(job)) == []

    def test_not_while_one_holds_a_state(self) -> None:
        job = pause()
        for number in range(2):
            job = acked(fresh(job, number, f"z{number}"), number, EMPTY)
        change = the(Transition, cluster(acked(job, 2, PREPARED, 5))).generation
        assert change.phase is Phase.RESTORE
        assert change.resume_step == 5
        assert [one.rank for one in change.sources] == [2]


class TestEmptySlots:
    def test_the_job_waits_and_says_so(self) -> None:
        view = cluster(acked(acked(emptied(pause(), 1), 0), 2))
        wait = the(Wait, view)
        assert wait.blocked
        assert wait.reason == (
            "slots 1 are empty and no node is free to take them; "
            "the job needs all its replicas (min_replicas is not set lower)"
        )
        status = the(UpdateStatus, view).status
        assert (status.state, status.reason) == (JobState.WAITING, wait.reason)
