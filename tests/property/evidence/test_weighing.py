# SPDX-License-Identifier: Apache-2.0
"""Whatever is known of a node that doesn't answer: what must never make it dead, and what must."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.model import Answer, Contact, Line, Settings, Statement
from coordinator.plan.evidence import Circumstances, Judgement, weigh

SETTINGS = Settings()
MOMENT = 3 * SETTINGS.ping + 0.25
"""Seconds after the beginning of a try, and more, by which its witnesses have spoken or won't."""

times = st.floats(0, 100, allow_nan=False)
contacts = st.builds(
    Contact,
    node=st.just("n0"),
    incarnation=st.just("a"),
    line=st.sampled_from(Line),
    detail=st.just("what was seen"),
    since=times,
    tried=times,
    said=st.lists(
        st.builds(Statement, st.sampled_from(["n1", "n2"]), st.sampled_from(Answer)), max_size=2
    ).map(tuple),
    wrote=st.one_of(st.just(float("-inf")), times),
)
circumstances = st.builds(
    Circumstances,
    witnesses=st.integers(0, 2),
    broken=st.booleans(),
    stepping=st.booleans(),
    last_holder=st.booleans(),
    down=st.integers(1, 9),
    budget=st.integers(1, 9),
    doubted_at=st.one_of(st.just(float("-inf")), times),
    outage=st.booleans(),
)
nows = st.floats(0, 200, allow_nan=False)


@given(contacts, circumstances, nows)
def test_there_is_always_a_reason(contact: Contact, around: Circumstances, now: float) -> None:
    weighed = weigh(contact, around, now, SETTINGS)
    assert "what was seen" in weighed.reason
    assert not weighed.over_budget or weighed.judgement is Judgement.HELD


@given(contacts, circumstances, nows)
def test_these_never_die_before_their_lease_ends(
    contact: Contact, around: Circumstances, now: float
) -> None:
    if weigh(contact, around, now, SETTINGS).judgement is not Judgement.DEAD:
        return
    assert contact.line in (Line.REFUSED, Line.REPLACED, Line.SILENT)
    assert not around.last_holder
    assert not around.outage
    assert around.down <= around.budget
    if contact.line is Line.SILENT:
        said = {one.answer for one in contact.said}
        assert Answer.ACCEPTED not in said, "somebody reaches it"
        assert said & {Answer.SILENT, Answer.REFUSED} or around.broken, "nobody else says so"
        assert not around.stepping
        assert contact.wrote < contact.tried
        assert around.doubted_at < contact.tried, "it was found when many were silent"


@given(contacts, circumstances, nows, st.sampled_from([Line.REFUSED, Line.REPLACED]))
def test_plain_evidence_is_enough_by_itself(
    contact: Contact, around: Circumstances, now: float, line: Line
) -> None:
    free = replace(around, last_holder=False, outage=False, down=1)
    weighed = weigh(replace(contact, line=line), free, now, SETTINGS)
    assert weighed.judgement is Judgement.DEAD


@given(contacts, circumstances, nows)
def test_one_more_that_can_t_be_reached_kills_nobody_more(
    contact: Contact, around: Circumstances, now: float
) -> None:
    before = weigh(contact, around, now, SETTINGS).judgement
    after = weigh(contact, replace(around, down=around.down + 1), now, SETTINGS).judgement
    assert after is not Judgement.DEAD or before is Judgement.DEAD


@given(contacts, circumstances, nows, st.sampled_from(["n1", "n2"]))
def test_a_witness_that_reaches_it_kills_nobody(
    contact: Contact, around: Circumstances, now: float, witness: str
) -> None:
    more = replace(contact, said=(*contact.said, Statement(witness, Answer.ACCEPTED)))
    if weigh(more, around, now, SETTINGS).judgement is Judgement.DEAD:
        assert contact.line in (Line.REFUSED, Line.REPLACED)


@given(contacts, circumstances, times)
def test_silence_is_not_open_for_long(
    contact: Contact, around: Circumstances, later: float
) -> None:
    """Others wait for it: a pause for many must not hang on one who is never known of."""
    if contact.line is not Line.LOST:
        now = contact.tried + MOMENT + later
        assert weigh(contact, around, now, SETTINGS).judgement is not Judgement.OPEN
