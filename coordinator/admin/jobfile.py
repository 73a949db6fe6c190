# SPDX-License-Identifier: Apache-2.0
"""What a job may be, and the TOML file that says it.

Pure. One validation serves both ends: ``hotspare`` checks the file before it sends it, every
coordinator checks what it is sent. All that is wrong is said at once, each with the field, the
value and what is allowed.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.model import JobSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_RANKS = 131_072
MAX_SHARD_POSITIONS = 1_024
MAX_RANKS_PER_NODE = 64
MAX_SPARES = 1_024
MAX_RESTARTS = 1_000_000
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000_000
MAX_SPREAD = 4
MAX_TEXT = 131_072
"""Bytes of command, environment and working directory together: a job is one etcd record, and
Linux hands a process not much more."""

DEFAULT_RESTARTS = 3
DEFAULT_SPREAD = ("switch", "rack")

# An incident is named <job>.<generation>, and a name in a key has at most 63 characters.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

_BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)

_NAME_ALLOWED = "1 to 48 of a-z, 0-9 and '-', neither first nor last a '-'"
_COMMAND_ALLOWED = 'a list of strings, the program first, as ["python", "train.py"]'
_VARIABLE_ALLOWED = "letters, digits and '_', no digit first"
_SPREAD_ALLOWED = (
    f"at most {MAX_SPREAD} different labels of nodes, the largest failure domain first, "
    'as ["switch", "rack"]'
)
_TEXT_ALLOWED = "text without a NUL character"
_DIRECTORY_ALLOWED = "an absolute path, the same on every node"

_NUMBERS: Mapping[str, tuple[int, int]] = {
    "replicas": (1, MAX_RANKS),
    "shard_positions": (1, MAX_SHARD_POSITIONS),
    "ranks_per_node": (1, MAX_RANKS_PER_NODE),
    "spares": (0, MAX_SPARES),
    "seed": (0, MAX_SEED),
    "restarts": (0, MAX_RESTARTS),
    "min_replicas": (0, MAX_RANKS),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}
_RELATED = ("replicas", "ranks_per_node", "min_replicas")
_REQUIRED = ("name", "command", "replicas")
_FIELDS = ("name", "command", "environment", "working_directory", *_NUMBERS, "spread")

_SHOWN = 80
_LABEL = 63


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the field, its value as a person may read it, what is allowed."""

    field: str
    value: str
    allowed: str

    def __str__(self) -> str:
        if not self.value:
            return f"{self.field}: {self.allowed}"
        return f"{self.field} = {self.value}: {self.allowed}"


class JobError(ValueError):
    """A job that can't be taken; ``problems`` has everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(one) for one in self.problems))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _range(low: int, high: int) -> str:
    return f"must be a whole number from {low} to {high}"


def _text_ok(text: str) -> bool:
    # A lone surrogate has no UTF-8 form, so no record and no process could carry it.
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def _label_ok(text: str) -> bool:
    return bool(text) and len(text) <= _LABEL and _text_ok(text)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check_environment(pairs: Iterable[tuple[str, str]]) -> list[Problem]:
    problems = []
    for key, value in pairs:
        where = f"environment.{key}" if _VARIABLE.fullmatch(key) else "environment"
        if not _VARIABLE.fullmatch(key):
            problems.append(
                Problem(where, _shown(key), f"a variable's name must be {_VARIABLE_ALLOWED}")
            )
        elif key.upper().startswith("HOTSPARE_"):
            problems.append(
                Problem(where, _shown(value), "names with HOTSPARE_ are Hotspare's own")
            )
        if not _text_ok(value):
            problems.append(Problem(where, _shown(value), f"must be {_TEXT_ALLOWED}"))
    return problems


def _check_command(command: tuple[str, ...]) -> list[Problem]:
    if not command or not command[0]:
        return [Problem("command", _shown(list(command)), f"must be {_COMMAND_ALLOWED}")]
    return [
        Problem(f"command[{index}]", _shown(one), f"must be {_TEXT_ALLOWED}")
        for index, one in enumerate(command)
        if not _text_ok(one)
    ]


def _check_shape(spec: JobSpec) -> list[Problem]:
    """What only the numbers together can have wrong; each alone is within its range."""
    problems = []
    ranks = spec.ranks
    if spec.replicas < spec.min_replicas <= MAX_RANKS:
        problems.append(
            Problem(
                "min_replicas",
                _shown(spec.min_replicas),
                f"at most replicas = {spec.replicas}; without it the job never shrinks",
            )
        )
    if ranks > MAX_RANKS:
        problems.append(
            Problem(
                "replicas",
                _shown(spec.replicas),
                f"with shard_positions = {spec.shard_positions} that is {ranks} ranks, "
                f"at most {MAX_RANKS} are allowed",
            )
        )
    elif ranks % spec.ranks_per_node:
        divisors = [one for one in range(1, min(ranks, MAX_RANKS_PER_NODE) + 1) if ranks % one == 0]
        problems.append(
            Problem(
                "ranks_per_node",
                _shown(spec.ranks_per_node),
                f"the {ranks} ranks (replicas x shard_positions) must fill every node: "
                f"allowed are {', '.join(map(str, divisors))}",
            )
        )
    return problems


def validate(spec: JobSpec) -> tuple[Problem, ...]:
    """Everything that is wrong with a job; nothing when it can be taken."""
    problems = []
    if not _NAME.fullmatch(spec.name):
        problems.append(Problem("name", _shown(spec.name), f"must be {_NAME_ALLOWED}"))
    problems += _check_command(spec.command)
    problems += _check_environment(spec.environment)
    directory = spec.working_directory
    if directory and not (directory.startswith("/") and _text_ok(directory)):
        problems.append(
            Problem("working_directory", _shown(directory), f"must be {_DIRECTORY_ALLOWED}")
        )
    outside = [
        Problem(field, _shown(getattr(spec, field)), _range(low, high))
        for field, (low, high) in _NUMBERS.items()
        if not low <= getattr(spec, field) <= high
    ]
    problems += outside
    if not {one.field for one in outside} & {"replicas", "shard_positions", "ranks_per_node"}:
        problems += _check_shape(spec)
    labels = spec.spread
    if (
        len(labels) > MAX_SPREAD
        or len(set(labels)) < len(labels)
        or not all(map(_label_ok, labels))
    ):
        problems.append(Problem("spread", _shown(list(labels)), f"must be {_SPREAD_ALLOWED}"))
    size = (
        sum(map(_size, spec.command))
        + sum(_size(key) + _size(value) for key, value in spec.environment)
        + _size(directory)
    )
    if size > MAX_TEXT:
        problems.append(
            Problem(
                "command",
                "",
                f"with environment and working_directory it has {size} bytes, "
                f"at most {MAX_TEXT} are allowed",
            )
        )
    return tuple(problems)


def _typed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The fields that have the right type, and a problem for each that hasn't."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for field, value in raw.items():
        wrong = ""
        if field in _NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int):
                wrong = _range(*_NUMBERS[field])
        elif field == "command":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                wrong = f"must be {_COMMAND_ALLOWED}"
            else:
                value = tuple(value)  # noqa: PLW2901
        elif field == "spread":
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                wrong = f"must be {_SPREAD_ALLOWED}"
            else:
                value = tuple(value)  # noqa: PLW2901
        elif field == "environment":
            if not isinstance(value, dict):
                wrong = 'must be a table of strings, as { OMP_NUM_THREADS = "1" }'
            else:
                problems += [
                    Problem(f"environment.{key}", _shown(one), "must be a string, in quotes")
                    for key, one in value.items()
                    if not isinstance(one, str)
                ]
                value = tuple(  # noqa: PLW2901
                    sorted((key, one) for key, one in value.items() if isinstance(one, str))
                )
        elif field in ("name", "working_directory"):
            if not isinstance(value, str):
                allowed = _NAME_ALLOWED if field == "name" else _DIRECTORY_ALLOWED
                wrong = f"must be a string: {allowed}"
        else:
            near = difflib.get_close_matches(field.lower(), _FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_FIELDS)}"
            wrong = f"unknown field; {hint}"
        if wrong:
            shown = field if _BARE.fullmatch(field) else _shown(field)
            problems.append(Problem(shown, _shown(value), wrong))
        else:
            values[field] = value
    return values, problems


def parse(text: str) -> JobSpec:
    """The job that a TOML file describes.

    Raises :class:`JobError` with everything that is wrong with it.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError([Problem("file", "", f"isn't valid TOML: {error}")]) from error
    values, problems = _typed(raw)
    problems += [
        Problem(field, "", "missing, and required") for field in _REQUIRED if field not in raw
    ]
    values.setdefault("restarts", DEFAULT_RESTARTS)
    values.setdefault("spread", DEFAULT_SPREAD)
    # A stand-in for what is missing or has the wrong type keeps the rest checkable; what would be
    # said about the stand-in itself is dropped.
    standins: dict[str, Any] = {"name": "job", "command": ("true",)}
    judged = JobSpec(**{**standins, **values})
    spoken_of = {one.field for one in problems}
    relations_known = not spoken_of & {"replicas", "shard_positions", "ranks_per_node"}
    for problem in validate(judged):
        related = problem.field in _RELATED and not relations_known
        if problem.field not in spoken_of and not (related and _alone_ok(judged, problem.field)):
            problems.append(problem)
    if problems:
        order = {field: index for index, field in enumerate(_FIELDS)}
        problems.sort(key=lambda one: order.get(re.split(r"[.\[]", one.field)[0], len(order)))
        raise JobError(problems)
    return judged


def _alone_ok(spec: JobSpec, field: str) -> bool:
    low, high = _NUMBERS[field]
    value: int = getattr(spec, field)
    return low <= value <= high
