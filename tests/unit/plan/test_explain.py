# SPDX-License-Identifier: Apache-2.0
"""What the planner's actions are called, and what stands against nodes."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import Job, JobView, NodeFlags, Verdict
from coordinator.plan import explain, plan
from tests.unit.plan.views import JOB, SETTINGS, cluster, node, running, spec


def test_every_action_of_a_job_is_told_with_its_reason() -> None:
    view = cluster(running(spec(spares=0)), nodes=[node("n3", hot=True)], dead=["n1"])
    (told,) = explain.actions(plan, view, JOB, 0.0, SETTINGS)
    assert (told.kind, told.job) == ("generation", JOB)
    assert told.what == "write generation 5 PAUSE"
    assert "slot 1: n1 -> hot spare n3" in told.reason


def test_a_probe_of_an_owner_is_told_and_of_a_stranger_not() -> None:
    job = running(spec(spares=0))
    view = cluster(job, without=["n1"], suspects={"n1": Verdict.UNKNOWN, "zz": Verdict.UNKNOWN})
    assert [one.node for one in explain.actions(plan, view, JOB, 0.0, SETTINGS)] == ["n1"]


def test_the_difference_is_what_the_change_brings() -> None:
    before = cluster(running(spec(spares=2)), nodes=[node("n3"), node("n4")])
    after = replace(before, flags={"n3": NodeFlags(cordoned="a fan")})
    told = explain.difference(plan, before, before, 0.0, SETTINGS)
    assert told == ()
    after = replace(after, spares={"n3": cluster(spares={"n3": JOB}).spares["n3"]})
    (told_,) = explain.difference(plan, before, after, 0.0, SETTINGS)
    assert (told_.kind, told_.node, told_.job) == ("spare", "n3", JOB)
    assert told_.reason == "cordoned: a fan"


def test_notes_name_what_stands_against_nodes() -> None:
    job = running(spec())
    view = cluster(
        job,
        JobView(job=Job(spec(name="other"))),
        nodes=[node("n3"), node("n4"), node("n5", unhealthy="sick"), node("n6"), node("n7")],
        without=["n1"],
        suspects={"n1": Verdict.ALIVE},
        spares={"n4": JOB, "n7": "other"},
    )
    flags = {"n0": NodeFlags(cordoned="a fan"), "n4": NodeFlags(draining="a move")}
    view = replace(view, flags=flags)
    assert [(one.node, one.place, one.note) for one in explain.notes(view, job)] == [
        ("n0", "slot 0", "cordoned: a fan"),
        ("n1", "slot 1", "suspect, its lease is gone; its probe says ALIVE: a reset"),
        ("n4", "spare", "draining: a move"),
        ("n5", "free", "unhealthy: sick"),
        ("n7", "spare", "it is kept for job other of priority 0"),
    ]
