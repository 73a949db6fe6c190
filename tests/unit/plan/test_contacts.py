# SPDX-License-Identifier: Apache-2.0
"""Owners that don't answer the leader although their lease lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from coordinator.model import (
    Answer,
    ClusterView,
    Contact,
    JobState,
    JobView,
    Line,
    Phase,
    Statement,
    Verdict,
)
from coordinator.plan import AskWitnesses, DeclareDead, Probe, Transition, UpdateStatus, Wait, plan
from coordinator.plan.explain import actions, notes
from tests.unit.plan.views import JOB, SETTINGS, acked, cluster, none, of, running, said, spec, the

LATER = 100.0
SAID = (Statement("n2", Answer.SILENT, "nothing"), Statement("n3", Answer.SILENT, "nothing"))


def seen(view: ClusterView, lines: Mapping[str, Line], **more: object) -> ClusterView:
    """With a contact to every node that has a place, ``lines`` are those that don't answer."""
    contacts = {
        (name, live.record.incarnation): Contact(
            name, live.record.incarnation, (f"{name}:1",), Line.ANSWERS, f"{name}:1 answers"
        )
        for name, live in view.nodes.items()
    }
    for name, line in lines.items():
        who = (name, f"{name}-0")
        contacts[who] = replace(contacts[who], line=line, detail=f"{name} is {line.name}", **more)  # type: ignore[arg-type]
    return replace(view, contacts=contacts)


def four(phase: Phase = Phase.RUNNING) -> JobView:
    return running(spec(replicas=4), phase=phase)


@pytest.mark.parametrize("line", [Line.REFUSED, Line.REPLACED])
def test_plain_evidence_needs_no_lease_s_end(line: Line) -> None:
    view = seen(cluster(four()), {"n1": line})
    dead = the(DeclareDead, view)
    assert (dead.node, dead.incarnation) == ("n1", "n1-0")
    assert f"n1 is {line.name}" in dead.reason


@pytest.mark.parametrize("line", [Line.FROZEN, Line.UNKNOWN])
def test_a_frozen_node_waits_for_its_lease(line: Line) -> None:
    assert none(seen(cluster(four()), {"n1": line}), DeclareDead, AskWitnesses, now=LATER)


class TestSilence:
    @pytest.mark.parametrize("line", [Line.LOST, Line.SILENT])
    def test_two_others_are_asked(self, line: Line) -> None:
        asked = the(AskWitnesses, seen(cluster(four()), {"n1": line}))
        assert asked.witnesses == (("n2", "n2-0"), ("n3", "n3-0"))
        assert asked.addresses == ("n1:1",)

    def test_the_last_in_order_is_asked_about_by_the_first(self) -> None:
        asked = the(AskWitnesses, seen(cluster(four()), {"n3": Line.SILENT}))
        assert [name for name, _ in asked.witnesses] == ["n0", "n1"]

    def test_who_says_so_too_makes_it_dead(self) -> None:
        view = seen(cluster(four()), {"n1": Line.SILENT}, said=SAID)
        assert "n2 says so too" in the(DeclareDead, view).reason

    def test_the_word_of_one_is_awaited_while_the_other_is_to_speak(self) -> None:
        view = seen(cluster(four()), {"n1": Line.SILENT}, said=SAID[:1])
        assert none(view, DeclareDead)
        assert of(DeclareDead, view, now=LATER)

    def test_who_reaches_it_saves_it(self) -> None:
        said = (SAID[0], Statement("n3", Answer.ACCEPTED, "it accepts"))
        assert none(seen(cluster(four()), {"n1": Line.SILENT}, said=said), DeclareDead, now=LATER)

    def test_nobody_who_could_speak_saves_it_too(self) -> None:
        mute = (Statement("n2", Answer.NONE), Statement("n3", Answer.NONE))
        assert none(seen(cluster(four()), {"n1": Line.SILENT}, said=mute), DeclareDead, now=LATER)

    def test_a_broken_group_is_a_witness_then(self) -> None:
        mute = (Statement("n2", Answer.NONE), Statement("n3", Answer.NONE))
        job = replace(said(four(), 0, generation=4, step=5, broken_generation=4), broken_at=0.0)
        view = seen(cluster(job), {"n1": Line.SILENT}, said=mute)
        assert "its group is broken" in the(DeclareDead, view, now=LATER).reason

    def test_not_for_one_that_has_said_itself_that_it_is_broken(self) -> None:
        mute = (Statement("n2", Answer.NONE), Statement("n3", Answer.NONE))
        job = replace(said(four(), 1, generation=4, step=5, broken_generation=4), broken_at=0.0)
        assert none(seen(cluster(job), {"n1": Line.SILENT}, said=mute), DeclareDead, now=LATER)

    def test_a_job_that_goes_on_clears_its_suspects(self) -> None:
        job = replace(four(), progress_at=3.0)
        view = seen(cluster(job), {"n1": Line.SILENT}, said=SAID, since=1.0, tried=2.0)
        assert none(view, DeclareDead, now=LATER)
        early = replace(four(), progress_at=2.0)  # written late, of a step before
        view = seen(cluster(early), {"n1": Line.SILENT}, said=SAID, since=1.0, tried=2.0)
        assert of(DeclareDead, view, now=LATER)

    def test_who_goes_on_writing_lives(self) -> None:
        view = seen(cluster(four()), {"n1": Line.SILENT}, said=SAID, tried=1.0, wrote=2.0)
        assert none(view, DeclareDead, now=LATER)


class TestBudget:
    def test_more_at_once_wait_for_their_leases(self) -> None:
        view = seen(cluster(four()), {"n1": Line.REFUSED, "n2": Line.REFUSED})
        assert none(view, DeclareDead, Transition)

    def test_of_more_nodes_more_may_die(self) -> None:
        view = seen(cluster(running(spec(8))), {"n1": Line.REFUSED, "n2": Line.REFUSED})
        assert {one.node for one in of(DeclareDead, view)} == {"n1", "n2"}

    def test_who_has_just_died_counts(self) -> None:
        view = seen(cluster(four(), dead=["n1"]), {"n1": Line.REFUSED, "n2": Line.REFUSED})
        assert none(view, DeclareDead)

    def test_the_leader_that_reaches_nobody_doubts_itself(self) -> None:
        lines = {f"n{number}": Line.SILENT for number in range(4)}
        view = seen(cluster(four()), lines, said=SAID)
        assert none(view, DeclareDead, AskWitnesses, now=LATER)


def test_the_last_holder_of_a_position_waits_for_its_lease() -> None:
    """Two positions; the other replica's rank of the same one is gone with its node."""
    job = running(spec(replicas=4, positions=1))
    job = replace(job, progress={"n1": job.progress["n1"]}, acks={})
    assert none(seen(cluster(job), {"n1": Line.REFUSED}), DeclareDead)


def test_not_while_an_outage_of_etcd_is_fresh() -> None:
    view = seen(cluster(four(), no_eviction_before=10.0), {"n1": Line.REFUSED})
    assert none(view, DeclareDead, now=9.9)
    assert of(DeclareDead, view, now=10.0)


class TestBrokenGroup:
    def broken(self) -> JobView:
        job = said(four(), 0, generation=4, step=5, broken_generation=4, broken="reset by peer")
        return replace(said(job, 2, generation=4, step=5, broken_generation=4), broken_at=0.0)

    def test_who_has_said_nothing_is_asked_at_once(self) -> None:
        asked = of(Probe, seen(cluster(self.broken()), {}))
        assert [one.node for one in asked] == ["n1", "n3"]

    def test_it_waits_for_who_is_being_tried(self) -> None:
        """What replaces it mends the group too: one generation, not two."""
        view = seen(cluster(self.broken()), {"n1": Line.LOST})
        assert none(view, Transition, now=LATER)
        assert of(Transition, seen(cluster(self.broken()), {}), now=LATER)


def test_what_fails_together_is_mended_together() -> None:
    job = running(spec(8))
    view = seen(cluster(job, dead=["n1"]), {"n1": Line.REFUSED, "n2": Line.LOST})
    assert "n2" in the(Wait, view).reason
    assert none(view, Transition)


def test_an_operator_s_pause_holds_a_verdict_back() -> None:
    job = four()
    job = replace(job, job=replace(job.job, recovery_paused="maintenance"))
    view = seen(cluster(job), {"n1": Line.REFUSED})
    assert none(view, DeclareDead)
    assert "declare n1" in the(Wait, view).reason


def test_a_job_s_status_says_on_whom_no_verdict_is_given() -> None:
    lines = {f"n{number}": Line.REFUSED for number in range(4)}
    status = the(UpdateStatus, seen(cluster(four()), lines)).status
    assert status.state is JobState.RUNNING
    assert "n0: n0 is REFUSED; but 4 nodes don't answer" in status.held
    assert "disruption budget of 1" in status.held
    assert "and 1 more" in status.held
    calm = seen(cluster(replace(four(), status=status)), {})
    assert the(UpdateStatus, calm).status.held == ""


def test_operators_are_told_what_is_known() -> None:
    view = seen(cluster(four()), {"n1": Line.FROZEN})
    (note,) = notes(view, view.jobs[JOB])
    assert (note.node, note.place) == ("n1", "slot 1")
    assert "does not answer: FROZEN, n1 is FROZEN" in note.note
    (told,) = [one for one in actions(plan, view, JOB, LATER, SETTINGS) if one.kind == "held"]
    assert "its lease decides" in told.reason


def test_a_suspect_without_a_lease_is_judged_as_before() -> None:
    view = cluster(acked(four(phase=Phase.PAUSE), 0), suspects={"n1": Verdict.DEAD})
    gone = seen(view, {"n1": Line.SILENT})
    gone = replace(gone, nodes={name: one for name, one in gone.nodes.items() if name != "n1"})
    assert "its lease is gone" in the(DeclareDead, gone).reason


def test_silence_found_while_many_were_silent_counts_no_more() -> None:
    """They come back one after the other: the last of them isn't dead for being the last."""
    view = seen(cluster(four()), {"n1": Line.SILENT}, said=SAID, tried=1.0)
    assert none(replace(view, doubted_at=1.0), DeclareDead, AskWitnesses, now=LATER)
    assert of(DeclareDead, replace(view, doubted_at=0.9), now=LATER)
