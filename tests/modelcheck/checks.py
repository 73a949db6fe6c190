# SPDX-License-Identifier: Apache-2.0
"""Which searches there are: configurations, and the failures that happen in each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.modelcheck.explore import Result, Search
from tests.modelcheck.values import Shape, Violation

CONFIGURATIONS = {
    "3 x 1": Shape(3, 1),
    "2 x 2": Shape(2, 2),
    "2 x 2 on 2 nodes": Shape(2, 2, 2),
    "3 x 1 to 1": Shape(3, 1, spares=0, fewest=1),
    "2 x 2 to 1": Shape(2, 2, spares=0, fewest=1),
}
"""Replicas x shard positions, each with one spare node; or with none, down to fewer replicas."""

START = {"3 x 1 at its start": Shape(3, 1, from_start=True)}
"""From the submission on: a rank's own initial state differs from the others'."""
PAIR = {"2 x 1": Shape(2, 1)}
"""Who survives is the only source."""

SINGLE = (
    "crash",
    "reboot",
    "trainer",
    "hang",
    "cut",
    "mute",
    "glitch",
    "verdict",
    "late",
    "drain",
    "misjudge",
)
"""Kinds that are something by themselves. The others are about how another failure is met: a
leader that changes or is slow while it writes."""
OTHERS = ("lead", "stall")


def single(names: Iterable[str] = CONFIGURATIONS) -> Iterator[tuple[str, str, Shape]]:
    """One failure of every kind."""
    for name in names:
        for kind in SINGLE:
            yield name, kind, with_faults(CONFIGURATIONS[name], kind)


def starts() -> Iterator[tuple[str, str, Shape]]:
    """One failure of every kind, from the submission on."""
    for name, shape in START.items():
        for kind in SINGLE:
            yield name, kind, with_faults(shape, kind)


def pairs(names: Iterable[str] = CONFIGURATIONS) -> Iterator[tuple[str, str, Shape]]:
    """Two failures by kind, in either order."""
    kinds = [*SINGLE, *OTHERS]
    for name in names:
        for one, other in itertools.combinations_with_replacement(kinds, 2):
            if one not in OTHERS:
                shape = with_faults(CONFIGURATIONS[name], one, other)
                yield name, f"{one} + {other}", shape


def every() -> Iterator[tuple[str, str, Shape]]:
    """All there are."""
    yield from single()
    yield from starts()
    yield from two()
    yield from pairs()


def quick() -> Iterator[tuple[str, str, Shape]]:
    """What ends in seconds: one failure of every kind, and a few pairs."""
    yield from single()
    yield from two()
    for one in starts():
        if one[1] != "verdict":
            yield one
    for one in pairs(["3 x 1", "3 x 1 to 1"]):
        if one[1] in ("crash + lead", "crash + stall"):
            yield one


def two() -> Iterator[tuple[str, str, Shape]]:
    """Failures of two replicas, of which one is the only source of the other's replacement."""
    for name, shape in PAIR.items():
        for kind in ("crash", "hang"):
            yield name, f"{kind} + hang", with_faults(shape, kind, "hang")


def with_faults(shape: Shape, *kinds: str) -> Shape:
    """The same job, with one fault of each kind."""
    return replace(shape, faults=tuple((kind,) for kind in kinds))


HEAD = (
    f"{'configuration':18} {'failures':20} {'states':>9} {'transitions':>12} {'seconds':>8}  ends"
)


def row(name: str, failures: str, result: Result) -> str:
    """A line of the table."""
    ends = ", ".join(f"{end} {count}" for end, count in sorted(result.ends.items()))
    return (
        f"{name:18} {failures:20} {result.states:9,} {result.transitions:12,} "
        f"{result.seconds:8.1f}  {ends if result.complete else 'CUT SHORT'}"
    )


def search(one: tuple[str, str, Shape]) -> tuple[bool, str]:
    """One search: whether it is complete and has found nothing, and its row."""
    name, failures, shape = one
    try:
        result = Search(shape).run()
    except Violation as error:
        return False, f"{name:18} {failures:20} VIOLATION: {error}"
    return result.complete, row(name, failures, result)
