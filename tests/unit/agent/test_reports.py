# SPDX-License-Identifier: Apache-2.0
"""What trainers are told and what is written: one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    Ack,
    Device,
    Leaver,
    Node,
    Phase,
    Pull,
    Slot,
    SlotRank,
    Source,
    StepPhase,
)
from tests.unit.agent.builders import (
    PLACE,
    SPARE,
    SPEC,
    decided,
    kinds,
    local,
    orders,
    trainer,
    with_job,
)
from workerd.agent import actions as do
from workerd.agent import messages
from workerd.agent.decide import decide
from workerd.agent.reports import ACK
from workerd.agent.state import (
    Orders,
    Stopped,
    TrainerFacts,
    Written,
)

# ---- what trainers are told


def test_a_welcome_says_whether_it_is_a_spare() -> None:
    for place, told in ((None, SPARE), (PLACE, orders(Phase.RUNNING))):
        (welcome,) = decided(told, local(trainer(welcomed=False, placement=place)))
        assert isinstance(welcome, do.SendWelcome)
        assert welcome.spare is (place is None)


def test_a_stop_asks_the_first_rank_of_a_named_slot_for_a_store() -> None:
    for slots, asked in (((1,), True), ((0, 2), False)):
        (stop,) = decided(orders(rendezvous_slots=slots), local(trainer()))
        assert isinstance(stop, do.SendStop)
        assert (stop.generation, stop.rank, stop.offer_rendezvous) == (1, 1, asked)
    assert decided(orders(), local(trainer(stop_sent=1))) == []


STOPPED = trainer(stop_sent=2, stopped=Stopped(2, StepPhase.PREPARED, 4))
RESTORE = orders(
    Phase.RESTORE,
    2,
    instance="t",
    acked=2,
    resume_step=5,
    absent_replicas=(0,),
    sources=(Source(0, 2, "m"), Source(1, 3, "k")),
)


def test_a_restore_says_what_its_rank_needs() -> None:
    (restore,) = decided(RESTORE, local(STOPPED))
    assert isinstance(restore, do.SendRestore)
    assert (restore.rank, restore.replica, restore.replicas) == (1, 0, 2), "0 is absent"
    assert (restore.shard_position, restore.resume_step) == (0, 5)
    assert restore.sources == (Source(0, 2, "m"),)
    assert not restore.reserve


@pytest.mark.parametrize(
    ("absent", "replica", "replicas"),
    [((), 1, 3), ((0,), 0, 2), ((2,), 1, 2), ((0, 2), 0, 1)],
)
def test_replicas_are_counted_without_the_absent_ones(
    absent: tuple[int, ...], replica: int, replicas: int
) -> None:
    told = orders(Phase.RESTORE, 2, instance="t", acked=2, absent_replicas=absent)
    (restore,) = decided(told, local(STOPPED))
    assert isinstance(restore, do.SendRestore)
    assert (restore.replica, restore.replicas, restore.reserve) == (replica, replicas, False)


def test_a_reserve_follows_the_restore_and_joins_nothing() -> None:
    told = orders(Phase.RESTORE, 2, instance="t", acked=2, absent_replicas=(1,))
    (restore,) = decided(told, local(STOPPED))
    assert isinstance(restore, do.SendRestore)
    assert restore.reserve
    assert messages.restore(restore).reserve


@pytest.mark.parametrize(
    ("told", "facts"),
    [
        (with_job(RESTORE, ack=None), {}),
        (with_job(RESTORE, ack=Ack(1, "i")), {}),
        (with_job(RESTORE, ack=Ack(2, "before")), {}),
        (RESTORE, {"stopped": Stopped(1)}),
        (RESTORE, {"stopped": None}),
        (RESTORE, {"restore_sent": 2}),
        (RESTORE, {"connected": False}),
        (with_job(RESTORE, slot=Slot(1, "n", "i", (SlotRank("", 1),), 1)), {}),
    ],
)
def test_no_restore_without_its_acknowledged_stop(told: Orders, facts: dict[str, object]) -> None:
    assert decided(told, local(replace(STOPPED, **facts))) == []  # type: ignore[arg-type]


def test_an_ack_that_went_with_the_lease_still_counts() -> None:
    told = with_job(RESTORE, ack=None)
    assert kinds(told, local(STOPPED, acked=("j", 2))) == ["SendRestore"]


def test_running_is_told_to_who_has_joined() -> None:
    told = orders(Phase.RUNNING, 2, instance="t")
    assert decided(told, local(trainer(joined=1))) == []
    assert kinds(told, local(trainer(joined=2))) == ["SendRunning"]
    assert decided(told, local(trainer(joined=2, running_sent=2))) == []


def test_the_wish_for_a_stop_is_told_once_to_who_has_joined() -> None:
    told = orders(Phase.RUNNING, 2, instance="t", hold="a move")
    assert kinds(told, local(trainer(joined=2))) == ["SendRunning", "SendHold"]
    (hold,) = decided(told, local(trainer(joined=2, running_sent=2)))
    assert isinstance(hold, do.SendHold)
    assert (hold.generation, hold.reason) == (2, "a move")
    assert decided(told, local(trainer(joined=2, running_sent=2, hold_sent=2))) == []
    assert decided(told, local(trainer(joined=1, running_sent=1))) == []


def test_a_rank_at_the_boundary_is_told_at_once() -> None:
    told = orders(Phase.RUNNING, 2, instance="t", hold="a move")
    here = trainer(joined=2, running_sent=2, hold_sent=2, committed=2, step=6)
    (first,) = decided(told, local(here), do.WriteProgress)
    assert isinstance(first, do.WriteProgress)
    known = Written("j", first.progress, first.marks, 100.0)
    assert decided(told, local(here, written=known), do.WriteProgress) == []
    (write,) = decided(told, local(replace(here, held=2), written=known), do.WriteProgress)
    assert isinstance(write, do.WriteProgress)
    assert write.progress.ranks[0].held == 2


def test_who_leaves_its_slot_stops_serves_and_ends_when_the_others_run() -> None:
    """Another node has it: this one offers no store and does not join."""
    leaver = Leaver("n", "i", (SlotRank("t", 1),), 2)
    taken = Slot(1, "other", "o", (SlotRank(since=2),), 2, leaver)
    told = with_job(orders(Phase.PAUSE, 2, instance="t", rendezvous_slots=(1,)), slot=taken)
    (stop,) = decided(told, local(trainer()))
    assert isinstance(stop, do.SendStop)
    assert (stop.generation, stop.offer_rendezvous) == (2, False)
    (write,) = decided(told, local(STOPPED), do.WriteAck)
    assert isinstance(write, do.WriteAck)
    assert write.ack.ranks[0].instance == "t"
    (restore,) = decided(with_job(RESTORE, slot=taken), local(STOPPED))
    assert isinstance(restore, do.SendRestore)
    assert restore.reserve
    running = orders(Phase.RUNNING, 2, instance="t", last_running_generation=2)
    assert kinds(with_job(running, slot=taken), local(STOPPED)) == ["EndTrainer"]
    stranger = replace(taken, leaving=replace(leaver, incarnation="older"))
    assert kinds(with_job(told, slot=stranger), local(trainer())) == ["EndTrainer"]


# ---- what is written


def test_an_ack_carries_each_ranks_own_word() -> None:
    told = orders(Phase.PAUSE, 2, instance="t")
    (write,) = decided(told, local(STOPPED), do.WriteAck)
    assert isinstance(write, do.WriteAck)
    (rank,) = write.ack.ranks
    assert not rank.held
    there = Stopped(2, StepPhase.COMPUTING, 5, held=True)
    (at_boundary,) = decided(told, local(replace(STOPPED, stopped=there)), do.WriteAck)
    assert isinstance(at_boundary, do.WriteAck)
    assert at_boundary.ack.ranks[0].held
    assert (rank.rank, rank.instance, rank.phase, rank.step) == (1, "t", StepPhase.PREPARED, 4)
    for facts in (
        {"ended_at": 1.0},
        {"ending": "told to"},
        {"stopped": None},
        {"stopped": Stopped(1)},
    ):
        here = local(replace(STOPPED, **facts))
        assert decided(told, here, do.WriteAck) == [], "void"
    assert decided(told, local(STOPPED, registered=False), do.WriteAck) == []
    assert decided(told, local(STOPPED, busy=frozenset({ACK})), do.WriteAck) == []


def test_an_ack_is_written_once_a_lease() -> None:
    told = orders(Phase.PAUSE, 2, instance="t", acked=2)
    assert decided(told, local(STOPPED), do.WriteAck) == []
    unseen = orders(Phase.PAUSE, 2, instance="t")
    held = local(STOPPED, acked=("j", 2), ack_held=True)
    assert decided(unseen, held, do.WriteAck) == []
    gone = local(STOPPED, acked=("j", 2), ack_held=False)
    assert len(decided(unseen, gone, do.WriteAck)) == 1


def test_an_ack_waits_for_every_local_rank() -> None:
    told = orders(Phase.PAUSE, 2, spec=replace(SPEC, ranks_per_node=2, replicas=4))
    two = replace(STOPPED, instance="u", local_rank=1)
    template = Node(node="n", incarnation="i", devices=(Device(), Device(index=1)))
    for there, count in (((STOPPED,), 0), ((STOPPED, two), 1)):
        assert len(decided(told, local(*there, template=template), do.WriteAck)) == count


def written(*trainers: TrainerFacts, at: float = 100.0) -> Written:
    (write,) = decided(orders(Phase.RUNNING, instance="t"), local(*trainers), do.WriteProgress)
    assert isinstance(write, do.WriteProgress)
    return Written(write.job, write.progress, write.marks, at)


@pytest.mark.parametrize(
    ("facts", "after", "due"),
    [
        ({"step": 6}, 0.9, False),
        ({"step": 6}, 1.0, True),
        ({}, 100.0, False),
        ({"joined": 2}, 0.0, True),
        ({"committed": 1}, 0.0, True),
        ({"broken": "torn", "broken_generation": 1}, 0.0, True),
        ({"restored": 2}, 0.0, True),
        ({"restored": 2, "pull": Pull("m", 7, 0.5)}, 0.0, True),
        ({"done_step": 6, "digest": "d"}, 0.0, True),
        ({"ended_at": 100.0}, 0.0, True),
    ],
)
def test_progress_is_written_when_it_is_due(
    facts: dict[str, object], after: float, due: bool
) -> None:
    running = trainer(step=5, phase=StepPhase.COMPUTING, joined=1, restored=1)
    here = local(
        replace(running, **facts),  # type: ignore[arg-type]
        now=100.0 + after,
        written=written(running),
    )
    told = orders(Phase.RUNNING, instance="t")
    assert bool(decided(told, here, do.WriteProgress)) is due


@pytest.mark.parametrize("tells", [True, False])
def test_of_many_nodes_a_few_tell_the_step_and_the_others_write_seldom(tells: bool) -> None:
    spec = replace(SPEC, replicas=10_000)
    told = orders(
        Phase.RUNNING, instance="t", spec=spec, rendezvous_slots=(0, 1) if tells else (0, 2)
    )
    running = trainer(step=5, phase=StepPhase.COMPUTING, joined=1, restored=1)
    (first,) = decided(told, local(running), do.WriteProgress)
    assert isinstance(first, do.WriteProgress)
    before = Written(first.job, first.progress, first.marks, 100.0)

    def due(after: float, **facts: object) -> bool:
        here = local(
            replace(running, step=6, **facts),  # type: ignore[arg-type]
            now=100.0 + after,
            written=before,
        )
        return bool(decided(told, here, do.WriteProgress))

    assert due(1.0) is tells
    assert due(0.0, committed=1) is tells
    assert due(75.0), "10,000 nodes at 200 a second, half as long again at most"
    for facts in ({"joined": 2}, {"restored": 2}, {"done_step": 6, "digest": "d"}):
        assert due(0.0, **facts), "the leader waits for everybody's"


def test_progress_says_what_was_pulled_and_what_broke() -> None:
    one = trainer(
        step=5,
        phase=StepPhase.UPDATING,
        joined=2,
        restored=2,
        pull=Pull("m", 7, 0.5),
        broken="old",
        broken_generation=1,
    )
    (rank,) = written(one).progress.ranks
    assert (rank.generation, rank.restored, rank.pull) == (2, 2, Pull("m", 7, 0.5))
    assert (rank.step, rank.phase) == (5, StepPhase.UPDATING)
    assert (rank.broken_generation, rank.broken) == (1, "old")
    # it may break before it was joined
    (rank,) = written(replace(one, broken_generation=3, restored=3)).progress.ranks
    assert (rank.generation, rank.broken_generation) == (2, 3)
    (rank,) = written(replace(one, done_step=6, digest="d")).progress.ranks
    assert (rank.phase, rank.step, rank.digest) == (StepPhase.DONE, 6, "d")


def test_a_lost_place_is_cleared_but_not_one_whose_job_has_just_ended() -> None:
    before = written(trainer())
    here = local(written=before, node_written=None)
    lost = replace(orders(Phase.RUNNING), assignment=None)
    found = [one for one in decide(lost, here) if isinstance(one, do.ClearPlace)]
    assert [one.job for one in found] == ["j"]
    over = orders(Phase.FINISHED)
    assert not [one for one in decide(over, here) if isinstance(one, do.ClearPlace)]
