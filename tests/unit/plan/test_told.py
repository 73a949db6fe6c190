# SPDX-License-Identifier: Apache-2.0
"""What people are told: a job's status, and the timeline of an incident."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    Cause,
    Incident,
    JobState,
    JobStatus,
    JobView,
    Phase,
    Pull,
    StepPhase,
)
from coordinator.plan import Transition, UpdateIncident, UpdateStatus
from tests.unit.plan.views import (
    JOB,
    SETTINGS,
    acked,
    cluster,
    fresh,
    node,
    of,
    open_incident,
    running,
    said,
    spec,
    the,
)


class TestStatus:
    def test_a_change_of_state_is_told_at_once(self) -> None:
        job = running(spec(), status=JobStatus(JobState.RECOVERING, "", 0, 5, 4))
        told = the(UpdateStatus, cluster(replace(job, status_at=0.0)), now=0.0)
        assert told.status == JobStatus(JobState.RUNNING, "as it is", 3, 5, 4)

    def test_the_step_at_most_at_its_interval(self) -> None:
        status = JobStatus(JobState.RUNNING, "as it is", 3, 4, 4)
        view = cluster(running(spec(), status=status, status_at=10.0))
        assert of(UpdateStatus, view, now=10.0 + SETTINGS.status - 0.1) == []
        assert the(UpdateStatus, view, now=10.0 + SETTINGS.status).status.step == 5

    def test_nothing_new_is_not_told(self) -> None:
        status = JobStatus(JobState.RUNNING, "as it is", 3, 5, 4)
        assert of(UpdateStatus, cluster(running(spec(), status=status)), now=1e3) == []

    def test_the_step_never_falls(self) -> None:
        job = running(spec(), status=JobStatus(JobState.RUNNING, "as it is", 3, 9, 4))
        assert of(UpdateStatus, cluster(job), now=100.0) == []

    @pytest.mark.parametrize(
        ("phase", "ran", "state"),
        [
            (Phase.PAUSE, True, JobState.RECOVERING),
            (Phase.RESTORE, True, JobState.RECOVERING),
            (Phase.PAUSE, False, JobState.STARTING),
            (Phase.RESTORE, False, JobState.STARTING),
        ],
    )
    def test_of_each_phase(self, phase: Phase, ran: bool, state: JobState) -> None:
        job = running(spec(), phase=phase, progress={})
        if not ran:
            job = replace(job, generation=replace(job.current, last_running_generation=0))
        status = the(UpdateStatus, cluster(job)).status
        assert status.state is state
        assert status.replicas == 0
        assert status.reason.startswith(phase.name)

    def test_is_left_to_the_pass_after_a_transition(self) -> None:
        view = cluster(running(spec()), dead=["n1"])
        assert of(Transition, view)
        assert of(UpdateStatus, view) == []

    def test_of_an_ended_job_is_not_told_again(self) -> None:
        job = running(spec(), phase=Phase.FAILED, status=JobStatus(JobState.FAILED, "boom"))
        assert of(UpdateStatus, cluster(job), now=1e9) == []


class TestTimeline:
    def marks(self, incident: Incident | None) -> list[str]:
        assert incident is not None
        return [one.phase for one in incident.marks]

    def test_from_detection_to_the_first_step(self) -> None:
        """Each of the planner's actions in a recovery, one after the other."""
        job = running(spec())
        change = the(Transition, cluster(job, nodes=[node("z", hot=True)], dead=["n1"]))
        incident = change.incident
        assert incident is not None
        assert (incident.id, incident.job) == (f"{JOB}.5", JOB)
        assert (incident.first_generation, incident.last_generation) == (5, 5)
        assert (incident.cause, incident.nodes) == (Cause.NODE_LOST, ("n1",))
        assert incident.marks[0].note == incident.detail == change.reason
        assert incident.resume_step == -1
        assert change.generation.incident == incident.id

        job = fresh(replace(job, generation=change.generation, incident=incident), 1, "z", 5)
        job = acked(acked(acked(job, 0), 1, StepPhase.EMPTY), 2, StepPhase.PREPARED, 4)
        change = the(Transition, cluster(job))
        incident = change.incident
        assert self.marks(incident) == ["detected", "paused"]
        assert incident is not None
        assert (incident.resume_step, incident.lost_steps) == (5, 1)

        slots = {**job.slots, **{one.slot: one for one in change.slots}}
        job = replace(job, generation=change.generation, incident=incident, slots=slots)
        job = said(job, 0, generation=5, restored=5, step=5)
        job = said(job, 2, generation=5, restored=5, step=5)
        job = said(job, 1, generation=0, restored=5, step=5, pull=Pull("n0", 1000, 0.25))
        assert of(Transition, cluster(job)) == []
        incident = the(UpdateIncident, cluster(job)).incident
        assert self.marks(incident) == ["detected", "paused", "pulled"]
        assert incident.bytes_moved == 1000
        assert incident.marks[-1].note == "1000 bytes by 1 ranks in 0.250 s"

        job = said(replace(job, incident=incident), 1, generation=5, restored=5, step=5)
        assert of(UpdateIncident, cluster(job)) == []
        change = the(Transition, cluster(job))
        incident = change.incident
        assert self.marks(incident) == ["detected", "paused", "pulled", "regrouped"]

        job = replace(job, generation=change.generation, incident=incident)
        assert of(UpdateIncident, cluster(job)) == []
        job = said(job, 2, generation=5, restored=5, step=6)
        incident = the(UpdateIncident, cluster(job)).incident
        assert self.marks(incident)[-1] == "first_step"
        assert incident.closed
        assert of(UpdateIncident, cluster(replace(job, incident=incident))) == []

    def test_what_is_pulled_is_told_before_the_group_stands(self) -> None:
        job = open_incident(running(spec(), phase=Phase.RESTORE), "detected", "paused")
        for number in range(3):
            job = said(job, number, generation=4, restored=4, step=5)
        assert of(Transition, cluster(job)) == []
        assert self.marks(the(UpdateIncident, cluster(job)).incident)[-1] == "pulled"

    def test_an_incident_goes_on_over_generations(self) -> None:
        job = open_incident(running(spec(), phase=Phase.RESTORE), "detected", "paused", "pulled")
        change = the(Transition, cluster(job, nodes=[node("z")], dead=["n2"]))
        incident = change.incident
        assert incident is not None
        assert (incident.id, incident.first_generation, incident.last_generation) == (
            f"{JOB}.4",
            4,
            5,
        )
        assert incident.nodes == ("n2",)
        assert self.marks(incident) == ["detected", "paused", "pulled", "detected"]
        assert change.generation.incident == incident.id

        job = replace(running(spec(), 5, Phase.RESTORE), incident=incident)
        for number in range(3):
            job = said(job, number, generation=5, restored=5, step=5)
        told = the(UpdateIncident, cluster(job)).incident
        assert self.marks(told)[-2:] == ["detected", "pulled"], "once more for this generation"

    def test_bytes_add_up(self) -> None:
        job = open_incident(
            running(spec(), phase=Phase.RESTORE), "detected", "paused", bytes_moved=500
        )
        for number in range(3):
            pull = Pull("n0", 7, 1.0) if number else None
            job = said(job, number, generation=4, restored=4, step=5, pull=pull)
        assert the(UpdateIncident, cluster(job)).incident.bytes_moved == 514

    def test_a_closed_one_is_followed_by_another(self) -> None:
        job = open_incident(running(spec()), "detected", "first_step", closed=True)
        incident = the(Transition, cluster(job, dead=["n1"])).incident
        assert incident is not None
        assert incident.id == f"{JOB}.5"
        assert self.marks(incident) == ["detected"]

    def test_a_rank_that_is_done_closes_it_too(self) -> None:
        """A recovery at the very end: there is no further step."""
        job = open_incident(running(spec()), "detected")
        job = said(job, 0, generation=4, step=5, phase=StepPhase.DONE, digest="d")
        assert the(UpdateIncident, cluster(job)).incident.closed

    def test_nothing_is_lost_when_all_roll_forward_but_one(self) -> None:
        def lost(*phases: StepPhase) -> int:
            job = open_incident(running(spec(), phase=Phase.PAUSE), "detected")
            for number, phase in enumerate(phases):
                job = acked(job, number, phase, 9)
            incident = the(Transition, cluster(job)).incident
            assert incident is not None
            return incident.lost_steps

        done, computing = StepPhase.DONE, StepPhase.COMPUTING
        assert lost(done, done, done) == 0
        assert lost(computing, computing, computing) == 1

    def test_without_an_incident_there_is_none(self) -> None:
        job: JobView = running(spec(), phase=Phase.PAUSE)
        for number in range(3):
            job = acked(job, number)
        assert the(Transition, cluster(job)).incident is None
