# SPDX-License-Identifier: Apache-2.0
"""Any file either is a job that can be taken, or says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.admin.jobfile import (
    MAX_PRIORITY,
    MAX_RANKS_PER_NODE,
    MAX_RESTARTS,
    MAX_SEED,
    MAX_SPARES,
    JobError,
    Problem,
    parse,
    validate,
)
from coordinator.model import JobSpec

FIELDS = (
    "name",
    "command",
    "environment",
    "working_directory",
    "replicas",
    "shard_positions",
    "ranks_per_node",
    "spares",
    "seed",
    "restarts",
    "min_replicas",
    "priority",
    "spread",
)

plain = st.text(st.characters(codec="utf-8", exclude_characters="\0\x7f"), max_size=20)


def toml(value: Any) -> str:
    """TOML of what these tests make: JSON's strings, numbers and lists are TOML's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def document(values: dict[str, Any]) -> str:
    return "".join(f"{toml(key)} = {toml(value)}\n" for key, value in values.items())


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    ranks_per_node = draw(st.integers(1, MAX_RANKS_PER_NODE))
    positions = draw(st.integers(1, 8))
    nodes = draw(st.integers(1, 50))
    return JobSpec(
        name=draw(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", fullmatch=True)),
        command=(draw(plain.filter(bool)), *draw(st.lists(plain, max_size=4))),
        environment=tuple(
            sorted(
                draw(
                    st.dictionaries(
                        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True).filter(
                            lambda one: not one.upper().startswith("HOTSPARE_")
                        ),
                        plain,
                        max_size=3,
                    )
                ).items()
            )
        ),
        working_directory=draw(st.just("") | plain.map(lambda one: "/" + one)),
        replicas=nodes * ranks_per_node,
        shard_positions=positions,
        ranks_per_node=ranks_per_node,
        spares=draw(st.integers(0, MAX_SPARES)),
        seed=draw(st.integers(0, MAX_SEED)),
        restarts=draw(st.integers(0, MAX_RESTARTS)),
        min_replicas=draw(st.integers(0, nodes * ranks_per_node)),
        priority=draw(st.integers(-MAX_PRIORITY, MAX_PRIORITY)),
        spread=draw(st.lists(plain.filter(bool), max_size=4, unique=True).map(tuple)),
    )


def read(values: dict[str, Any] | str) -> tuple[JobSpec | None, tuple[Problem, ...]]:
    """What a file gives: a job, or what is wrong with it."""
    try:
        return parse(values if isinstance(values, str) else document(values)), ()
    except JobError as error:
        return None, error.problems


def as_values(spec: JobSpec) -> dict[str, Any]:
    values: dict[str, Any] = {field: getattr(spec, field) for field in FIELDS}
    return {**values, "command": list(spec.command), "environment": dict(spec.environment)}


@given(specs())
def test_a_job_that_can_be_taken_reads_back_from_its_file(spec: JobSpec) -> None:
    assert validate(spec) == ()
    assert parse(document(as_values(spec))) == spec


anything = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    plain,
    st.lists(plain | st.integers(-5, 5), max_size=3),
    st.dictionaries(plain, plain | st.integers(-5, 5), max_size=3),
)


@given(st.dictionaries(st.sampled_from(FIELDS) | plain, anything, max_size=10))
def test_a_file_gives_a_valid_job_or_every_problem_in_words(values: dict[str, Any]) -> None:
    spec, problems = read(values)
    if spec is not None:
        assert validate(spec) == ()
        assert as_values(spec) == {**as_values(spec), **values}
        return
    assert problems
    assert all(one.field and one.allowed for one in problems)
    assert {"name", "command", "replicas"} - values.keys() <= {one.field for one in problems}
    unknown = [one for one in problems if one.allowed.startswith("unknown field")]
    assert len(unknown) == len(values.keys() - set(FIELDS))


@given(specs(), st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3))
def test_each_wrong_field_is_named_whatever_the_others_are(
    spec: JobSpec, wrong: dict[str, Any]
) -> None:
    """A field whose value alone is refused is refused in every company."""
    base = as_values(JobSpec(name="a", command=("b",), replicas=1))
    refused_alone: set[str] = set()
    for field, value in wrong.items():
        if field in ("replicas", "shard_positions", "ranks_per_node", "min_replicas"):
            continue  # what is allowed for these depends on one another
        refused_alone |= {one.field for one in read({**base, field: value})[1]}
    found, problems = read({**as_values(spec), **wrong})
    assert refused_alone <= {one.field for one in problems}
    assert (found is None) == bool(problems)


@given(st.text(max_size=200))
def test_any_text_is_a_job_or_an_error(text: str) -> None:
    spec, problems = read(text)
    assert (spec is None) == bool(problems)
    assert spec is None or validate(spec) == ()
