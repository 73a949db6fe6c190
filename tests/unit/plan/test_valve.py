# SPDX-License-Identifier: Apache-2.0
"""A job whose automatic recovery an operator has paused."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import Generation, JobState, JobView, Phase, StepPhase, Verdict
from coordinator.plan import DeclareDead, Probe, Transition, UpdateStatus, Wait
from tests.unit.plan.views import (
    JOB,
    acked,
    cluster,
    ended,
    node,
    none,
    of,
    running,
    said,
    spec,
    the,
)


def paused(job: JobView) -> JobView:
    return replace(job, job=replace(job.job, recovery_paused="flapping switch"))


def test_a_dead_owner_is_not_replaced_but_what_would_be_done_is_said() -> None:
    view = cluster(paused(running(spec())), nodes=[node("n3", hot=True)], dead=["n1"])
    assert none(view, Transition)
    wait = the(Wait, view)
    assert wait.blocked
    assert "paused (flapping switch)" in wait.reason
    assert "would write generation 5 PAUSE: slot 1: n1 -> hot spare n3" in wait.reason
    status = the(UpdateStatus, view).status
    assert status.state is JobState.WAITING
    assert status.reason == wait.reason


def test_resumed_it_is_replaced_at_once() -> None:
    view = cluster(running(spec()), nodes=[node("n3", hot=True)], dead=["n1"])
    assert the(Transition, view).generation.generation == 5


def test_a_suspect_owner_is_asked_but_not_declared_dead() -> None:
    for verdict in Verdict:
        view = cluster(paused(running(spec())), without=["n1"], suspects={"n1": verdict})
        assert none(view, DeclareDead)
        if verdict is Verdict.DEAD:
            assert "would declare n1 (n1-0) dead" in the(Wait, view).reason
        else:
            assert the(Probe, view).node == "n1"


def test_an_owner_of_another_job_is_declared_dead_as_ever() -> None:
    other = running(spec(1, name="other"), 2)
    moved = replace(other.slots[0], node="m0", incarnation="m0-0")
    other = replace(other, slots={0: moved}, progress={})
    view = cluster(paused(running(spec())), other)
    view = replace(view, nodes={k: v for k, v in view.nodes.items() if k not in ("m0", "n1")})
    suspects = cluster(suspects={"n1": Verdict.DEAD, "m0": Verdict.DEAD}).suspects
    view = replace(view, suspects=suspects)
    assert [one.node for one in of(DeclareDead, view)] == ["m0"]


def test_nobody_who_misses_a_deadline_is_declared_dead() -> None:
    job = paused(running(spec(), phase=Phase.PAUSE))
    for number in (0, 2):
        job = acked(job, number)
    assert none(cluster(job), DeclareDead, now=1e6)
    assert "would declare n1" in the(Wait, cluster(job), now=1e6).reason


def test_it_does_not_start_go_on_or_regroup() -> None:
    fresh = JobView(job=running(spec()).job)
    nodes = [node(f"n{number}") for number in range(4)]
    assert none(cluster(paused(fresh), nodes=nodes), Transition)
    pause = paused(running(spec(), phase=Phase.PAUSE))
    for number in range(3):
        pause = acked(pause, number)
    assert none(cluster(pause), Transition)
    broken = replace(paused(running(spec())), broken_at=0.0)
    assert none(cluster(broken), Transition, now=1e6)


def test_it_ends_by_its_script_and_by_the_operator() -> None:
    job = paused(running(spec()))
    stopped = replace(job, job=replace(job.job, stop="enough"))
    assert the(Transition, cluster(stopped)).generation.phase is Phase.STOPPED
    for number in range(3):
        job = said(job, number, generation=4, step=9, phase=StepPhase.DONE, digest="d")
    assert the(Transition, cluster(job)).generation.phase is Phase.FINISHED


def test_it_does_not_fail() -> None:
    view = ended(cluster(paused(running(spec(restarts=0)))), 1)
    assert none(view, Transition)
    assert "would write generation 4 FAILED" in the(Wait, view).reason


def test_a_healthy_one_runs_on_and_says_that_it_is_paused() -> None:
    view = cluster(paused(running(spec(spares=0))))
    assert none(view, Wait)
    status = the(UpdateStatus, view).status
    assert status.state is JobState.RUNNING
    assert status.reason == "as it is; automatic recovery is paused (flapping switch)"


def test_the_nodes_that_a_paused_job_would_take_are_free_for_others() -> None:
    held = paused(running(spec(spares=0)))
    view = cluster(held, nodes=[node("n3", hot=True)], dead=["n1"])
    other = JobView(job=replace(held.job, spec=spec(1, name="zz"), recovery_paused=""))
    view = replace(view, jobs={JOB: held, "zz": other})
    taken: Generation = the(Transition, view).generation
    assert taken.job == "zz"
