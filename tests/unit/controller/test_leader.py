# SPDX-License-Identifier: Apache-2.0
"""How a leader acts: once it has seen what it wrote, and never on a guess."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pytest

from coordinator.controller import leader as module
from coordinator.controller import records
from coordinator.controller.leader import Fenced, Leader
from coordinator.model import (
    Assignment,
    ClusterView,
    JobState,
    JobStatus,
    Line,
    Node,
    NodeFlags,
    Settings,
    Verdict,
)
from coordinator.plan import (
    Action,
    AskWitnesses,
    DeclareDead,
    KeepWarm,
    Probe,
    Unassign,
    UpdateStatus,
    Wait,
)
from coordinator.prober import Contacted, Probed
from coordinator.store import (
    Change,
    Changed,
    Created,
    GuardFailed,
    KeyValue,
    Listed,
    Put,
    Store,
    StoreAuthError,
    StoreRequestError,
    StoreUnavailable,
    keys,
)
from coordinator.store.values import Guard, Write, holds

Who = tuple[str, str]
LEADER = Created("election/c1", 1)
STATUS = UpdateStatus("demo", JobStatus(JobState.WAITING), "why")
ALWAYS = float("-inf")


class Memory:
    """A store in memory: guarded commits, and the watch's events on demand."""

    def __init__(self) -> None:
        self.revision = 1
        self.items = {"election/c1": KeyValue("election/c1", b"{}", 1, 1, 9)}
        self.events: list[Changed] = []
        self.down = self.forbidden = False
        self.limit = 10**6
        self.commits = 0
        self.revoked: list[int] = []

    def commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        self.commits += 1
        if self.down:
            raise StoreUnavailable("etcd is down", outcome_unknown=True)
        if self.forbidden:
            raise StoreAuthError("permission denied")
        if any(isinstance(one, Put) and len(one.value) > self.limit for one in writes):
            raise StoreRequestError("request is too large")
        failed = [guard for guard in guards if not holds(guard, self.items.get(guard.key))]
        if failed:
            current = {guard.key: self.items.get(guard.key) for guard in guards}
            raise GuardFailed("no", failed=failed, current=current, revision=self.revision)
        return self.write(writes)

    def write(self, writes: Sequence[Write]) -> int:
        self.revision += 1
        changes = []
        for write in writes:
            before = self.items.pop(write.key, None)
            after = None
            if isinstance(write, Put):
                created = before.create_revision if before else self.revision
                after = KeyValue(write.key, write.value, created, self.revision, write.lease)
                self.items[write.key] = after
            changes.append(Change(write.key, after, before))
        self.events.append(Changed(self.revision, tuple(changes)))
        return self.revision

    def revoke(self, lease: int) -> None:
        self.revoked.append(lease)


class Bench:
    """A leader over a store in memory, with a planner that a test scripts."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.views: list[ClusterView] = []
        self.asked: list[tuple[str, str, str, float]] = []
        self.watched: list[dict[Who, str]] = []
        self.hurried: list[Who] = []
        self.asked_about: list[tuple[Who, float, tuple[Who, ...]]] = []
        self.decide: Callable[[ClusterView], tuple[Action, ...]] = lambda view: ()
        self.leader = Leader(
            cast("Store", self.memory),
            LEADER,
            Settings(probe=0.05),
            self,
            self._plan,
        )

    def _plan(self, view: ClusterView, now: float, settings: Settings) -> tuple[Action, ...]:
        self.views.append(view)
        return self.decide(view)

    def probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        self.asked.append((node, incarnation, address, timeout))

    def watch(self, targets: Mapping[Who, str], patience: float) -> None:
        self.watched.append(dict(targets))

    def hurry(self, node: str, incarnation: str) -> None:
        self.hurried.append((node, incarnation))

    def witness(
        self,
        who: Who,
        tried: float,
        addresses: tuple[str, ...],
        witnesses: tuple[Who, ...],
        patience: float,
    ) -> None:
        self.asked_about.append((who, tried, witnesses))

    def listed(self) -> Bench:
        self.leader.take(Listed(self.memory.revision, dict(self.memory.items)))
        return self

    def deliver(self) -> None:
        for event in self.memory.events:
            self.leader.take(event)
        self.memory.events.clear()

    def act(self, no_eviction_before: float = ALWAYS) -> float | None:
        return self.leader.act(no_eviction_before)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nothing_is_decided_before_the_list(bench: Bench) -> None:
    bench.act()
    assert not bench.views
    bench.listed().act()
    assert len(bench.views) == 1


def test_own_writes_are_awaited(bench: Bench) -> None:
    bench.listed().decide = lambda view: (STATUS,)
    bench.act()
    bench.act()
    assert (len(bench.views), bench.memory.commits) == (1, 1)
    bench.deliver()
    bench.act()
    assert len(bench.views) == 2


def test_own_writes_are_not_awaited_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SEEN_WITHIN", 0.0)
    bench.listed().decide = lambda view: (STATUS,)
    bench.act()
    bench.act()
    assert len(bench.views) == 2
    assert "has not delivered" in caplog.text


def test_a_lost_race_is_decided_anew_and_not_repeated(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BACK_OFF", 3600.0)
    bench.listed().decide = lambda view: (STATUS, KeepWarm("n0", "demo", 1, "never reached"))
    bench.memory.write([Put(keys.generation("demo"), b"{}")])
    bench.act()
    assert bench.memory.commits == 1
    bench.act()
    assert bench.memory.commits == 1, "not before the watch says what has happened"
    bench.deliver()
    bench.decide = lambda view: (STATUS,)
    bench.act()
    assert keys.job_status("demo") in bench.memory.items


def test_a_deposed_leader_writes_nothing(bench: Bench) -> None:
    bench.listed().decide = lambda view: (STATUS,)
    del bench.memory.items["election/c1"]
    with pytest.raises(Fenced):
        bench.act()
    assert not bench.memory.items


def test_somebody_else_under_the_same_name_is_a_deposition_too(bench: Bench) -> None:
    bench.listed().decide = lambda view: (STATUS,)
    bench.memory.items["election/c1"] = KeyValue("election/c1", b"{}", 50, 50, 9)
    with pytest.raises(Fenced):
        bench.act()


def test_an_outage_is_told_and_waited_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.listed().decide = lambda view: (STATUS,)
    bench.memory.down = True
    assert bench.act() is not None
    assert bench.act() is None
    assert bench.memory.commits == 1
    bench.memory.down = False
    monkeypatch.setattr(bench.leader, "_not_before", 0.0)
    assert bench.act() is None
    assert bench.memory.commits == 2


def place(bench: Bench) -> None:
    """Node n0 has a place, a lease, and then no lease."""
    record = Node(node="n0", incarnation="a", control_address="127.0.0.1:1")
    bench.memory.write([Put(keys.node("n0"), records.dump(record), 7)])
    assignment = Assignment("n0", "a", "demo", 0, 1)
    bench.memory.write([Put(keys.assignment("n0"), records.dump(assignment))])


def test_a_death_revokes_the_lease(bench: Bench) -> None:
    place(bench)
    bench.listed().decide = lambda view: (DeclareDead("n0", "a", "silent"),)
    bench.act()
    flags = records.load(keys.parse("flags/n0").kind, bench.memory.items["flags/n0"])
    assert isinstance(flags, NodeFlags)
    assert flags.is_dead("a")
    assert bench.memory.revoked == [7]


def test_another_incarnation_s_lease_is_left_alone(bench: Bench) -> None:
    place(bench)
    bench.listed().decide = lambda view: (DeclareDead("n0", "older", "silent"),)
    bench.act()
    assert "flags/n0" in bench.memory.items
    assert not bench.memory.revoked


def probe_suspects(view: ClusterView) -> tuple[Action, ...]:
    return tuple(
        Probe(one.node, one.incarnation, one.control_address, "its lease is gone")
        for one in view.suspects.values()
        if one.verdict is not Verdict.DEAD
    )


def verdict(bench: Bench) -> Verdict:
    return bench.views[-1].suspects["n0", "a"].verdict


def suspected(bench: Bench) -> None:
    from coordinator.store import Delete

    place(bench)
    bench.listed().decide = probe_suspects
    bench.memory.events.clear()
    bench.memory.write([Delete(keys.node("n0"))])
    bench.deliver()


def test_one_probe_at_a_time_and_not_too_often(bench: Bench) -> None:
    suspected(bench)
    for _ in range(5):
        bench.act()
    assert bench.asked == [("n0", "a", "127.0.0.1:1", 0.05)]
    bench.leader.probed(Probed("n0", "a", Verdict.ALIVE, "it answers"))
    bench.act()
    assert len(bench.asked) == 1
    threading.Event().wait(0.06)
    bench.act()
    assert len(bench.asked) == 2
    bench.leader.probed(Probed("n0", "a", Verdict.DEAD, "refused"))
    threading.Event().wait(0.06)
    bench.act()
    assert len(bench.asked) == 2
    assert verdict(bench) is Verdict.DEAD


def test_who_didn_t_answer_during_an_outage_is_asked_again_after_it(bench: Bench) -> None:
    suspected(bench)
    bench.act(no_eviction_before=float("inf"))
    bench.leader.probed(Probed("n0", "a", Verdict.DEAD, "silent"))
    bench.act(no_eviction_before=float("inf"))
    assert bench.views[-1].no_eviction_before == float("inf")
    assert verdict(bench) is Verdict.DEAD
    threading.Event().wait(0.06)
    bench.act()
    assert verdict(bench) is Verdict.UNKNOWN
    assert len(bench.asked) == 2


def test_who_has_a_place_is_watched(bench: Bench) -> None:
    place(bench)
    bench.listed().act()
    bench.act()
    assert bench.watched == [{("n0", "a"): "127.0.0.1:1"}]
    bench.leader.contacted(Contacted("n0", "a", Line.ANSWERS, "it answers"))
    bench.act()
    assert bench.views[-1].contacts["n0", "a"].line is Line.ANSWERS


def test_who_was_silent_with_most_is_asked_again_when_others_are_heard(bench: Bench) -> None:
    suspected(bench)
    bench.act()
    bench.leader.probed(Probed("n0", "a", Verdict.SILENT, "nothing"))
    bench.act()
    assert verdict(bench) is Verdict.SILENT
    bench.memory.write([Put(keys.node("n1"), records.dump(Node("n1", "b", control_address="h:1")))])
    bench.deliver()
    bench.act()
    bench.leader.contacted(Contacted("n1", "b", Line.ANSWERS, "it answers"))
    bench.act()
    assert verdict(bench) is Verdict.UNKNOWN
    assert bench.views[-1].doubted_at > 0


def test_witnesses_are_asked_once_for_each_try(bench: Bench) -> None:
    place(bench)
    others = (("n1", "b"),)

    def ask(tried: float) -> None:
        asked = AskWitnesses("n0", "a", tried, ("127.0.0.1:1",), others, "silent")
        bench.decide = lambda view: (asked,)
        bench.act()

    bench.listed()
    ask(1.0)
    ask(1.0)
    ask(2.0)
    assert bench.asked_about == [(("n0", "a"), 1.0, others), (("n0", "a"), 2.0, others)]


def test_who_still_has_a_lease_is_pinged_at_once_but_not_too_often(bench: Bench) -> None:
    place(bench)
    bench.listed().decide = lambda view: (Probe("n0", "a", "127.0.0.1:1", "its group"),)
    bench.act()
    bench.act()
    assert (bench.hurried, bench.asked) == ([("n0", "a")], [])


@pytest.mark.parametrize(("apart", "told"), [(0.0, ["a", "b", "a"]), (1000.0, ["a"])])
def test_a_wait_is_logged_once_for_each_change_but_not_too_often(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    apart: float,
    told: list[str],
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "_TOLD_AGAIN", apart)
    bench.listed()
    for reason in ("a", "a", "b", "b", "a"):
        bench.decide = lambda view, reason=reason: (Wait("demo", reason),)  # type: ignore[misc]
        bench.act()
    said = [one.message for one in caplog.records if "waits" in one.message]
    assert said == [f"job demo waits: {one}" for one in told]


def test_an_unreadable_record_is_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.listed()
    for _ in range(3):
        bench.memory.write([Put(keys.node("n0"), b"{")])
    bench.memory.write([Put(keys.node("n1"), b"{}")])
    bench.deliver()
    assert caplog.text.count("nodes/n0") == 1


def test_actions_in_one_pass_don_t_stand_in_each_other_s_way(bench: Bench) -> None:
    from coordinator.model import Generation, Phase
    from coordinator.plan import Transition

    generation = Generation(job="demo", generation=1, phase=Phase.PAUSE)
    bench.listed().decide = lambda view: (
        Transition(generation, "why"),
        STATUS,
        Unassign("n9", "demo", "why"),
    )
    assert bench.act() is None
    assert keys.job_status("demo") in bench.memory.items
    assert bench.memory.commits == 3


def test_nothing_is_decided_while_there_is_something_to_take_back(bench: Bench) -> None:
    from coordinator.model import Job, JobSpec

    job = Job(spec=JobSpec(name="demo", command=("x",)))
    place(bench)
    bench.memory.write([Put(keys.job_spec("demo"), records.dump(job))])
    bench.listed().act()
    assert not bench.views
    assert keys.assignment("n0") not in bench.memory.items
    bench.deliver()
    bench.act()
    assert len(bench.views) == 1


def test_a_write_that_etcd_refuses_holds_up_nobody_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    large = UpdateStatus("large", JobStatus(JobState.WAITING, "x" * 2000), "why")
    bench.memory.limit = 1000
    bench.listed().decide = lambda view: (large, STATUS)
    bench.act()
    assert keys.job_status("large") not in bench.memory.items
    assert keys.job_status("demo") in bench.memory.items
    assert "job large: status WAITING: etcd refuses it" in caplog.text
    bench.deliver()
    bench.act()
    assert len(bench.views) == 1, "not again at once, whatever happens"


def test_a_user_without_the_rights_is_no_outage_and_no_end(bench: Bench) -> None:
    bench.listed().decide = lambda view: (STATUS,)
    bench.memory.forbidden = True
    assert bench.act() is None
    assert bench.memory.commits == 1
    assert bench.act() is None
    assert bench.memory.commits == 1
