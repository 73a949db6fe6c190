# SPDX-License-Identifier: Apache-2.0
"""Which trainers start, are placed, and end: one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    Assignment,
    DeadIncarnation,
    NodeFlags,
    Phase,
    Slot,
    SlotRank,
    SpareAssignment,
    TrainerExit,
    TrainerState,
    Warm,
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
from workerd.agent.decide import decide
from workerd.agent.state import (
    Limits,
    Orders,
    Placement,
)

# ---- starting and placing


def test_an_owner_without_a_trainer_starts_one_for_its_place() -> None:
    (start,) = decided(orders(), local())
    assert isinstance(start, do.StartTrainer)
    assert (start.local_rank, start.placement) == (0, PLACE)


@pytest.mark.parametrize("phase", [Phase.RESTORE, Phase.RUNNING, Phase.FINISHED, Phase.FAILED])
def test_nothing_starts_outside_of_pause(phase: Phase) -> None:
    assert decided(orders(phase), local()) == []


def test_a_waiting_trainer_takes_the_rank_and_is_stopped_in_the_same_turn() -> None:
    here = local(trainer(placement=None))
    assert kinds(orders(), here) == ["PlaceTrainer", "SendStop"]


def test_the_ready_one_of_two_waiting_trainers_is_taken() -> None:
    slow = trainer(instance="slow", placement=None)
    quick = trainer(instance="quick", placement=None, ready=True)
    found = decided(orders(), local(slow, quick))
    assert [one.instance for one in found if isinstance(one, do.PlaceTrainer)] == ["quick"]
    assert [one.instance for one in found if isinstance(one, do.EndTrainer)] == ["slow"]


@pytest.mark.parametrize(
    "facts", [{"job": "other"}, {"spec_revision": 2}, {"ending": "told to"}, {"ended_at": 1.0}]
)
def test_a_trainer_of_something_else_is_not_placed(facts: dict[str, object]) -> None:
    found = decided(orders(), local(trainer(placement=None, **facts)))
    assert not [one for one in found if isinstance(one, do.PlaceTrainer | do.StartTrainer)]


def test_a_place_is_not_filled_twice() -> None:
    """Its trainer has ended: the leader says with a new `since` that another one may start."""
    over = trainer(ended_at=99.0, exit=TrainerExit(signal=9), cleared=True)
    assert decided(orders(), local(over)) == []
    assert (
        decided(orders(), local(over, trainer(instance="u", placement=None)), do.PlaceTrainer) == []
    )
    again = orders(number=2, since=2)
    assert kinds(again, local(over)) == ["ForgetTrainer", "StartTrainer"]


def test_a_device_is_free_only_when_nothing_is_left_of_the_one_before() -> None:
    over = trainer(ended_at=99.0)
    assert kinds(orders(number=2, since=2), local(over)) == []


def test_slots_are_not_valid_before_their_generation() -> None:
    staged = orders(number=1, since=2)
    assert decided(staged, local()) == []
    assert decided(staged, local(trainer())) == [], "what runs goes on"
    assert decided(staged, local(trainer(placement=None))) == [], "what waits goes on waiting"


def test_a_place_of_an_earlier_incarnation_is_none() -> None:
    told = replace(orders(), assignment=Assignment("n", "before", "j", 1, 1))
    assert decided(told, local()) == []
    told = replace(told, spare=SpareAssignment("n", "j", 1))
    assert kinds(told, local()) == ["StartTrainer"]
    assert kinds(told, local(trainer())) == ["EndTrainer"]


def test_too_few_devices_are_told() -> None:
    told = orders(spec=replace(SPEC, ranks_per_node=2))
    assert decided(told, local()) == []
    (write,) = decided(told, local(), do.WriteNode)
    assert isinstance(write, do.WriteNode)
    assert "needs 2 devices" in write.record.unhealthy


@pytest.mark.parametrize("facts", [{"ending": "why", "killed_at": 70.0}, {"ended_at": 70.0}])
def test_a_node_with_a_process_that_cannot_be_killed_is_unhealthy(facts: dict[str, object]) -> None:
    gone = replace(orders(Phase.RUNNING), assignment=None)

    def unhealthy(now: float, **more: object) -> str:
        (write,) = decided(gone, local(trainer(**facts, **more), now=now), do.WriteNode)
        assert isinstance(write, do.WriteNode)
        return write.record.unhealthy

    after = 70.0 + Limits().unkillable
    assert unhealthy(after - 0.1) == ""
    assert unhealthy(after) == "processes of trainer t (local rank 0) can't be killed"
    assert unhealthy(after, cleared=True) == ""


# ---- spares


def test_a_spare_keeps_a_trainer_waiting_and_says_when_it_is_warm() -> None:
    (start,) = decided(SPARE, local())
    assert isinstance(start, do.StartTrainer)
    assert start.placement is None
    waiting = trainer(placement=None)
    for ready in (False, True):
        (write,) = decided(SPARE, local(replace(waiting, ready=ready)), do.WriteNode)
        assert isinstance(write, do.WriteNode)
        assert write.record.warm == (Warm("j", 1) if ready else None)
        state = TrainerState.WARM if ready else TrainerState.STARTING
        assert write.record.trainers[0].state is state


def test_a_spares_trainer_that_ended_comes_back_ever_later() -> None:
    over = trainer(placement=None, started_at=90.0, ended_at=91.0, cleared=True, attempt=2)
    assert decided(SPARE, local(over, now=94.9)) == []
    found = decided(SPARE, local(over, now=95.1))
    assert [type(one).__name__ for one in found] == ["ForgetTrainer", "StartTrainer"]
    assert [one.attempt for one in found if isinstance(one, do.StartTrainer)] == [3]
    lived = replace(over, started_at=1.0)
    found = decided(SPARE, local(lived, now=91.0))
    assert [one.attempt for one in found if isinstance(one, do.StartTrainer)] == [0]


def test_a_spare_of_another_job_or_of_none_ends_its_trainers() -> None:
    other = replace(SPARE, spare=SpareAssignment("n", "j", 2))
    assert kinds(other, local(trainer(placement=None))) == ["EndTrainer"]
    assert kinds(replace(SPARE, spare=None), local(trainer(placement=None))) == ["EndTrainer"]


# ---- who may go on


@pytest.mark.parametrize(
    "told",
    [
        orders(Phase.RUNNING, instance="another"),
        orders(Phase.RUNNING, 2, since=2),
        replace(orders(Phase.RUNNING), assignment=None),
        with_job(orders(Phase.RUNNING), slot=Slot(1, "m", "i", (SlotRank("t", 1),), 1)),
        with_job(orders(Phase.RUNNING), slot=Slot(1, "n", "k", (SlotRank("t", 1),), 1)),
        replace(orders(Phase.RUNNING), flags=NodeFlags(dead=(DeadIncarnation("i"),))),
        with_job(orders(), job=None),
        orders(Phase.STOPPED, instance="t"),
        orders(Phase.FAILED, instance="t"),
        orders(Phase.LOST, instance="t"),
    ],
)
def test_a_trainer_without_a_place_is_ended(told: Orders) -> None:
    (end,) = decided(told, local(trainer(joined=1)))
    assert isinstance(end, do.EndTrainer)


MOVED = replace(
    with_job(orders(Phase.PAUSE, 2), slot=Slot(4, "n", "i", (SlotRank("t", 1),), 2)),
    assignment=Assignment("n", "i", "j", 4, 2),
)


def test_an_owner_takes_its_trainer_along_to_another_slot() -> None:
    place, stop = decided(MOVED, local(trainer(joined=1, stop_sent=1)))
    assert isinstance(place, do.PlaceTrainer)
    assert place.placement == Placement("j", 4, 1)
    assert isinstance(stop, do.SendStop)
    assert stop.rank == 4
    # before its record is there, and when the slot means another trainer
    staged = with_job(MOVED, generation=orders(Phase.RUNNING).jobs["j"].generation)
    assert decided(staged, local(trainer(joined=1))) == []
    other = with_job(MOVED, slot=Slot(4, "n", "i", (SlotRank("u", 1),), 2))
    assert kinds(other, local(trainer(joined=1))) == ["EndTrainer"]


def test_the_end_of_a_trainer_that_has_moved_is_told() -> None:
    over = trainer(ended_at=99.0, cleared=True, connected=False)
    assert decided(MOVED, local(over)) == []


@pytest.mark.parametrize(
    "told",
    [
        None,
        orders(Phase.RUNNING, instance="t"),
        orders(Phase.RUNNING, 7, instance="t"),
        replace(orders(), jobs={}),
    ],
)
def test_a_trainer_that_is_meant_or_that_nothing_is_known_of_goes_on(told: Orders | None) -> None:
    assert decided(told, local(trainer())) == []


def test_a_dead_incarnation_ends_all_at_once_writes_nothing_and_starts_anew() -> None:
    told = replace(orders(), flags=NodeFlags(dead=(DeadIncarnation("i"),)))
    (end,) = decide(told, local(trainer()))
    assert isinstance(end, do.EndTrainer)
    assert end.grace == 0
    over = trainer(ended_at=99.0)
    assert decide(told, local(over)) == ()
    (renew,) = decide(told, local(replace(over, cleared=True)))
    assert isinstance(renew, do.Renew)


def test_one_that_does_not_end_in_time_is_killed() -> None:
    told = orders(Phase.STOPPED)
    (end,) = decided(told, local(trainer()))
    assert isinstance(end, do.EndTrainer)
    assert end.grace > 0
    asked = trainer(ending=end.reason, kill_at=105.0)
    assert decided(told, local(asked, now=104.9)) == []
    assert kinds(told, local(asked, now=105.0)) == ["KillTrainer"]
    assert decided(told, local(replace(asked, kill_at=None), now=200.0)) == []


def test_one_that_closes_its_link_is_ended() -> None:
    told = orders(Phase.RUNNING, instance="t")
    mute = trainer(connected=False, unlinked_at=100.0)
    grace = Limits().link_grace
    assert decided(told, local(mute, now=99.0 + grace)) == []
    assert kinds(told, local(mute, now=100.0 + grace)) == ["EndTrainer"]


def test_rule_10_the_deadline_and_a_broken_group_and_only_both() -> None:
    told = orders(Phase.RUNNING, instance="t")
    whole = trainer(joined=1, running_sent=1)
    torn = replace(whole, broken_generation=1, broken="torn")
    fence = Limits().self_fence
    for one, overdue, ended in (
        (whole, 100.0, False),
        (torn, None, False),
        (torn, 100.0, True),
        (replace(torn, joined=2), 100.0, False),
    ):
        here = local(one, now=100.0 + fence, overdue_since=overdue)
        assert kinds(told, here) == (["EndTrainer"] if ended else [])
    early = local(torn, now=99.0 + fence, overdue_since=100.0)
    assert decided(told, early) == [], "an outage of etcd alone costs no state"


def test_the_end_of_a_job_releases_and_ends_who_stays() -> None:
    told = replace(orders(Phase.FINISHED, instance="t"), assignment=None)
    (release,) = decided(told, local(trainer(done_step=9)))
    assert release == do.SendRelease("t", 9, "the job has finished")
    free = trainer(released_at=100.0, connected=False, unlinked_at=100.0)
    grace = Limits().release_grace
    assert decided(told, local(free, now=99.0 + grace)) == []
    assert kinds(told, local(free, now=100.0 + grace)) == ["EndTrainer"]
    assert kinds(told, local(trainer(connected=False))) == ["EndTrainer"]


def test_a_stop_of_workerd_ends_all_with_grace_and_says_so() -> None:
    here = local(trainer(), stopping="SIGTERM")
    (end,) = decided(orders(Phase.RUNNING, instance="t"), here)
    assert isinstance(end, do.EndTrainer)
    assert end.grace > 0
    (write,) = decided(orders(Phase.RUNNING, instance="t"), here, do.WriteNode)
    assert isinstance(write, do.WriteNode)
    assert write.record.unhealthy == "SIGTERM"
