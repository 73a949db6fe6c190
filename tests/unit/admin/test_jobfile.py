# SPDX-License-Identifier: Apache-2.0
"""What a job file may hold, and what is said of one that is wrong."""

from __future__ import annotations

import pytest

from coordinator.admin.jobfile import (
    DEFAULT_RESTARTS,
    DEFAULT_SPREAD,
    MAX_RANKS,
    MAX_TEXT,
    JobError,
    parse,
    validate,
)
from coordinator.model import JobSpec

WHOLE = """
name = "gpt"
command = ["python", "train.py"]
working_directory = "/srv/gpt"
replicas = 6
shard_positions = 2
ranks_per_node = 4
spares = 1
seed = 7
restarts = 2
min_replicas = 3
priority = -5
spread = ["zone"]

[environment]
OMP_NUM_THREADS = "1"
DATA = "/data"
"""

LEAST = 'name = "gpt"\ncommand = ["train"]\nreplicas = 2\n'


def said(text: str) -> dict[str, str]:
    """What is said, by field."""
    with pytest.raises(JobError) as caught:
        parse(text)
    problems = caught.value.problems
    assert len({one.field for one in problems}) == len(problems)
    return {one.field: str(one) for one in problems}


def test_every_field() -> None:
    assert parse(WHOLE) == JobSpec(
        name="gpt",
        command=("python", "train.py"),
        environment=(("DATA", "/data"), ("OMP_NUM_THREADS", "1")),
        working_directory="/srv/gpt",
        replicas=6,
        shard_positions=2,
        ranks_per_node=4,
        spares=1,
        seed=7,
        restarts=2,
        min_replicas=3,
        priority=-5,
        spread=("zone",),
    )


def test_what_may_be_left_out() -> None:
    assert parse(LEAST) == JobSpec(
        name="gpt",
        command=("train",),
        replicas=2,
        restarts=DEFAULT_RESTARTS,
        spread=DEFAULT_SPREAD,
    )


@pytest.mark.parametrize(
    ("line", "field", "value", "allowed"),
    [
        ('name = "GPT one"', "name", "'GPT one'", "a-z, 0-9 and '-'"),
        ('name = ""', "name", "''", "1 to 48"),
        (f'name = "{"a" * 49}"', "name", "'aaa", "1 to 48"),
        ('name = "-a"', "name", "'-a'", "neither first nor last"),
        ('name = "a.b"', "name", "'a.b'", "a-z"),
        ("name = 5", "name", "5", "must be a string"),
        ('command = "python train.py"', "command", "'python train.py'", "a list of strings"),
        ("command = []", "command", "[]", "a list of strings"),
        ('command = [""]', "command", "['']", "the program first"),
        ('command = ["a", 1]', "command", "['a', 1]", "a list of strings"),
        ('command = ["a", "b\\u0000"]', "command[1]", "'b\\x00'", "NUL"),
        ("replicas = 0", "replicas", "0", f"from 1 to {MAX_RANKS}"),
        (f"replicas = {MAX_RANKS + 1}", "replicas", str(MAX_RANKS + 1), "from 1"),
        ("replicas = 2.0", "replicas", "2.0", "whole number"),
        ('replicas = "2"', "replicas", "'2'", "whole number"),
        ("replicas = true", "replicas", "true", "whole number"),
        ("shard_positions = -1", "shard_positions", "-1", "from 1 to"),
        ("ranks_per_node = 65", "ranks_per_node", "65", "from 1 to 64"),
        ("ranks_per_node = 3", "ranks_per_node", "3", "allowed are 1, 2"),
        ("spares = -1", "spares", "-1", "from 0 to"),
        ("seed = -1", "seed", "-1", "from 0 to"),
        ("restarts = -1", "restarts", "-1", "from 0 to"),
        ("min_replicas = -1", "min_replicas", "-1", "from 0 to"),
        ("min_replicas = 3", "min_replicas", "3", "at most replicas = 2"),
        ("priority = 1000001", "priority", "1000001", "to 1000000"),
        ('spread = "rack"', "spread", "'rack'", "largest failure domain first"),
        ('spread = ["a", "a"]', "spread", "['a', 'a']", "at most 4 different labels"),
        ('spread = [""]', "spread", "['']", "labels of nodes"),
        ("min_replicas = true", "min_replicas", "true", "whole number"),
        ('working_directory = "data"', "working_directory", "'data'", "an absolute path"),
        ("working_directory = 1", "working_directory", "1", "absolute path"),
        ("environment = 1", "environment", "1", "a table of strings"),
        ("environment = { A = 1 }", "environment.A", "1", "must be a string"),
        ('environment = { "A-B" = "1" }', "environment", "'A-B'", "letters, digits"),
        ('environment = { HOTSPARE_X = "1" }', "environment.HOTSPARE_X", "'1'", "own"),
        ('environment = { A = "\\u0000" }', "environment.A", "'\\x00'", "NUL"),
        ("replica = 2", "replica", "2", "did you mean replicas?"),
        ("ranks-per-node = 2", "ranks-per-node", "2", "did you mean ranks_per_node?"),
        ("Seed = 2", "Seed", "2", "did you mean seed?"),
        ("zzz = 2", "zzz", "2", "known are name, command"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    line: str, field: str, value: str, allowed: str
) -> None:
    key = line.split(" =", maxsplit=1)[0]
    rest = [one for one in LEAST.splitlines() if one.split(" =")[0] != key]
    problems = said("\n".join([line, *rest]))
    assert set(problems) == {field}
    assert f"{field} = {value}" in problems[field]
    assert allowed in problems[field]


def test_every_error_is_said_at_once_in_the_order_of_the_fields() -> None:
    text = 'spare = 1\nseed = -1\ncommand = []\nname = "A"\nenvironment = { A = 1, B = 2 }\n'
    problems = said(text)
    assert list(problems) == [
        "name",
        "command",
        "environment.A",
        "environment.B",
        "replicas",
        "seed",
        "spare",
    ]
    assert problems["replicas"] == "replicas: missing, and required"


def test_nothing_is_said_about_numbers_that_depend_on_a_wrong_one() -> None:
    problems = said(
        'name = "a"\ncommand = ["b"]\nreplicas = 0\nranks_per_node = 7\nmin_replicas = 9\n'
    )
    assert set(problems) == {"replicas"}


def test_ranks_beyond_the_limit() -> None:
    problems = said(
        f'name = "a"\ncommand = ["b"]\nreplicas = {MAX_RANKS // 2}\nshard_positions = 4\n'
    )
    assert f"that is {MAX_RANKS * 2} ranks" in problems["replicas"]


def test_a_job_that_no_record_could_hold() -> None:
    problems = validate(JobSpec(name="a", command=("b" * (MAX_TEXT + 1),)))
    assert [one.field for one in problems] == ["command"]
    assert f"at most {MAX_TEXT}" in str(problems[0])


def test_what_is_not_toml() -> None:
    problems = said("name = \n")
    assert "isn't valid TOML" in problems["file"]
    assert "line 1" in problems["file"]


def test_a_long_value_is_cut() -> None:
    problems = said(f'name = "{"A" * 5000}"\ncommand = ["b"]\nreplicas = 1\n')
    assert len(problems["name"]) < 300
