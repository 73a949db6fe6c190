# SPDX-License-Identifier: Apache-2.0
"""The agent's decisions, one rule at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.model import (
    Ack,
    Assignment,
    DeadIncarnation,
    Device,
    Generation,
    Job,
    JobSpec,
    Node,
    NodeFlags,
    Phase,
    Pull,
    Slot,
    SlotRank,
    Source,
    SpareAssignment,
    StepPhase,
    TrainerExit,
    TrainerState,
    Warm,
)
from workerd.agent import actions as do
from workerd.agent.decide import decide
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import (
    JobOrders,
    Limits,
    Local,
    Orders,
    Placement,
    Stopped,
    TrainerFacts,
    Written,
)

SPEC = JobSpec(name="j", command=("x",), replicas=3, restarts=1)
JOB = Job(spec=SPEC, spec_revision=1)
PLACE = Placement("j", 1, 1)
EVERYTHING_BUSY = frozenset({NODE, ACK, PROGRESS})


def orders(
    phase: Phase = Phase.PAUSE,
    number: int = 1,
    *,
    since: int = 1,
    instance: str = "",
    spec: JobSpec = SPEC,
    acked: int = 0,
    **generation: object,
) -> Orders:
    """Node n, incarnation i, owns slot 1."""
    job = JobOrders(
        job=replace(JOB, spec=spec),
        generation=replace(
            Generation(job="j", generation=number, phase=phase, spec_revision=1),
            **generation,  # type: ignore[arg-type]
        ),
        slot=Slot(1, "n", "i", (SlotRank(instance, since),) * spec.ranks_per_node, since),
        ack=Ack(acked, "i") if acked else None,
    )
    return Orders(assignment=Assignment("n", "i", "j", 1, 1), jobs={"j": job})


def with_job(told: Orders, **changes: object) -> Orders:
    return replace(told, jobs={"j": replace(told.jobs["j"], **changes)})  # type: ignore[arg-type]


def trainer(**facts: object) -> TrainerFacts:
    """A placed, connected trainer."""
    base = TrainerFacts(
        "t", 0, "j", 1, placement=PLACE, connected=True, welcomed=True, started_at=100.0
    )
    return replace(base, **facts)  # type: ignore[arg-type]


def local(*trainers: TrainerFacts, now: float = 100.0, **changes: object) -> Local:
    template = Node(node="n", incarnation="i", devices=(Device(),))
    base = Local(now=now, template=template, trainers=trainers, registered=True)
    return replace(base, **changes)  # type: ignore[arg-type]


def decided(
    told: Orders | None, here: Local, kind: type[do.Action] | None = None
) -> list[do.Action]:
    """What is decided, without the writes unless they are asked for."""
    if kind is None or kind not in (do.WriteNode, do.WriteAck, do.WriteProgress):
        here = replace(here, busy=EVERYTHING_BUSY)
    found = decide(told, here)
    return [one for one in found if kind is None or isinstance(one, kind)]


def kinds(told: Orders | None, here: Local) -> list[str]:
    return [type(one).__name__ for one in decided(told, here)]


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


# ---- spares


SPARE = replace(orders(Phase.RUNNING), assignment=None, spare=SpareAssignment("n", "j", 1))


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
        (orders(Phase.RESTORE, 2, instance="t", acked=2, absent_replicas=(1,)), {}),
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


# ---- what is written


def test_an_ack_carries_each_ranks_own_word() -> None:
    told = orders(Phase.PAUSE, 2, instance="t")
    (write,) = decided(told, local(STOPPED), do.WriteAck)
    assert isinstance(write, do.WriteAck)
    (rank,) = write.ack.ranks
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
