# SPDX-License-Identifier: Apache-2.0
"""The key layout: what is made can be read back, and nothing else gets in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.store import keys
from coordinator.store.errors import InvalidKey, StoreError
from coordinator.store.keys import KeyKind, ParsedKey, parse

ENDS = "abcdefghijklmnopqrstuvwxyz0123456789"
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9_.]{0,61}[a-z0-9])?", fullmatch=True)
NUMBERS = st.integers(min_value=0, max_value=2**63 - 1)


@settings(deadline=None)
@given(job=NAMES, node=NAMES, number=NUMBERS)
def test_every_key_is_read_back(job: str, node: str, number: int) -> None:
    assert parse(keys.election(node)) == ParsedKey(KeyKind.ELECTION, name=node)
    assert parse(keys.node(node)) == ParsedKey(KeyKind.NODE, node=node)
    assert parse(keys.flags(node)) == ParsedKey(KeyKind.FLAGS, node=node)
    assert parse(keys.assignment(node)) == ParsedKey(KeyKind.ASSIGNMENT, node=node)
    assert parse(keys.spare(node)) == ParsedKey(KeyKind.SPARE, node=node)
    assert parse(keys.incident(node)) == ParsedKey(KeyKind.INCIDENT, name=node)
    assert parse(keys.job_spec(job)) == ParsedKey(KeyKind.JOB_SPEC, job=job)
    assert parse(keys.job_status(job)) == ParsedKey(KeyKind.JOB_STATUS, job=job)
    assert parse(keys.generation(job)) == ParsedKey(KeyKind.GENERATION, job=job)
    assert parse(keys.slot(job, number)) == ParsedKey(KeyKind.SLOT, job=job, number=number)
    assert parse(keys.ack(job, node)) == ParsedKey(KeyKind.ACK, job=job, node=node)
    assert parse(keys.progress(job, node)) == ParsedKey(KeyKind.PROGRESS, job=job, node=node)
    assert parse(keys.checkpoint(job, number)) == ParsedKey(
        KeyKind.CHECKPOINT, job=job, number=number
    )


def test_the_layout_is_the_documented_one() -> None:
    assert keys.election("c-1") == "election/c-1"
    assert keys.node("n1") == "nodes/n1"
    assert keys.flags("n1") == "flags/n1"
    assert keys.assignment("n1") == "assignments/n1"
    assert keys.spare("n1") == "spares/n1"
    assert keys.job_spec("gpt") == "jobs/gpt/spec"
    assert keys.job_status("gpt") == "jobs/gpt/status"
    assert keys.generation("gpt") == "jobs/gpt/generation"
    assert keys.slot("gpt", 3) == "jobs/gpt/slots/3"
    assert keys.ack("gpt", "n1") == "jobs/gpt/acks/n1"
    assert keys.progress("gpt", "n1") == "jobs/gpt/progress/n1"
    assert keys.checkpoint("gpt", 700) == "jobs/gpt/checkpoints/700"
    assert keys.incident("i1") == "incidents/i1"


@pytest.mark.parametrize(
    "name", ["", "A", "a/b", "-a", "a-", ".", "..", "a.", "ä", "a b", "a\n", "a" * 64, "a\0"]
)
def test_a_name_that_is_no_name_is_refused(name: str) -> None:
    for make in (keys.node, keys.election, keys.incident, keys.job_spec, keys.spare):
        with pytest.raises(InvalidKey, match="must be 1 to 63") as caught:
            make(name)
        assert isinstance(caught.value, StoreError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("number", [-1, 2**63, True])
def test_a_number_that_is_no_number_is_refused(number: int) -> None:
    with pytest.raises(InvalidKey, match="whole number"):
        keys.slot("gpt", number)


@settings(deadline=None)
@given(st.text())
def test_parse_takes_any_text(text: str) -> None:
    parsed = parse(text)
    assert parsed.kind is KeyKind.UNKNOWN or "/" in text


@pytest.mark.parametrize(
    "key",
    [
        "",
        "nodes/",
        "nodes/A",
        "nodes/a/b",
        "jobs/gpt",
        "jobs/gpt/slots",
        "jobs/gpt/slots/03",
        "jobs/gpt/slots/-1",
        "jobs/gpt/slots/\u0663",
        "jobs/gpt/slots/9223372036854775808",
        "jobs/gpt/spec/x",
        "jobs/gpt/newer",
        "newer/a",
    ],
)
def test_a_key_of_a_newer_version_is_unknown(key: str) -> None:
    assert parse(key) == ParsedKey(KeyKind.UNKNOWN)


@settings(deadline=None)
@given(prefix=st.binary(min_size=1), key=st.binary())
def test_prefix_end_bounds_exactly_the_prefix(prefix: bytes, key: bytes) -> None:
    end = keys.prefix_end(prefix)

    def inside(candidate: bytes) -> bool:
        return candidate >= prefix and (end == b"\0" or candidate < end)

    assert inside(prefix + key)
    assert inside(key) == key.startswith(prefix)
