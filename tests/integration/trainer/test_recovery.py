# SPDX-License-Identifier: Apache-2.0
"""Real trainers lose a peer and go on; the final state is an undisturbed run's, bit by bit."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

import pytest

from protos.membership_pb2 import COMPUTING, EMPTY, PREPARED
from protos.trainer_pb2 import Broken, Done, Failed, Joined, Restored
from tests.integration.trainer.conductor import Conductor
from workerd.protocol.page import StepPhase

Conduct = Callable[..., Conductor]
Undisturbed = Callable[..., str]

STEPS = "40"


@pytest.mark.parametrize("model", ["plain", "norm"])
def test_a_killed_rank_is_replaced(conduct: Conduct, undisturbed: Undisturbed, model: str) -> None:
    job = conduct(STEPS=STEPS, MODEL=model, PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[1].reached_step(8)
    job.ranks[1].kill()
    job.recover({1: spare})
    restored = spare.expect(Restored)
    assert restored.step == job.resume_step >= 8
    assert restored.pull.bytes > 0
    assert restored.pull.source in {"node-of-t1", "node-of-t3"}
    job.committed()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL=model)


def test_kills_at_random_moments(conduct: Conduct, undisturbed: Undisturbed) -> None:
    draw = random.Random(5)
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.02")
    spares = job.start(spares=3)
    for number, spare in enumerate(spares):
        rank = draw.randrange(3)
        job.ranks[rank].reached_step(8 + 8 * number)
        # Not at a step's border, but somewhere in it.
        threading.Event().wait(draw.random() * 0.03)
        job.ranks[rank].kill()
        job.recover({rank: spare})
        job.committed()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_the_rank_that_offers_the_store_is_replaced(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[0].reached_step(5)
    job.ranks[0].kill()
    job.recover({0: spare})
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_a_frozen_peer_blocks_nobody(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    (spare,) = job.start(spares=1)
    frozen = job.ranks[2]
    frozen.reached_step(6)
    frozen.kill(signal.SIGSTOP)
    # The others hang in a collective now: nothing is broken, and nothing moves.
    waiting = job.ranks[0].page.read()
    job.recover({2: spare})
    job.committed()
    assert job.resume_step in (waiting.step, waiting.step + 1)
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_a_rank_that_learned_late_rolls_forward(conduct: Conduct, undisturbed: Undisturbed) -> None:
    """One rank has applied the update of step 9; another is still PREPARED(9)."""
    job = conduct(STEPS=STEPS, MODEL="norm")
    (spare,) = job.start(spares=1, special={1: {"LATE": "9"}, 2: {"FORWARD": "10:kill"}})
    job.ranks[0].reached_step(10)
    job.ranks[1].reached(lambda view: view.step == 9 and view.phase is StepPhase.PREPARED)
    job.ranks[2].process.wait(60)
    job.pause({2: spare})
    acks = job.stopped()
    assert (acks[0].phase, acks[0].step) == (COMPUTING, 10)
    assert (acks[1].phase, acks[1].step) == (PREPARED, 9)
    assert (acks[2].phase, acks[2].step) == (EMPTY, -1)
    assert job.restore(acks) == 10
    job.running()
    rolled = job.ranks[1].expect(Restored, lambda m: m.generation == 2)
    assert rolled.step == 10
    assert not rolled.HasField("pull")
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_prepared_rank_repeats_when_nobody_moved_on(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm")
    everyone = {rank: {"LATE": "9"} for rank in range(3)}
    job.start(special=everyone)
    for trainer in job.ranks.values():
        trainer.reached(lambda view: view.step == 9 and view.phase is StepPhase.PREPARED)
    job.pause()
    acks = job.stopped()
    assert {(ack.phase, ack.step) for ack in acks.values()} == {(PREPARED, 9)}
    assert job.restore(acks) == 9
    job.running()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_stop_during_a_restore_supersedes_it(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    first, second = job.start(spares=2)
    job.ranks[1].reached_step(5)
    job.ranks[1].kill()
    job.pause({1: first})
    acks = job.stopped()
    # The first spare dies before it has joined: the others wait for it in the new group.
    first.kill()
    job.restore(acks, only=[0, 2])
    job.ranks[0].expect(Restored, lambda m: m.generation == 2)
    step = job.recover({1: second})
    assert step == acks[0].step
    assert not [m for m in job.ranks[0].messages if isinstance(m, Joined) and m.generation == 2]
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_the_source_dies_while_the_spare_pulls(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    first, second = job.start(spares=2)
    job.ranks[1].reached_step(5)
    job.ranks[1].kill()
    job.pause({1: first})
    acks = job.stopped()
    # Only the spare follows: its sources never get their RESTORE, so they answer "not yet".
    job.restore(acks, only=[1])
    job.ranks[0].kill()
    job.pause({0: second})
    acks = job.stopped()
    assert (acks[1].phase, acks[1].step, acks[1].initial_digest) == (EMPTY, -1, "")
    job.restore(acks)
    job.running()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_a_reserve_serves_its_state_and_stays_out(conduct: Conduct) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[0].reached_step(5)
    job.ranks[0].kill()
    job.pause({0: spare})
    step = job.restore(job.stopped(), sources=[2], reserves=[2])
    kept = job.ranks.pop(2)
    job.running()
    job.committed()
    pull = spare.expect(Restored).pull
    assert pull.source == f"node-of-{kept.instance}"
    assert kept.expect(Restored, lambda m: m.generation == 2).step == step
    kept.kill()  # it is freed
    job.replaced.append(kept)
    job.finish()
    assert not [m for m in kept.messages if isinstance(m, Joined) and m.generation == 2]


def test_a_reserve_comes_back(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.01")
    job.start()
    job.ranks[2].reached_step(5)
    job.pause()
    step = job.restore(job.stopped(), only=[2], reserves=[2])
    job.ranks[2].expect(Restored, lambda m: m.generation == 2)
    job.pause()
    acks = job.stopped()
    assert (acks[2].phase, acks[2].step) == (COMPUTING, step)
    assert job.restore(acks) == step
    job.running()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_broken_group_is_reported_and_regrouped(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[2].reached_step(5)
    job.ranks[2].kill()
    # Who waits for the dead rank sees it; another may wait for one that waits, and sees nothing.
    seen = job.first(Broken)
    assert {broken.generation for broken in seen} == {1}
    assert all("onnection" in broken.error for broken in seen)
    job.recover({2: spare})
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_a_generation_that_changes_nobody(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.005")
    job.start()
    for step in (4, 9, 14):
        job.ranks[0].reached_step(step)
        job.recover()
        job.committed()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_finished_rank_keeps_the_last_state(conduct: Conduct, undisturbed: Undisturbed) -> None:
    """Rank 0 is done; rank 1 has not learned that the last step was agreed on; rank 2 is dead."""
    job = conduct(STEPS=STEPS, MODEL="plain")
    last = int(STEPS) - 1
    (spare,) = job.start(spares=1, special={1: {"LATE": str(last)}, 2: {"UPDATE": f"{last}:kill"}})
    job.ranks[0].expect(Done)
    job.ranks[2].process.wait(60)
    assert job.recover({2: spare}) == last + 1
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")


def test_a_spare_that_was_never_needed_leaves_its_loop(conduct: Conduct) -> None:
    job = conduct(STEPS="3", MODEL="plain")
    (spare,) = job.start(spares=1)
    job.finish()
    assert spare.process.returncode == 0
    assert "counter 0 step 3" in spare.output.read_text()


def test_replicas_that_use_other_parameters_stay_equal(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS="20", MODEL="branches", PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[1].reached_step(5)
    job.ranks[1].kill()
    job.recover({1: spare})
    assert job.finish() == undisturbed(STEPS="20", MODEL="branches")


def test_a_rank_that_begins_otherwise_pulls(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS="10", MODEL="norm")
    job.start(special={1: {"INITIAL": "3"}})
    assert job.ranks[1].expect(Restored).pull.source == "node-of-t0"
    assert not job.ranks[2].expect(Restored).HasField("pull")
    assert job.finish() == undisturbed(STEPS="10", MODEL="norm")


def test_another_layout_of_buckets_is_refused_by_name(conduct: Conduct) -> None:
    job = conduct(STEPS="10", MODEL="plain")
    with pytest.raises(AssertionError, match="sends no Joined"):
        job.start(special={2: {"BUCKET": "1"}})
    assert "layout of replicated module 0 of replica 2" in job.ranks[2].expect(Failed).traceback


def test_an_object_that_differs_between_replicas_is_refused_by_name(conduct: Conduct) -> None:
    job = conduct(STEPS="1000", MODEL="plain", OWN="1", PACE="0.01")
    job.start()
    job.ranks[0].reached_step(2)
    job.pause()
    job.restore(job.stopped())
    assert "the tracked counter of replica 1" in job.ranks[1].expect(Failed).traceback
