# SPDX-License-Identifier: Apache-2.0
"""Replicas of two ranks: a rank is lost, and the groups inside the replicas go on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from protos.trainer_pb2 import Failed, Restored
from tests.integration.trainer.conductor import DEADLINE, Conductor
from workerd.protocol.page import StepPhase

Conduct = Callable[..., Conductor]
Undisturbed = Callable[..., str]

STEPS = "30"

pytestmark = pytest.mark.timeout(400)  # five trainers, and four of the undisturbed run


@pytest.mark.parametrize("model", ["split", "sharded", "tensor"])
def test_a_rank_of_a_replica_is_replaced(
    conduct: Conduct, undisturbed: Undisturbed, model: str
) -> None:
    job = conduct(positions=2, STEPS=STEPS, MODEL=model, PACE="0.01")
    spare, _never_needed = job.start(4, spares=2)
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
    job.reached(6, 0, 2, 3)
    assert job.recover({1: spare}) == 6
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL="sharded")
    assert "raised without peers" in job.ranks[0].output.read_text()


def test_an_update_waits_for_every_rank_of_every_replica(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    """Rank 3 has its gradients, but isn't PREPARED: also those of the other position wait."""
    job = conduct(positions=2, STEPS=STEPS, MODEL="split")
    gate = job.folder / "gate"
    (spare,) = job.start(4, spares=1, special={3: {"BACKWARD": f"6:hold={gate}"}})
    for rank in (0, 1, 2):
        job.ranks[rank].reached(lambda view: view.step == 6 and view.phase is StepPhase.PREPARED)
    threading.Event().wait(0.3)
    assert {job.ranks[rank].page.read().step for rank in (0, 1, 2)} == {6}
    job.ranks[3].kill()
    assert job.recover({3: spare}) == 6
    assert job.finish() == undisturbed(size=4, positions=2, STEPS=STEPS, MODEL="split")


def test_groups_of_several_dimensions_are_swapped_too(conduct: Conduct) -> None:
    """A replica of two by two, every rank of which checks what it hears, before and after."""
    job = conduct(positions=4, STEPS="400", MODEL="grid", PACE="0.005")
    job.start(4)
    job.committed()
    job.recover()
    job.committed()
    for trainer in job.ranks.values():
        trainer.reached_step(job.resume_step + 3)
        assert trainer.failed is None


def test_regroups_give_everything_back(conduct: Conduct) -> None:
    job = conduct(positions=2, STEPS="4000", MODEL="split", PACE="0.005")
    job.start(2)
    for _ in range(3):  # torch makes some threads only once
        job.committed()
        job.recover()
    job.committed()

    def settled(fits: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if fits():  # once is enough: threads come and go while it trains
                return True
            threading.Event().wait(0.05)
        return False

    threading.Event().wait(0.5)
    before = {rank: trainer.counts() for rank, trainer in job.ranks.items()}
    for _ in range(12):
        job.recover()
        job.committed()
    assert settled(
        lambda: all(
            now <= was
            for rank, trainer in job.ranks.items()
            for now, was in zip(trainer.counts(), before[rank], strict=True)
        )
    ), f"{before} grew to {[trainer.counts() for trainer in job.ranks.values()]}"


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
