# SPDX-License-Identifier: Apache-2.0
"""What the search leaves out makes no difference: searched with it, there are the same outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.modelcheck import checks, past
from tests.modelcheck.explore import Search
from tests.modelcheck.groups import Groups
from tests.modelcheck.planner import CONTROL, NODES, REST
from tests.modelcheck.symmetry import Symmetry
from tests.modelcheck.values import Machine, Shape


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_renaming_leaves_nothing_out(kind: str) -> None:
    """Without it, every state that is reached has its like among those that are reached with it."""
    shape = checks.with_faults(checks.CONFIGURATIONS["3 x 1 to 1"], kind)
    plain = _plain(shape)
    plain.system.symmetry = Symmetry(plain.system)
    named = Search(shape)
    assert named.run().states == len({plain.system.symmetry.canonical(one) for one in plain.states})
    assert len(plain.states) > 2 * len(named.states)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("3 x 1 to 1", "crash"),
        ("3 x 1 to 1", "trainer"),
        ("3 x 1 to 1", "reboot"),
        ("3 x 1 to 1", "glitch, glitch"),
        ("2 x 2 to 1", "verdict"),
        ("2 x 2 on 2 nodes", "verdict"),
    ],
)
def test_forgetting_what_is_over_leaves_nothing_out(
    name: str, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records, and what each trainer holds under them, are the same as if all were kept."""
    shape = checks.with_faults(checks.CONFIGURATIONS[name], *kinds.split(", "))
    fewer = _plain(shape)
    monkeypatch.setattr(past, "key", lambda held, _: held)
    monkeypatch.setattr(past, "machine", lambda there: there)
    monkeypatch.setattr(Groups, "still", lambda *_: True)
    every = _plain(shape)
    assert _outcomes(fewer) == _outcomes(every)
    assert set(fewer.result.ends) == set(every.result.ends)
    assert len(fewer.states) <= len(every.states)


def _plain(shape: Shape) -> Search:
    search = Search(shape)
    search.system.symmetry = None
    search.run()
    return search


def _outcomes(search: Search) -> set[Any]:
    """All that matters of each state: the records, the steps, and the states that are held."""
    system = search.system
    machines = slice(NODES, NODES + system.count)
    found = {(one[CONTROL], one[REST], one[machines]) for one in search.states}
    held = {number: _held(there) for number, there in enumerate(system.machines.values)}
    return {
        (system.controls[control], system.rests[rest], tuple(held[own] for own in there))
        for control, rest, there in found
    }


def _held(there: Machine) -> Any:
    return (
        there.up,
        there.connected,
        tuple((one.instance, one.standing, one.lineage) for one in there.processes),
    )
