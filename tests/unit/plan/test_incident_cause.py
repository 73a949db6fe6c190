# SPDX-License-Identifier: Apache-2.0
"""What an incident is said to have begun with."""

from __future__ import annotations

from coordinator.model import Cause, Job, JobSpec, JobView
from coordinator.plan import incidents


def _view(incident_cause: Cause) -> JobView:
    job = Job(spec=JobSpec(name="j"))
    begun = incidents.detected(JobView(job), 2, incident_cause, (), "first")
    return JobView(job, incident=begun)


def test_a_culprit_that_shows_later_is_the_cause() -> None:
    grown = incidents.detected(_view(Cause.GROUP_BROKEN), 3, Cause.NODE_LOST, ("n1",), "n1 died")
    assert (grown.cause, grown.detail, grown.nodes) == (Cause.NODE_LOST, "n1 died", ("n1",))
    assert [mark.note for mark in grown.marks] == ["first", "n1 died"]


def test_a_broken_group_after_a_death_is_not_the_cause() -> None:
    grown = incidents.detected(_view(Cause.TRAINER_ENDED), 3, Cause.GROUP_BROKEN, (), "broken")
    assert (grown.cause, grown.detail) == (Cause.TRAINER_ENDED, "first")
