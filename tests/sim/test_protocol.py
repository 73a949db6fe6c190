# SPDX-License-Identifier: Apache-2.0
"""Many short runs of the whole protocol, with faults at random moments.

Every step of every run is checked against the invariants (see ``invariants`` and ``trainers``);
each run must come to an end. A failure prints its trace; its seed reproduces it.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.model import Phase
from coordinator.store import keys
from tests.sim import drive, faults, leaders, nodes
from tests.sim.drive import Chance, Plan, Shape, run
from tests.sim.world import JOB

SHAPES = {
    "3x1": Shape(3),
    "2x1": Shape(2),
    "2x2": Shape(2, 2),
    "2x2 on 2 nodes": Shape(2, 2, 2),
    "4x1 on 2 nodes": Shape(4, 1, 2),
}
SHRINKING = {
    "3x1 to 1": Shape(3, spares=0, fewest=1),
    "3x1 to 2": Shape(3, spares=0, fewest=2),
    "2x2 to 1": Shape(2, 2, spares=0, fewest=1),
    "3x2 to 1 with a spare": Shape(3, 2, fewest=1),
    "2x2 on 2 nodes to 1": Shape(2, 2, 2, spares=0, fewest=1),
    "4x1 on 2 nodes to 2": Shape(4, 1, 2, spares=0, fewest=2),
}
PAIRS = sorted(itertools.combinations_with_replacement(sorted(faults.ALL), 2))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_undisturbed_jobs_finish_in_their_first_generation(shape: Shape) -> None:
    for seed in range(10):
        world, end = run(shape, Plan((), from_start=True), seed)
        assert end == "FINISHED"
        assert world.history.generations == 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", sorted(faults.ALL))
def test_one_fault_never_costs_the_job(kind: str, shape: Shape) -> None:
    for seed in range(8):
        _, end = run(shape, Plan((kind,), mend=seed % 2 == 0, from_start=seed % 3 == 0), seed)
        assert end == "FINISHED"


@pytest.mark.parametrize("shape", SHRINKING.values(), ids=SHRINKING)
@pytest.mark.parametrize("kind", sorted(faults.ALL))
def test_without_a_spare_one_fault_never_costs_the_job(kind: str, shape: Shape) -> None:
    """It goes on with fewer replicas, and nothing need ever get well."""
    for seed in range(4):
        _, end = run(shape, Plan((kind,), mend=seed % 2 == 0), seed)
        assert end == "FINISHED"


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_faults_without_a_spare_come_to_an_end(pair: tuple[str, str]) -> None:
    for seed, shape in enumerate(SHRINKING.values()):
        run(shape, Plan(pair, mend=seed % 2 == 0), seed)


def test_a_job_shrinks_and_grows_again() -> None:
    """Without a spare; those that live on are never started again."""
    counts = set()
    for seed in range(30):
        shape = Shape(3, spares=0, fewest=2, steps=8)
        before = drive.running(shape, seed % 7)
        world, end = run(shape, Plan(("crash",)), seed)
        assert end == "FINISHED"
        sizes = [len(world.network.members[number]) for number in sorted(world.network.members)]
        counts.add(tuple(sizes))
        crashed = next(one for one in world.history.faults).split()[2]
        for name, node in world.nodes.items():
            if name != crashed:
                assert node.lives == before.nodes[name].lives
    assert (3, 2, 3) in counts
    assert (3, 2) in counts


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_faults_come_to_an_end(pair: tuple[str, str]) -> None:
    for seed, shape in enumerate(SHAPES.values()):
        run(shape, Plan(pair, mend=seed % 2 == 0), seed)
    run(SHAPES["3x1"], Plan(pair, from_start=True), 100)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(sorted(faults.ALL)), max_size=4).map(tuple),
    shape=st.sampled_from([*SHAPES.values(), *SHRINKING.values()]),
    mend=st.booleans(),
    from_start=st.booleans(),
)
def test_whatever_happens_comes_to_an_end(
    seed: int, kinds: tuple[str, ...], shape: Shape, mend: bool, from_start: bool
) -> None:
    run(shape, Plan(kinds, mend, from_start), seed)


@pytest.mark.parametrize("seed", range(30))
def test_a_stopped_job_ends_at_any_moment(seed: int) -> None:
    shape = SHAPES["3x1"]
    dice = random.Random(seed)
    world, chance = drive.begin(shape), Chance(str(seed))
    trace: list[str] = []
    for _ in range(dice.randrange(150)):
        if dice.random() < 0.02:
            crashes = list(faults.crash(world))
            if len(crashes) > 2:
                world = drive.step(world, dice.choice(crashes), trace)
        possible = drive.moves(world)
        if not possible:
            break
        world = drive.step(world, chance.choose(possible), trace)
    if nodes.phase_of(world).ended:
        return
    world = leaders.stop(world)
    world, end = drive.settle(world, chance, trace)
    assert end in ("STOPPED", "FINISHED")


def test_a_deposed_leader_writes_nothing() -> None:
    world, chance = drive.running(SHAPES["3x1"], 1), Chance("deposed")
    trace: list[str] = []
    world = drive.step(world, next(iter(faults.crash(world))), trace)
    for _ in range(drive.MOVES):
        lead = list(faults.lead(world))
        if lead:
            world = drive.step(world, lead[0], trace)
            break
        world = drive.step(world, chance.choose(drive.moves(world)), trace)
    assert world.deposed
    before = world.etcd
    while world.deposed:
        late = [one for one in leaders.moves(world) if "DEPOSED" in one[0]]
        world = drive.step(world, late[0], trace)
    assert world.etcd == before


def test_the_same_seed_gives_the_same_run() -> None:
    plan = Plan(("crash", "cut", "lead"))
    first, second = (run(SHAPES["2x2"], plan, 5)[0] for _ in range(2))
    assert first.etcd.items == second.etcd.items


def test_a_run_that_fails_in_the_middle_resumes_where_it_was() -> None:
    """The lineage says which generation's gradients went into each step: none twice, none left
    out, whoever computed them."""
    seen = set()
    for seed in range(40):
        world, end = run(SHAPES["3x1"], Plan(("crash",)), seed)
        assert end == "FINISHED"
        generation = world.etcd.get(keys.generation(JOB))
        assert generation.phase is Phase.FINISHED
        status = world.etcd.get(keys.job_status(JOB))
        (digest,) = status.digests
        assert len(digest.split("/")) == world.total + 1
        seen.add(digest)
    assert len(seen) > 1, "the crash never came in the middle"
