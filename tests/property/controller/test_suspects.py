# SPDX-License-Identifier: Apache-2.0
"""Suspects are kept up change by change: they must be those that a look at everything finds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.controller.records import dump
from coordinator.controller.view import Observer
from coordinator.model import (
    Assignment,
    DeadIncarnation,
    Generation,
    Node,
    NodeFlags,
    Phase,
    Slot,
    SpareAssignment,
)
from coordinator.store import KeyValue, keys

_NODES = st.sampled_from(["n0", "n1"])
_LIVES = st.sampled_from(["", "a", "b"])
_JOBS = st.sampled_from(["j", "k"])
_PHASES = st.sampled_from([None, Phase.PAUSE, Phase.RUNNING, Phase.FINISHED])

_CHANGES = st.one_of(
    st.tuples(st.just("node"), _NODES, _LIVES),
    st.tuples(st.just("dead"), _NODES, _LIVES),
    st.tuples(st.just("place"), _NODES, _LIVES),
    st.tuples(st.just("spare"), _NODES, st.booleans()),
    st.tuples(st.just("slot"), _JOBS, st.integers(0, 1), _NODES, _LIVES),
    st.tuples(st.just("generation"), _JOBS, _PHASES),
)


def _record(change: tuple[Any, ...]) -> tuple[str, Any]:
    match change:
        case ("node", node, life):
            return keys.node(node), Node(node=node, incarnation=life) if life else None
        case ("dead", node, life):
            dead = (DeadIncarnation(life),) if life else ()
            return keys.flags(node), NodeFlags(dead=dead) if life else None
        case ("place", node, life):
            return keys.assignment(node), Assignment(node, life, "j", 0, 1) if life else None
        case ("spare", node, there):
            return keys.spare(node), SpareAssignment(node, "j", 1) if there else None
        case ("slot", job, number, node, life):
            return keys.slot(job, number), Slot(number, node, life) if life else None
        case ("generation", job, phase):
            record = Generation(job=job, generation=1, phase=phase) if phase is not None else None
            return keys.generation(job), record
    raise AssertionError(change)


def _found(state: dict[str, Any], lives: dict[str, str]) -> set[tuple[str, str]]:
    placed = set()
    for key, value in state.items():
        parsed = keys.parse(key)
        if isinstance(value, Slot):
            generation = state.get(keys.generation(parsed.job))
            if generation is None or not generation.phase.ended:
                placed.add((value.node, value.incarnation))
        elif isinstance(value, Assignment):
            placed.add((value.node, value.incarnation))
        elif isinstance(value, SpareAssignment) and value.node in lives:
            placed.add((value.node, lives[value.node]))

    def missing(node: str, life: str) -> bool:
        live, flags = state.get(keys.node(node)), state.get(keys.flags(node))
        return (live is None or live.incarnation != life) and (
            flags is None or not flags.is_dead(life)
        )

    return {one for one in placed if missing(*one)}


@given(st.lists(_CHANGES, max_size=40))
def test_the_same_as_a_look_at_everything(changes: list[tuple[Any, ...]]) -> None:
    observer = Observer()
    state: dict[str, Any] = {}
    lives: dict[str, str] = {}
    for revision, change in enumerate(changes, 1):
        key, record = _record(change)
        if record is None:
            state.pop(key, None)
            observer.change(key, None, 0.0)
        else:
            state[key] = record
            observer.change(key, KeyValue(key, dump(record), revision, revision, 1), 0.0)
        if isinstance(record, Node):
            lives[record.node] = record.incarnation
        assert set(observer.suspects()) == _found(state, lives)
