# SPDX-License-Identifier: Apache-2.0
"""Ranks agree to stop after a step: real trainers, the same step for all, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable

from protos.membership_pb2 import COMPUTING, EMPTY
from protos.trainer_pb2 import Done, Held, Hold, Stopped
from tests.integration.trainer.conductor import Conductor, Trainer
from workerd.protocol.page import StepPhase

Conduct = Callable[..., Conductor]
Undisturbed = Callable[..., str]

STEPS = "40"


def held(job: Conductor) -> dict[int, Held]:
    generation = job.generation
    return {
        rank: trainer.expect(Held, lambda m: m.generation == generation)
        for rank, trainer in job.ranks.items()
    }


def begun(trainer: Trainer) -> int:
    """How often the script has begun a step."""
    return trainer.output.read_text().count("begins ")


def test_one_rank_s_wish_stops_all_after_the_same_step(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.01", TELL="1")
    (spare,) = job.start(spares=1)
    job.ranks[0].reached_step(5)
    job.ranks[2].link.send(Hold(generation=1))
    (step,) = {one.step for one in held(job).values()}
    assert step > 5
    for trainer in job.ranks.values():
        view = trainer.page.read()
        assert (view.step, view.phase) == (step, StepPhase.COMPUTING)
    leaves = job.ranks[1]
    job.pause({1: spare})
    acks = job.stopped()
    stands = {(ack.phase, ack.step, ack.held) for ack in acks.values()}
    assert stands == {(COMPUTING, step, True), (EMPTY, -1, False)}
    leaves.kill()
    assert job.restore(acks) == step
    job.running()
    job.committed()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")
    # every step was begun once, by the two that stayed
    assert [begun(job.ranks[rank]) for rank in (0, 2)] == [int(STEPS)] * 2
    assert begun(leaves) == step


def test_a_wish_for_another_generation_is_none(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    job.start()
    job.ranks[0].reached_step(4)
    for trainer in job.ranks.values():
        trainer.link.send(Hold(generation=2))
    job.ranks[0].reached_step(12)
    job.recover()
    for trainer in job.ranks.values():
        trainer.link.send(Hold(generation=1))
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")
    assert not [m for one in job.ranks.values() for m in one.messages if isinstance(m, Held)]


def test_held_ranks_go_on_in_a_generation_that_changes_nobody(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.005")
    job.start()
    for step in (4, 9, 14):
        job.ranks[0].reached_step(step)
        for trainer in job.ranks.values():
            trainer.link.send(Hold(generation=job.generation))
        at = {one.step for one in held(job).values()}
        assert {job.recover()} == at
        job.committed()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_rank_dies_while_all_are_held(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS=STEPS, MODEL="norm", PACE="0.01")
    (spare,) = job.start(spares=1)
    job.ranks[0].reached_step(5)
    job.ranks[0].link.send(Hold(generation=1))
    (step,) = {one.step for one in held(job).values()}
    job.ranks[0].kill()
    assert job.recover({0: spare}) == step
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="norm")


def test_a_wish_before_the_last_step_ends_the_job_all_the_same(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    """The script has ended at the boundary: it is done once it may be."""
    job = conduct(STEPS=STEPS, MODEL="plain", PACE="0.01")
    job.start(special={1: {"FORWARD": f"{int(STEPS) - 1}:wish"}})
    job.ranks[1].reached_step(int(STEPS) - 1)
    job.ranks[1].link.send(Hold(generation=1))
    assert {one.step for one in held(job).values()} == {int(STEPS)}
    assert not [m for one in job.ranks.values() for m in one.messages if isinstance(m, Done)]
    job.pause()
    acks: dict[int, Stopped] = job.stopped()
    assert all(ack.held for ack in acks.values())
    job.restore(acks)
    job.running()
    assert job.finish() == undisturbed(STEPS=STEPS, MODEL="plain")
