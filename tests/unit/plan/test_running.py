# SPDX-License-Identifier: Apache-2.0
"""A job that runs: how it comes to that, what breaks it, and its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    Cause,
    JobState,
    JobStatus,
    JobView,
    Phase,
    SlotRank,
    StepPhase,
)
from coordinator.plan import Transition, UpdateIncident, UpdateStatus, Wait
from tests.unit.plan.views import (
    SETTINGS,
    acked,
    cluster,
    fresh,
    node,
    none,
    of,
    open_incident,
    running,
    said,
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


class TestRunning:
    def restore(self, joined: int) -> JobView:
        job = running(spec(), phase=Phase.RESTORE)
        for number in range(3):
            at = 4 if number < joined else 3
            job = said(acked(job, number), number, generation=at, restored=at, step=5)
        return job

    @pytest.mark.parametrize("joined", [0, 1, 2])
    def test_waits_until_all_have_joined(self, joined: int) -> None:
        missing = ", ".join(str(one) for one in range(joined, 3))
        assert the(Wait, cluster(self.restore(joined))).reason == (
            f"RESTORE: ranks {missing} have not joined yet"
        )

    def test_runs_once_all_have(self) -> None:
        change = the(Transition, cluster(self.restore(3))).generation
        assert (change.generation, change.phase) == (4, Phase.RUNNING)
        assert change.last_running_generation == 4

    def test_an_unnamed_instance_does_not_count(self) -> None:
        job = self.restore(3)
        slot = replace(job.slots[1], ranks=(SlotRank("another", 4),))
        job = replace(job, slots={**job.slots, 1: slot})
        assert the(Wait, cluster(job)).reason == "RESTORE: ranks 1 have not joined yet"


class TestRegroup:
    def broken(self, regroups: int = 0, phase: Phase = Phase.RUNNING) -> JobView:
        job = running(spec(), phase=phase, broken_at=100.0)
        # it may break while a rank joins: its generation is still the one before
        joined = 4 if phase is Phase.RUNNING else 3
        job = said(
            job, 1, generation=joined, step=5, broken="connection reset", broken_generation=4
        )
        return replace(job, generation=replace(job.current, regroups=regroups))

    @pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.RESTORE])
    def test_a_broken_group_without_a_culprit(self, phase: Phase) -> None:
        view = cluster(self.broken(phase=phase))
        assert of(Transition, view, now=100.0 + SETTINGS.regroup - 0.01) == []
        change = the(Transition, view, now=100.0 + SETTINGS.regroup)
        assert (change.generation.generation, change.generation.phase) == (5, Phase.PAUSE)
        assert not (change.slots)
        assert not (change.assign)
        assert not change.unassign
        assert change.generation.changed_slots == ()
        assert change.generation.regroups == 1
        assert "the group is broken: rank 1: connection reset" in change.reason
        assert change.incident is not None
        assert change.incident.cause is Cause.GROUP_BROKEN

    def test_backs_off(self) -> None:
        for regroups in range(10):
            delay = min(SETTINGS.regroup * 2**regroups, SETTINGS.regroup_max)
            view = cluster(self.broken(regroups))
            assert of(Transition, view, now=100.0 + delay - 0.01) == []
            change = the(Transition, view, now=100.0 + delay)
            assert change.generation.regroups == regroups + 1

    def test_a_committed_step_ends_the_row(self) -> None:
        job = open_incident(self.broken(5), "detected", "first_step", closed=True)
        change = the(Transition, cluster(job), now=100.0 + SETTINGS.regroup)
        assert change.generation.regroups == 1

    def test_a_culprit_comes_first(self) -> None:
        view = cluster(self.broken(), nodes=[node("z")], dead=["n2"])
        change = the(Transition, view, now=100.0)
        assert [one.node for one in change.slots] == ["z"]
        assert change.generation.regroups == 0

    def test_no_progress_pauses_the_job(self) -> None:
        job = running(spec(), phase_at=0.0, progress_at=50.0)
        view = cluster(job)
        assert of(Transition, view, now=50.0 + SETTINGS.progress - 0.1) == []
        change = the(Transition, view, now=50.0 + SETTINGS.progress)
        assert change.incident is not None
        assert change.incident.cause is Cause.NO_PROGRESS

    def test_a_slow_job_comes_through_in_the_end(self) -> None:
        """A step that takes longer than the limit must not be begun again for ever."""
        job = running(spec())
        job = replace(job, generation=replace(job.current, regroups=2))
        view = cluster(job)
        assert of(Transition, view, now=4 * SETTINGS.progress - 0.1) == []
        assert of(Transition, view, now=4 * SETTINGS.progress)

    def test_an_outage_of_etcd_is_no_standstill(self) -> None:
        view = cluster(running(spec()), no_eviction_before=1000.0)
        assert of(Transition, view, now=1000.0) == []
        assert of(Transition, view, now=1000.0 + SETTINGS.progress)


class TestEnd:
    def done(self, *numbers: int, digest: str = "d") -> JobView:
        job = running(spec())
        for number in numbers:
            job = said(job, number, generation=4, phase=DONE, step=9, digest=digest)
        return job

    @pytest.mark.parametrize("numbers", [(), (0,), (0, 1), (1, 2)])
    def test_nobody_is_released_before_all_are_done(self, numbers: tuple[int, ...]) -> None:
        assert of(Transition, cluster(self.done(*numbers))) == []

    def test_finished_once_all_are(self) -> None:
        end = the(Transition, cluster(self.done(0, 1, 2)))
        assert end.generation.phase is Phase.FINISHED
        assert end.reason == "every rank is done at step 9"
        # with the digests, which the nodes keep in etcd only as long as their leases live
        assert end.status == JobStatus(JobState.FINISHED, end.reason, 0, 9, 4, ("d",))

    def test_done_in_an_older_generation_does_not_count(self) -> None:
        job = said(self.done(0, 1), 2, generation=3, phase=DONE, step=9, digest="d")
        assert of(Transition, cluster(job)) == []

    def test_a_finished_job_needs_no_recovery(self) -> None:
        change = the(Transition, cluster(self.done(0, 1, 2), dead=["n1"])).generation
        assert change.phase is Phase.FINISHED

    def test_a_loss_before_the_last_is_done_is_recovered(self) -> None:
        """The state that who is done keeps is where the others go on."""
        view = cluster(self.done(0, 1), nodes=[node("z")], dead=["n2"])
        assert the(Transition, view).generation.phase is Phase.PAUSE
        job = acked(acked(fresh(pause(), 2, "z"), 0, DONE, 9), 1, PREPARED, 8)
        change = the(Transition, cluster(acked(job, 2, EMPTY))).generation
        assert change.resume_step == 9
        assert [one.rank for one in change.sources] == [0, 1]

    def test_different_digests_fail_the_job(self) -> None:
        job = said(self.done(0, 1), 2, generation=4, phase=DONE, step=9, digest="other")
        change = the(Transition, cluster(job)).generation
        assert change.phase is Phase.FAILED
        assert "different states at shard positions [0]" in change.reason

    def test_different_positions_have_different_states(self) -> None:
        job = running(spec(2, 2))
        for number in range(4):
            digest = f"of{number % 2}"
            job = said(job, number, generation=4, phase=DONE, step=9, digest=digest)
        assert the(Transition, cluster(job)).generation.phase is Phase.FINISHED

    def test_different_steps_fail_the_job(self) -> None:
        job = said(self.done(0, 1), 2, generation=4, phase=DONE, step=8, digest="d")
        change = the(Transition, cluster(job)).generation
        assert change.phase is Phase.FAILED
        assert "steps [8, 9]" in change.reason

    def test_the_status_tells_the_digests_and_keeps_them(self) -> None:
        job = self.done(0, 1, 2)
        job = replace(job, generation=replace(job.current, phase=Phase.FINISHED, reason="done"))
        status = the(UpdateStatus, cluster(job)).status
        assert status == JobStatus(JobState.FINISHED, "done", 0, 9, 4, ("d",))
        gone = replace(job, status=status, progress={})
        assert of(UpdateStatus, cluster(gone)) == []

    def test_a_digest_that_is_gone_does_not_shift_the_others(self) -> None:
        job = running(spec(1, 2), phase=Phase.FINISHED)
        job = said(job, 1, generation=4, phase=DONE, step=9, digest="of1")
        assert the(UpdateStatus, cluster(job)).status.digests == ("", "of1")


class TestStop:
    @pytest.mark.parametrize("phase", [Phase.PAUSE, Phase.RESTORE, Phase.RUNNING])
    def test_in_every_phase(self, phase: Phase) -> None:
        job = open_incident(running(spec(), phase=phase), "detected")
        job = replace(job, job=replace(job.job, stop="enough"))
        change = the(Transition, cluster(job, dead=["n1"]))
        assert (change.generation.generation, change.generation.phase) == (4, Phase.STOPPED)
        assert change.reason == "stopped by an operator: enough"
        assert change.incident is not None
        assert change.incident.closed

    def test_before_it_was_placed(self) -> None:
        job = running(spec())
        job = replace(job, job=replace(job.job, stop="enough"), generation=None, slots={})
        change = the(Transition, cluster(job)).generation
        assert (change.generation, change.phase) == (1, Phase.STOPPED)

    @pytest.mark.parametrize("phase", [Phase.FINISHED, Phase.STOPPED, Phase.FAILED, Phase.LOST])
    def test_not_after_its_end(self, phase: Phase) -> None:
        job = running(spec(), phase=phase)
        job = replace(job, job=replace(job.job, stop="enough"))
        view = cluster(job, dead=["n1"])
        assert none(view, Transition, Wait, UpdateIncident)
        assert the(UpdateStatus, view).status.state.name == phase.name
