# SPDX-License-Identifier: Apache-2.0
"""The trainer's decisions, one by one, and what must hold of them under any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do, Standing, Verdict

RUNNING = Standing(
    phase=StepPhase.COMPUTING,
    step=5,
    ready=True,
    pristine=False,
    joined=3,
    stopped=3,
    answered=3,
    restored=3,
    resume_step=4,
)
STOPPED = RUNNING._replace(stopped=4, answered=4)
FRESH = Standing(ready=True, stopped=4, answered=4)


def prepared(standing: Standing) -> Standing:
    return standing._replace(phase=StepPhase.PREPARED)


HELD = RUNNING._replace(held=3)


def test_an_agreed_stop_holds_a_rank_before_its_next_step() -> None:
    agreed = phases.may_update(prepared(RUNNING), agreed=True, stop_after=True)
    assert (agreed.do, agreed.standing.held) == (Do.GO, 3)
    assert not phases.at_boundary(agreed.standing)
    done = phases.updated(agreed.standing).standing
    assert (done.phase, done.step) == (StepPhase.COMPUTING, 6)
    assert phases.at_boundary(done)
    assert phases.may_begin(done).do is Do.WAIT
    assert phases.finish(done).do is Do.WAIT
    assert not phases.undisturbed(done)
    stopped = phases.on_stop(done, 4).standing
    assert phases.may_answer(stopped).do is Do.GO
    assert phases.at_boundary(stopped)
    repeats = phases.on_restore(phases.may_answer(stopped).standing, 4, 6, False, False)
    assert repeats.do is Do.REPEAT
    on = phases.joined(repeats.standing, 4).standing
    assert not phases.at_boundary(on)
    assert phases.may_begin(on).do is Do.GO
    assert phases.undisturbed(on)


def test_a_wish_counts_only_where_the_whole_agreement_has_ended() -> None:
    late = prepared(RUNNING)._replace(stopped=4)
    assert phases.may_update(late, agreed=True, stop_after=True).standing.held == 0
    assert phases.may_update(prepared(RUNNING), agreed=False, stop_after=True).do is Do.WAIT
    # who rolls forward has not agreed, and needs not: it is stopped already
    rolled = late._replace(answered=4, restored=4, resume_step=6)
    assert phases.may_update(rolled, agreed=False).standing.held == 0


def test_a_rank_without_a_group_stands_at_no_boundary() -> None:
    assert not phases.at_boundary(Standing())
    assert not phases.at_boundary(FRESH)
    assert phases.at_boundary(HELD)
    assert not phases.at_boundary(prepared(HELD))


def test_a_stop_is_taken_once_and_older_ones_never() -> None:
    taken = phases.on_stop(RUNNING, 4)
    assert (taken.do, taken.standing.stopped) == (Do.GO, 4)
    assert phases.on_stop(taken.standing, 4).do is Do.IGNORE
    assert phases.on_stop(taken.standing, 3).do is Do.IGNORE
    assert phases.on_stop(taken.standing, 9).standing.stopped == 9
    assert phases.on_stop(RUNNING._replace(torn=True), 4).do is Do.IGNORE


@pytest.mark.parametrize(
    ("standing", "do"),
    [
        (RUNNING._replace(stopped=4), Do.GO),
        (prepared(RUNNING._replace(stopped=4)), Do.GO),
        (RUNNING._replace(stopped=4, phase=StepPhase.DONE), Do.GO),
        (RUNNING._replace(stopped=4, phase=StepPhase.UPDATING), Do.WAIT),
        (Standing(stopped=4), Do.WAIT),
        (Standing(stopped=4, ready=True), Do.GO),
        (RUNNING._replace(stopped=4, torn=True), Do.IGNORE),
        (RUNNING, Do.IGNORE),
        (STOPPED, Do.IGNORE),
    ],
)
def test_when_a_stop_is_answered(standing: Standing, do: Do) -> None:
    verdict = phases.may_answer(standing)
    assert verdict.do is do
    if do is Do.GO:
        assert verdict.standing == standing._replace(answered=4)
    else:
        assert verdict.standing == standing


@pytest.mark.parametrize(
    ("standing", "resume_step", "do", "phase", "step"),
    [
        (STOPPED, 5, Do.REPEAT, StepPhase.COMPUTING, 5),
        (prepared(STOPPED), 5, Do.REPEAT, StepPhase.COMPUTING, 5),
        (STOPPED._replace(phase=StepPhase.DONE), 5, Do.REPEAT, StepPhase.DONE, 5),
        (prepared(STOPPED), 6, Do.ROLL_FORWARD, StepPhase.PREPARED, 5),
        (STOPPED, 6, Do.REFUSE, StepPhase.COMPUTING, 5),
        (STOPPED, 4, Do.REFUSE, StepPhase.COMPUTING, 5),
        (prepared(STOPPED), 7, Do.REFUSE, StepPhase.PREPARED, 5),
        (STOPPED._replace(phase=StepPhase.DONE), 6, Do.REFUSE, StepPhase.DONE, 5),
        (FRESH, 6, Do.PULL, StepPhase.EMPTY, -1),
    ],
)
def test_how_a_rank_comes_to_hold_the_resume_step(
    standing: Standing, resume_step: int, do: Do, phase: StepPhase, step: int
) -> None:
    verdict = phases.on_restore(standing, 4, resume_step, initial=False, same_initial=True)
    assert (verdict.do, verdict.standing.phase, verdict.standing.step) == (do, phase, step)
    assert verdict.reason


def test_the_initial_state_is_kept_only_where_it_is_the_sources() -> None:
    def first(standing: Standing, same: bool) -> Verdict:
        return phases.on_restore(standing, 4, 0, initial=True, same_initial=same)

    kept = first(FRESH, True)
    assert (kept.do, kept.standing.phase, kept.standing.step) == (Do.ADOPT, StepPhase.COMPUTING, 0)
    assert first(FRESH, False).do is Do.PULL
    assert first(phases.dirty(FRESH).standing, True).do is Do.PULL
    assert phases.on_restore(FRESH, 4, 0, initial=False, same_initial=True).do is Do.PULL


def test_only_the_restore_of_the_newest_stop_counts() -> None:
    def restore(standing: Standing, generation: int) -> Do:
        return phases.on_restore(standing, generation, 5, initial=False, same_initial=False).do

    assert restore(STOPPED, 3) is Do.IGNORE
    assert restore(STOPPED, 5) is Do.REFUSE
    assert restore(RUNNING._replace(stopped=4), 4) is Do.REFUSE  # not answered
    assert restore(STOPPED._replace(restored=4), 4) is Do.IGNORE


def test_who_may_update() -> None:
    ready = prepared(RUNNING)
    assert phases.may_update(ready, agreed=True).standing.phase is StepPhase.UPDATING
    assert phases.may_update(ready, agreed=False).do is Do.WAIT
    assert phases.may_update(RUNNING, agreed=True).do is Do.REFUSE
    # Stopped after the agreement: whether all others have applied it is not known here.
    late = prepared(STOPPED)
    assert phases.may_update(late, agreed=True).do is Do.WAIT
    forward = late._replace(restored=4, resume_step=6)
    assert phases.may_update(forward, agreed=False).do is Do.GO
    again = phases.on_restore(late, 4, 5, initial=False, same_initial=False).standing
    assert phases.may_update(again, agreed=True).do is Do.REPEAT
    assert phases.may_update(forward._replace(stopped=5), agreed=True).do is Do.WAIT


@given(
    st.builds(
        Standing,
        phase=st.sampled_from(StepPhase),
        step=st.integers(0, 9),
        joined=st.integers(0, 3),
        stopped=st.integers(0, 3),
        restored=st.integers(0, 3),
        resume_step=st.integers(-1, 9),
    )
)
def test_a_step_that_nothing_disturbs_changes_phase_and_step_alone(standing: Standing) -> None:
    if not phases.undisturbed(standing):
        # Then somebody says no, before anything has changed.
        refused = (phases.may_begin(standing), phases.prepare(standing))
        assert any(verdict.do is not Do.GO for verdict in refused)
        return
    for step in range(standing.step, standing.step + 3):
        assert phases.may_begin(standing).do is Do.GO
        expected = standing
        for phase, at, decide in (
            (StepPhase.PREPARED, step, phases.prepare),
            (StepPhase.UPDATING, step, lambda one: phases.may_update(one, True)),
            (StepPhase.COMPUTING, step + 1, phases.updated),
        ):
            verdict = decide(standing)
            expected = expected._replace(phase=phase, step=at)
            assert (verdict.do, verdict.standing) == (Do.GO, expected)
            standing = verdict.standing


def test_a_pull_that_was_overtaken_leaves_the_rank_empty() -> None:
    follow = phases.on_restore(FRESH, 4, 6, initial=False, same_initial=False).standing
    begun = phases.pulling(follow, 4)
    assert (begun.do, begun.standing.pristine) == (Do.GO, False)
    assert phases.pulled(begun.standing, 4).standing.step == 6
    overtaken = phases.may_answer(phases.on_stop(begun.standing, 5).standing).standing
    late = phases.pulled(overtaken, 4)
    assert (late.do, late.standing.phase) == (Do.IGNORE, StepPhase.EMPTY)
    assert phases.pulling(STOPPED, 4).do is Do.REFUSE


def test_who_may_serve() -> None:
    again = phases.on_restore(STOPPED, 4, 5, initial=False, same_initial=False).standing
    assert phases.may_serve(again, 4, 5).do is Do.GO
    assert phases.may_serve(again, 4, 6).do is Do.REFUSE
    assert phases.may_serve(again, 3, 5).do is Do.REFUSE
    assert phases.may_serve(STOPPED, 4, 5).do is Do.WAIT
    forward = phases.on_restore(prepared(STOPPED), 4, 6, initial=False, same_initial=False)
    assert phases.may_serve(forward.standing, 4, 6).do is Do.WAIT
    joined = phases.joined(again, 4).standing
    assert phases.may_serve(joined, 4, 5).do is Do.REFUSE
    assert phases.may_serve(again._replace(torn=True), 4, 5).do is Do.REFUSE


def test_joining_needs_the_state() -> None:
    again = phases.on_restore(STOPPED, 4, 5, initial=False, same_initial=False).standing
    assert phases.joined(again, 4).standing.joined == 4
    forward = phases.on_restore(prepared(STOPPED), 4, 6, initial=False, same_initial=False)
    assert phases.joined(forward.standing, 4).do is Do.IGNORE
    assert phases.joined(again._replace(stopped=5), 4).do is Do.IGNORE


def test_the_end() -> None:
    assert phases.finish(RUNNING).standing.phase is StepPhase.DONE
    assert phases.finish(STOPPED).do is Do.WAIT
    assert phases.finish(Standing(ready=True)).do is Do.WAIT
    assert phases.finish(prepared(RUNNING)).do is Do.REFUSE


EVENTS = st.sampled_from(
    [
        "stop",
        "answer",
        "restore",
        "prepare",
        "update",
        "agreed",
        "end",
        "pull",
        "pulled",
        "join",
        "finish",
        "tear",
    ]
)


@settings(max_examples=400)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 2)), max_size=60), st.booleans())
def test_whatever_comes_in(events: list[tuple[str, int]], fresh: bool) -> None:
    """Random events: only legal moves, and none between Stopped and the RESTORE."""
    now = Standing(ready=True) if fresh else RUNNING
    for event, detail in events:
        before = now
        near = before.stopped + detail - 1
        if event == "stop":
            now = phases.on_stop(now, near + 1).standing
        elif event == "answer":
            now = phases.may_answer(now).standing
        elif event == "restore":
            now = phases.on_restore(
                now, near, max(before.step + detail - 1, 0), initial=False, same_initial=False
            ).standing
        elif event == "prepare":
            now = phases.prepare(now).standing
        elif event in ("update", "agreed"):
            now = phases.may_update(now, agreed=event == "agreed").standing
        elif event == "end":
            now = phases.updated(now).standing
        elif event == "pull":
            now = phases.pulling(now, near).standing
        elif event == "pulled":
            now = phases.pulled(now, near).standing
        elif event == "join":
            now = phases.joined(now, near).standing
        elif event == "finish":
            now = phases.finish(now).standing
        else:
            now = phases.tear(now).standing if now.phase is StepPhase.UPDATING else now
        for field in ("joined", "stopped", "answered", "restored"):
            assert getattr(now, field) >= getattr(before, field)
        assert now.restored <= now.answered <= now.stopped
        assert now.joined <= now.stopped
        assert now.torn >= before.torn
        if before.step >= 0:
            assert now.step in (before.step, before.step + 1)
            assert now.phase is not StepPhase.EMPTY
        frozen = before.answered == before.stopped > before.restored
        if frozen and now.restored == before.restored:
            assert (now.phase, now.step) == (before.phase, before.step)
        if now.phase is StepPhase.UPDATING and before.phase is not StepPhase.UPDATING:
            assert before.phase is StepPhase.PREPARED
            by_group = event == "agreed" and before.stopped <= before.joined
            by_restore = before.restored == before.stopped
            assert by_group or by_restore
        if now.joined > before.joined:
            assert now.step == now.resume_step
