# SPDX-License-Identifier: Apache-2.0
"""Operators drain, cordon, replace and pause while the protocol runs and things fail."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from coordinator.model import Cause, Incident
from coordinator.store import KeyKind, keys
from tests.sim import faults, operators
from tests.sim.drive import Plan, Shape, run
from tests.sim.etcd import parsed
from tests.sim.world import JOB, World

SHAPES = {
    "3x1": Shape(3, steps=4),
    "2x2": Shape(2, 2, steps=4),
    "4x1 on 2 nodes": Shape(4, 1, 2, steps=4, fewest=2),
    "3x1, 2 enough": Shape(3, steps=6, fewest=2),
    "1x2": Shape(1, 2, steps=6),
}


def incidents(world: World) -> list[Incident]:
    found = [key for key in world.etcd.items if parsed(key).kind is KeyKind.INCIDENT]
    return [world.etcd.get(key) for key in found]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", sorted(operators.ALL))
def test_what_is_planned_never_costs_the_job_nor_a_step(kind: str, shape: Shape) -> None:
    for seed in range(12):
        world, end = run(shape, Plan((kind,), mend=seed % 2 == 0, from_start=seed % 3 == 0), seed)
        assert end == "FINISHED"
        assert all(one.lost_steps == 0 for one in incidents(world))


@pytest.mark.parametrize("shape", [Shape(3, steps=6), Shape(1, 2, steps=10)], ids=["3x1", "1x2"])
@pytest.mark.parametrize("kind", ["drain", "substitute"])
def test_a_drained_node_s_place_is_taken_by_the_spare(kind: str, shape: Shape) -> None:
    """Often before the job ends; and each time no step was computed again. With one replica nobody
    but who leaves has its state."""
    replaced = 0
    for seed in range(30):
        world, end = run(shape, Plan((kind,), mend=False), seed)
        assert end == "FINISHED"
        planned = [one for one in incidents(world) if one.cause is Cause.PLANNED]
        replaced += bool(planned)
        generation = world.etcd.get(keys.generation(JOB))
        assert generation.generation == 1 + len(planned)
    assert replaced > 10, "it never came to it"


def test_a_job_is_scaled_down_and_up_again() -> None:
    """Often before it ends: by nodes that leave and come back at a step's boundary."""
    sizes = set()
    for seed in range(30):
        world, end = run(Shape(3, steps=8, spares=1, fewest=1), Plan(("scale", "scale")), seed)
        assert end == "FINISHED"
        planned = [one for one in incidents(world) if one.cause is Cause.PLANNED]
        assert all(one.lost_steps == 0 for one in planned)
        joined = world.history.joined
        sizes |= {len(joined[number]) for number in joined}
    assert sizes == {1, 2, 3}


PAIRS = sorted(
    {
        tuple(sorted(pair))
        for pair in itertools.product(operators.ALL, {**faults.ALL, **operators.ALL})
    }
)


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_plan_and_a_fault_come_to_an_end(pair: tuple[str, str]) -> None:
    for seed, shape in enumerate(SHAPES.values()):
        run(shape, Plan(pair, mend=seed % 2 == 0), seed)
        run(replace(shape, steps=6), Plan(pair, mend=True), seed + 10)
    run(SHAPES["3x1"], Plan(pair, from_start=True), 100)
