# SPDX-License-Identifier: Apache-2.0
"""Torn updates, failing scripts, what is given back after many regroups, and forked children."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from protos.membership_pb2 import COMPUTING
from protos.trainer_pb2 import Failed, Restored, Stopped
from tests.integration.trainer.conductor import DEADLINE, Conductor, Trainer

Conduct = Callable[..., Conductor]
Undisturbed = Callable[..., str]


def until(fits: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not fits():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.02)


def test_a_torn_update_is_served_to_nobody(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS="20", MODEL="plain")
    (spare,) = job.start(spares=1, special={1: {"UPDATE": "6:raise"}})
    failed = job.ranks[1].expect(Failed)
    assert "on purpose" in failed.traceback
    assert job.ranks[1].process.wait(DEADLINE) == 1
    assert not [m for m in job.ranks[1].messages if isinstance(m, Stopped) and m.generation == 2]
    # The others have state 7: the torn rank was PREPARED(6), and so were they.
    job.reached(7, 0, 2)
    assert job.recover({1: spare}) == 7
    assert job.finish() == undisturbed(STEPS="20", MODEL="plain")


def test_a_script_that_raises_fails_alone(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS="20", MODEL="plain")
    (spare,) = job.start(spares=1, special={1: {"FORWARD": "6:raise"}})
    assert "on purpose" in job.ranks[1].expect(Failed).traceback
    job.reached(6, 0, 2)
    assert job.recover({1: spare}) == 6
    assert job.finish() == undisturbed(STEPS="20", MODEL="plain")


def test_what_a_script_raises_without_its_peers_is_the_groups_fault(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    """Rank 0 raises in step 6 after its peer has died: it repeats the step and raises no more."""
    job = conduct(STEPS="20", MODEL="plain")
    (spare,) = job.start(spares=1, special={0: {"BACKWARD": "6:broken"}, 2: {"FORWARD": "6:kill"}})
    job.ranks[2].process.wait(DEADLINE)
    job.reached(6, 0, 1)
    assert job.recover({2: spare}) == 6
    assert job.finish() == undisturbed(STEPS="20", MODEL="plain")
    assert "raised without peers" in job.ranks[0].output.read_text()


def test_a_stop_waits_for_an_update_that_has_begun(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    job = conduct(STEPS="20", MODEL="plain")
    gate = job.folder / "gate"
    job.start(special={0: {"UPDATE": f"6:hold={gate}"}})
    until((job.folder / "gate.held").exists, "rank 0 does not come to its update")
    job.pause()
    assert job.ranks[1].expect(Stopped, lambda m: m.generation == 2).step == 7
    assert not [m for m in job.ranks[0].messages if isinstance(m, Stopped) and m.generation == 2]
    gate.touch()
    acks = job.stopped()
    assert (acks[0].phase, acks[0].step) == (COMPUTING, 7)
    job.restore(acks)
    job.running()
    assert job.finish() == undisturbed(STEPS="20", MODEL="plain")


def test_a_stop_is_answered_while_the_script_computes(
    conduct: Conduct, undisturbed: Undisturbed
) -> None:
    """The source's main thread is inside a forward pass for the whole of the spare's pull."""
    job = conduct(STEPS="20", MODEL="norm")
    gate = job.folder / "gate"
    (spare,) = job.start(spares=1, special={0: {"BACKWARD": f"6:hold={gate}"}})
    until((job.folder / "gate.held").exists, "rank 0 does not come to its backward pass")
    # Rank 0's forward pass of step 6 has changed its buffers and its counter already.
    job.ranks[2].kill()
    job.pause({2: spare})
    acks = job.stopped()
    assert (acks[0].phase, acks[0].step) == (COMPUTING, 6)
    job.restore(acks, sources=[0])
    pulled = spare.expect(Restored)
    assert (pulled.step, pulled.pull.source) == (6, "node-of-t1")
    assert not [m for m in job.ranks[0].messages if isinstance(m, Restored) and m.generation == 2]
    gate.touch()
    job.running()
    assert job.finish() == undisturbed(STEPS="20", MODEL="norm")


def test_regroups_give_everything_back(conduct: Conduct, undisturbed: Undisturbed) -> None:
    job = conduct(STEPS="400", MODEL="plain", PACE="0.005")
    job.start(size=2)
    job.committed()

    def counts(trainer: Trainer) -> tuple[int, int]:
        return trainer.counts()

    for _ in range(3):  # torch makes some threads only once
        job.recover()
        job.committed()
    until(lambda: len({counts(t) for t in job.ranks.values()}) <= 2, "")
    threading.Event().wait(0.5)
    before = {rank: counts(trainer) for rank, trainer in job.ranks.items()}
    for _ in range(22):
        job.recover()
        job.committed()
    until(
        lambda: all(
            now <= was
            for rank, trainer in job.ranks.items()
            for now, was in zip(counts(trainer), before[rank], strict=True)
        ),
        f"{before} grew to {[counts(t) for t in job.ranks.values()]}",
    )
    assert all(trainer.page.read().step < 400 for trainer in job.ranks.values())


def children(trainer: Trainer) -> list[int]:
    tasks = f"/proc/{trainer.process.pid}/task"
    found: list[int] = []
    for task in os.listdir(tasks):
        with open(f"{tasks}/{task}/children") as listed:
            found += [int(pid) for pid in listed.read().split()]
    return found


@pytest.mark.parametrize("epoch", [100, 7])
def test_data_loaders_survive_a_recovery(
    conduct: Conduct, undisturbed: Undisturbed, epoch: int
) -> None:
    """Workers forked before the recovery (an epoch of 100), and forked anew after it (of 7)."""
    workers = {"LOADER": str(epoch), "MODEL": "plain", "STEPS": "30", "PACE": "0.01"}
    job = conduct(**workers)
    (spare,) = job.start(spares=1)
    job.ranks[0].reached_step(10)
    forked = children(job.ranks[0])
    lost = children(job.ranks[1])
    assert len(forked) == len(lost) == 2
    job.ranks[1].kill()
    job.recover({1: spare})
    job.committed()
    if epoch == 100:
        assert children(job.ranks[0]) == forked
    until(
        lambda: not any(os.path.exists(f"/proc/{pid}/cwd") and living(pid) for pid in lost),
        "the killed rank's data loaders live on",
    )
    assert job.finish() == undisturbed(**workers)


def living(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_without_workerd_the_group_goes_on(conduct: Conduct) -> None:
    job = conduct(STEPS="2000", MODEL="plain", PACE="0.002")
    job.start()
    job.ranks[0].reached_step(3)
    for trainer in job.ranks.values():
        trainer.link.close()
    step = job.ranks[0].page.read().step
    job.ranks[0].reached_step(step + 10)
    # A broken group that nobody can repair ends the trainers, and says why.
    job.ranks[2].kill(signal.SIGKILL)
    assert job.ranks[0].process.wait(DEADLINE) == 1
    assert "workerd is gone" in job.ranks[0].output.read_text()
