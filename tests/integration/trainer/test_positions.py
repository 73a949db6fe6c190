# SPDX-License-Identifier: Apache-2.0
"""Replicas of two ranks: a rank is lost, and the groups inside the replicas go on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from protos.trainer_pb2 import Failed, Restored
from tests.integration.trainer.conductor import Conductor

Conduct = Callable[..., Conductor]
Undisturbed = Callable[..., str]

STEPS = "30"


@pytest.mark.parametrize("model", ["split", "sharded"])
def test_a_rank_of_a_replica_is_replaced(
    conduct: Conduct, undisturbed: Undisturbed, model: str
) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL=model, PACE="0.01")
    (spare,) = job.start(4, spares=1)
    job.ranks[1].reached_step(8)
    job.ranks[1].kill()
    job.recover({1: spare})
    restored = spare.expect(Restored)
    assert restored.step == job.resume_step >= 8
    assert restored.pull.bytes > 0
    assert restored.pull.source == f"node-of-{job.ranks[3].instance}"
    job.committed()
    ends = job.finish()
    assert ends == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL=model)
    assert len(set(ends.split())) == 2


def test_a_node_of_a_whole_replica_is_replaced_by_warm_trainers(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    """With two ranks a node a spare knows its positions before it has a slot: it rehearses."""
    job = conduct(positions=2, ranks_per_node=2, STEPS=STEPS, MODEL="sharded", PACE="0.01")
    spares = job.start(4, spares=2)
    job.ranks[2].reached_step(8)
    for rank in (2, 3):
        job.ranks[rank].kill()
    job.recover(dict(zip((2, 3), spares, strict=True)))
    for rank, spare in zip((0, 1), spares, strict=True):
        assert spare.expect(Restored).pull.source == f"node-of-{job.ranks[rank].instance}"
    job.committed()
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL="sharded")


@pytest.mark.parametrize("model", ["split", "sharded"])
def test_a_frozen_rank_blocks_nobody(
    conduct: Conduct, undisturbed: Undisturbed, model: str
) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL=model, PACE="0.01")
    (spare,) = job.start(4, spares=1)
    frozen = job.ranks[2]
    frozen.reached_step(6)
    frozen.kill(signal.SIGSTOP)
    # Rank 3 hangs in a collective inside the replica now, the others in one with it.
    job.recover({2: spare})
    job.committed()
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL=model)


def test_a_source_serves_its_part_from_the_middle_of_a_pass(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL="sharded")
    gate = job.folder / "gate"
    special = {1: {"FORWARD": "6:kill"}, 3: {"LOSS": f"6:hold={gate}"}}
    (spare,) = job.start(4, spares=1, special=special)
    job.ranks[1].process.wait(60)
    job.pause({1: spare})
    acks = job.stopped()
    job.restore(acks)
    assert spare.expect(Restored).pull.source == f"node-of-{job.ranks[3].instance}"
    assert not [m for m in job.ranks[3].messages if isinstance(m, Restored) and m.generation == 2]
    gate.touch()
    job.running()
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL="sharded")


def test_what_a_script_raises_in_the_middle_of_a_pass_leaves_nothing_gathered(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL="sharded")
    special = {0: {"LOSS": "6:broken"}, 1: {"FORWARD": "6:kill"}}
    (spare,) = job.start(4, spares=1, special=special)
    job.ranks[1].process.wait(60)
    assert job.recover({1: spare}) == 6
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL="sharded")
    assert "raised without peers" in job.ranks[0].output.read_text()


def test_a_script_that_knows_nothing_of_positions_is_refused(conduct: Conduct) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL="plain")
    job.size = 4
    lone = job.trainer({})
    assert "build the model over job.mesh" in lone.expect(Failed).traceback


def test_a_collective_that_cannot_be_repeated_is_refused(conduct: Conduct) -> None:
    job = conduct(positions=2, ranks_per_node=2, STEPS=STEPS, MODEL="split", OUTSIDE="1")
    job.size = 4
    lone = job.trainer({})
    assert "belongs into attempt()" in lone.expect(Failed).traceback
