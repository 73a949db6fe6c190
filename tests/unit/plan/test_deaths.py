# SPDX-License-Identifier: Apache-2.0
"""Who is dead: suspects, and owners that miss a deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import Contact, JobState, JobView, Line, Phase, Source, StepPhase, Verdict
from coordinator.plan import DeclareDead, HoldBack, Probe, Transition, UpdateStatus, Wait
from tests.unit.plan.views import (
    SETTINGS,
    acked,
    cluster,
    fresh,
    node,
    none,
    of,
    running,
    said,
    spec,
    the,
)


class TestSuspects:
    @pytest.mark.parametrize("verdict", [Verdict.UNKNOWN, Verdict.ALIVE])
    def test_whoever_lost_its_lease_is_asked(self, verdict: Verdict) -> None:
        view = cluster(running(spec()), without=["n1"], suspects={"n1": verdict})
        probe = the(Probe, view)
        assert (probe.node, probe.incarnation, probe.control_address) == ("n1", "n1-0", "n1:1")
        assert none(view, DeclareDead, Transition)

    def test_who_does_not_answer_is_dead(self) -> None:
        view = cluster(running(spec()), without=["n1"], suspects={"n1": Verdict.DEAD})
        dead = the(DeclareDead, view)
        assert (dead.node, dead.incarnation) == ("n1", "n1-0")
        assert "a direct probe says: a reset" in dead.reason
        assert of(Transition, view) == []

    def test_who_came_back_and_is_late_too_is_dead_once(self) -> None:
        job = running(spec(), phase=Phase.PAUSE)
        job = acked(acked(replace(job, progress={}), 0), 2)
        view = cluster(job, nodes=[node("n1", 1)], suspects={"n1": Verdict.UNKNOWN})
        (dead,) = of(DeclareDead, view, now=SETTINGS.start + 1)
        assert (dead.node, dead.incarnation) == ("n1", "n1-0")
        assert "came back" in dead.reason

    def test_who_is_silent_is_dead_too(self) -> None:
        view = cluster(running(spec()), without=["n1"], suspects={"n1": Verdict.SILENT})
        heard = {
            (f"n{one}", f"n{one}-0"): Contact(f"n{one}", f"n{one}-0", line=Line.ANSWERS)
            for one in (0, 2)
        }
        assert the(DeclareDead, replace(view, contacts=heard)).node == "n1"

    @pytest.mark.parametrize("heard", [0, 1])
    def test_when_most_are_silent_the_leader_doubts_itself(self, heard: int) -> None:
        job = replace(running(spec(4)), progress_at=0.0)
        silent = {f"n{one}": Verdict.SILENT for one in range(heard, 4)}
        silent |= {f"n{one}": Verdict.ALIVE for one in range(heard)}
        view = cluster(job, without=list(silent), suspects=silent)
        assert none(view, DeclareDead, Transition)
        assert len(of(Probe, view)) == 4, "they are asked again and again"
        assert {one.node for one in of(HoldBack, view)} == {f"n{one}" for one in range(heard, 4)}
        assert "may be the one that is cut off" in the(UpdateStatus, view).status.held

    def test_half_of_them_may_be_silent(self) -> None:
        verdicts = [Verdict.SILENT, Verdict.SILENT, Verdict.DEAD, Verdict.ALIVE]
        silent = {f"n{one}": verdict for one, verdict in enumerate(verdicts)}
        view = cluster(running(spec(4)), without=list(silent), suspects=silent)
        assert len(of(DeclareDead, view)) == 3

    def test_not_while_an_outage_of_etcd_is_fresh(self) -> None:
        view = cluster(
            running(spec()),
            without=["n1"],
            suspects={"n1": Verdict.DEAD},
            no_eviction_before=10.0,
        )
        assert of(DeclareDead, view, now=9.9) == []
        assert of(DeclareDead, view, now=10.0)

    def test_another_incarnation_says_so_itself(self) -> None:
        view = cluster(
            running(spec()),
            nodes=[node("n1", 1)],
            suspects={"n1": Verdict.UNKNOWN},
            no_eviction_before=10.0,
        )
        dead = the(DeclareDead, view, now=1.0)
        assert dead.incarnation == "n1-0"
        assert "came back as incarnation n1-1" in dead.reason

    def test_once_is_enough(self) -> None:
        view = cluster(running(spec()), without=["n1"], suspects={"n1": Verdict.DEAD}, dead=["n1"])
        assert none(view, DeclareDead, Probe)

    def test_a_job_waits_for_a_suspect_that_answers(self) -> None:
        """It registers again; until then nothing is decided, and after the deadline it is lost."""
        job = running(spec(), phase=Phase.PAUSE)
        view = cluster(acked(acked(job, 0), 2), without=["n1"], suspects={"n1": Verdict.ALIVE})
        assert "no acknowledgement yet from n1 (slot 1)" in the(Wait, view).reason
        assert the(DeclareDead, view, now=SETTINGS.pause).node == "n1"


class TestTogether:
    """What fails together is mended by one generation."""

    @pytest.mark.parametrize(
        ("verdict", "awaited"),
        [(Verdict.UNKNOWN, True), (Verdict.DEAD, True), (Verdict.ALIVE, False)],
    )
    def test_a_loss_waits_for_what_is_said_of_the_others(
        self, verdict: Verdict, awaited: bool
    ) -> None:
        view = cluster(
            running(spec()),
            nodes=[node("m0"), node("m1")],
            without=["n1", "n2"],
            suspects={"n2": verdict},
            dead=["n1"],
        )
        assert (of(Transition, view) == []) is awaited
        if awaited:
            assert "n2 (slot 2)" in the(Wait, view).reason

    def test_but_not_for_who_may_not_be_declared_dead_yet(self) -> None:
        view = cluster(
            running(spec()),
            nodes=[node("m0")],
            without=["n1", "n2"],
            suspects={"n2": Verdict.DEAD},
            dead=["n1"],
            no_eviction_before=10.0,
        )
        assert of(Transition, view, now=9.0)


class TestPause:
    def test_who_does_not_acknowledge_in_time_is_lost(self) -> None:
        job = acked(acked(running(spec(), phase=Phase.PAUSE), 0), 2)
        job = replace(job, phase_at=100.0)
        view = cluster(job)
        assert of(DeclareDead, view, now=100.0 + SETTINGS.pause - 0.1) == []
        dead = the(DeclareDead, view, now=100.0 + SETTINGS.pause)
        assert dead.node == "n1"
        assert "it has not acknowledged PAUSE within 15 s" in dead.reason

    def test_not_while_an_outage_of_etcd_is_fresh(self) -> None:
        job = acked(acked(running(spec(), phase=Phase.PAUSE), 0), 2)
        view = cluster(job, no_eviction_before=1000.0)
        assert of(DeclareDead, view, now=999.0) == []
        assert of(DeclareDead, view, now=1000.0)

    def test_who_has_trainers_to_start_gets_longer(self) -> None:
        job = fresh(running(spec(), 5, Phase.PAUSE), 1, "z")
        view = cluster(acked(acked(job, 0), 2))
        assert of(DeclareDead, view, now=SETTINGS.pause) == []
        assert the(DeclareDead, view, now=SETTINGS.start).node == "z"

    def test_also_when_another_generation_has_come_meanwhile(self) -> None:
        job = fresh(running(spec(), 6, Phase.PAUSE), 1, "z", since=5)
        view = cluster(acked(acked(job, 0), 2))
        assert of(DeclareDead, view, now=SETTINGS.pause) == []
        assert the(DeclareDead, view, now=SETTINGS.start).node == "z"

    def test_the_last_holder_is_not_given_up(self) -> None:
        job = fresh(running(spec(2), 5, Phase.PAUSE), 1, "z")
        view = cluster(acked(job, 1, StepPhase.EMPTY))
        assert of(DeclareDead, view, now=1e6) == []
        wait = the(Wait, view, now=1e6)
        assert wait.blocked
        assert "n0: it has not acknowledged PAUSE within 15 s; nobody else" in wait.reason
        status = the(UpdateStatus, view, now=1e6).status
        assert status.state is JobState.WAITING
        assert status.reason == wait.reason

    def test_two_holders_are_not_given_up_together(self) -> None:
        view = cluster(running(spec(2), phase=Phase.PAUSE))
        assert of(DeclareDead, view, now=1e6) == []
        assert len(of(Wait, view, now=1e6)) == 2

    def test_as_soon_as_one_answers_the_others_are_lost(self) -> None:
        view = cluster(acked(running(spec(), phase=Phase.PAUSE), 1))
        assert {one.node for one in of(DeclareDead, view, now=1e6)} == {"n0", "n2"}

    def test_each_position_by_itself(self) -> None:
        """Position 0 is on n0 and n2, position 1 on n1 and n3."""
        job = acked(running(spec(2, 2), phase=Phase.PAUSE), 3)
        view = cluster(job)
        assert the(DeclareDead, view, now=1e6).node == "n1"
        assert len(of(Wait, view, now=1e6)) == 2

    def test_a_holder_that_is_only_suspect_counts_for_nothing(self) -> None:
        job = acked(running(spec(2), phase=Phase.PAUSE), 0)
        view = cluster(job, without=["n0"], suspects={"n0": Verdict.ALIVE})
        assert of(DeclareDead, view, now=1e6) == []

    def test_an_owner_known_to_be_empty_is_no_holder(self) -> None:
        job = running(spec(2), phase=Phase.PAUSE)
        job = fresh(job, 1, "z")
        view = cluster(acked(job, 0))
        assert the(DeclareDead, view, now=1e6).node == "z"

    def test_an_ack_of_an_older_generation_is_none(self) -> None:
        job = acked(running(spec(), phase=Phase.PAUSE), 0)
        job = acked(acked(job, 2), 1, generation=3)
        assert the(DeclareDead, cluster(job), now=1e6).node == "n1"


class TestRestore:
    def job(self, *restored: int, joined: tuple[int, ...] = ()) -> JobView:
        job = running(spec(), phase=Phase.RESTORE)
        for number in range(3):
            job = acked(job, number)
            generation = 4 if number in joined else 3
            at = 4 if number in restored else 3
            job = said(job, number, generation=generation, restored=at, step=5)
        return job

    def test_who_does_not_restore_in_time_is_lost(self) -> None:
        view = cluster(self.job(0, 2, joined=(0,)))
        assert of(DeclareDead, view, now=SETTINGS.restore - 0.1) == []
        dead = the(DeclareDead, view, now=SETTINGS.restore)
        assert dead.node == "n1"
        assert "it has not restored within 300 s" in dead.reason

    def test_a_spare_that_can_not_pull_because_of_its_source_is_not_lost_with_it(self) -> None:
        job = self.job()
        for number in (1, 2):
            job = acked(job, number, StepPhase.EMPTY)
        view = cluster(job)
        assert of(DeclareDead, view, now=1e6) == []
        assert of(Wait, view, now=1e6)[0].blocked

    def test_the_source_that_keeps_others_waiting_is_to_blame(self) -> None:
        job = self.job(0)
        for number in (1, 2):
            job = acked(job, number, StepPhase.EMPTY)
        source = Source(0, 1, "n1", "i1.0", "n1:0")
        job = replace(acked(job, 1), generation=replace(job.current, sources=(source,)))
        assert the(DeclareDead, cluster(job), now=1e6).node == "n1"

    def pulling(self, *sources: int, regroups: int = 0) -> JobView:
        """n1 pulls, the others have restored."""
        job = acked(self.job(0, 2), 1, StepPhase.EMPTY)
        named = tuple(Source(0, one, f"n{one}", f"i{one}.0", f"n{one}:0") for one in sources)
        return replace(job, generation=replace(job.current, sources=named, regroups=regroups))

    def test_with_one_source_either_may_hang_and_who_does_shows_when_all_stop(self) -> None:
        view = cluster(self.pulling(0))
        assert none(view, Transition, now=SETTINGS.restore - 0.1)
        assert none(view, DeclareDead, now=SETTINGS.restore)
        change = the(Transition, view, now=SETTINGS.restore)
        assert (change.generation.generation, change.generation.phase) == (5, Phase.PAUSE)
        assert change.generation.regroups == 1
        assert "ranks 1 have not restored within 300 s, each from one node" in change.reason

    def test_once_all_have_stopped_who_can_not_pull_is_lost(self) -> None:
        assert the(DeclareDead, cluster(self.pulling(0, regroups=1)), now=1e6).node == "n1"

    def test_with_several_sources_who_can_not_pull_is_lost(self) -> None:
        assert the(DeclareDead, cluster(self.pulling(0, 2)), now=1e6).node == "n1"

    def test_a_hung_source_of_a_job_that_never_ran_is_given_up(self) -> None:
        """There is nothing to lose yet: all begin anew."""
        job = replace(self.job(), progress={})
        for number in range(3):
            job = acked(job, number, StepPhase.EMPTY, digest="seed")
        source = Source(0, 0, "n0", "i0.0", "n0:0", "seed")
        record = replace(job.current, sources=(source,), initial=True)
        ran = cluster(replace(job, generation=record))
        assert none(ran, DeclareDead, now=1e6)
        job = replace(job, generation=replace(record, last_running_generation=0))
        assert the(DeclareDead, cluster(job), now=1e6).node == "n0"

    def test_who_restored_but_can_not_join_gets_a_new_group(self) -> None:
        view = cluster(self.job(0, 1, 2, joined=(0, 2)))
        assert of(Transition, view, now=SETTINGS.restore - 0.1) == []
        change = the(Transition, view, now=SETTINGS.restore)
        assert (change.generation.generation, change.generation.phase) == (5, Phase.PAUSE)
        assert change.generation.regroups == 1
        assert "not all have joined in 300 s" in change.reason
