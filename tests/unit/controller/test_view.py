# SPDX-License-Identifier: Apache-2.0
"""The view grows from one list and every change after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.controller.records import dump
from coordinator.controller.view import Observer
from coordinator.model import (
    Ack,
    Assignment,
    Cause,
    DeadIncarnation,
    Generation,
    Incident,
    Job,
    JobSpec,
    JobState,
    JobStatus,
    LiveNode,
    Node,
    NodeFlags,
    Phase,
    Progress,
    RankProgress,
    Slot,
    SlotRank,
    SpareAssignment,
    StepPhase,
    Suspect,
    Verdict,
)
from coordinator.store import KeyValue, keys

JOB = Job(spec=JobSpec(name="demo", command=("train",), replicas=2), spec_revision=1)
NODE = Node(node="n0", incarnation="a", control_address="127.0.0.1:1")
SLOT = Slot(slot=0, node="n0", incarnation="a", ranks=(SlotRank("t", 1),), generation=1)
PLACE = Assignment("n0", "a", "demo", 0, 1)
GENERATION = Generation(job="demo", generation=1, phase=Phase.PAUSE)
FOREVER = float("-inf")


class Etcd:
    """Makes key-values as etcd would, and gives them to an observer."""

    def __init__(self) -> None:
        self.revision = 0
        self.items: dict[str, KeyValue] = {}
        self.observer = Observer()

    def put(self, key: str, value: Any, now: float = 0.0, lease: int = 0) -> None:
        self.revision += 1
        known = self.items.get(key)
        created = known.create_revision if known else self.revision
        raw = value if isinstance(value, bytes) else dump(value)
        self.items[key] = KeyValue(key, raw, created, self.revision, lease)
        self.observer.change(key, self.items[key], now)

    def delete(self, key: str, now: float = 0.0) -> None:
        self.revision += 1
        self.items.pop(key, None)
        self.observer.change(key, None, now)

    def seen_anew(self, now: float) -> Observer:
        """What a leader sees that is elected at this time."""
        observer = Observer()
        observer.list(self.items, self.revision, now)
        return observer


@pytest.fixture
def etcd() -> Etcd:
    return Etcd()


@pytest.fixture
def running(etcd: Etcd) -> Etcd:
    """A job with one slot, on node n0."""
    etcd.put(keys.node("n0"), NODE, lease=7)
    etcd.put(keys.job_spec("demo"), JOB)
    etcd.put(keys.generation("demo"), GENERATION, now=1.0)
    etcd.put(keys.slot("demo", 0), SLOT)
    etcd.put(keys.assignment("n0"), PLACE)
    return etcd


def test_every_kind_of_record(running: Etcd) -> None:
    status = JobStatus(JobState.STARTING)
    incident = Incident(id="demo.1", job="demo", cause=Cause.NODE_LOST)
    ack = Ack(1, "a")
    progress = Progress("a")
    running.put(keys.generation("demo"), replace(GENERATION, incident="demo.1"))
    running.put(keys.job_status("demo"), status, now=3.0)
    running.put(keys.incident("demo.1"), incident)
    running.put(keys.ack("demo", "n0"), ack)
    running.put(keys.progress("demo", "n0"), progress)
    running.put(keys.flags("n0"), NodeFlags(cordoned="why"))
    running.put(keys.spare("n1"), SpareAssignment("n1", "demo", 1))
    running.put(keys.election("c1"), b"{}")
    running.put("of/a/later/version", b"?")
    view = running.observer.view(5.0)
    assert view.nodes == {"n0": LiveNode(NODE, 7, 1)}
    assert view.flags == {"n0": NodeFlags(cordoned="why")}
    assert view.assignments == {"n0": PLACE}
    assert view.spares == {"n1": SpareAssignment("n1", "demo", 1)}
    assert view.suspects == {}
    assert view.no_eviction_before == 5.0
    job = view.jobs["demo"]
    assert (job.job, job.status, job.incident) == (JOB, status, incident)
    assert (job.slots, job.acks, job.progress) == ({0: SLOT}, {"n0": ack}, {"n0": progress})
    assert job.status_at == 3.0
    assert not running.observer.unreadable


def test_a_new_leader_sees_the_same(running: Etcd) -> None:
    running.put(keys.job_status("demo"), JobStatus(JobState.RUNNING), now=3.0)
    before = running.observer.view().jobs["demo"]
    anew = running.seen_anew(9.0)
    after = anew.view().jobs["demo"]
    assert anew.revision == running.revision
    assert after == replace(before, phase_at=9.0, progress_at=9.0, status_at=FOREVER)


def test_what_was_handed_out_doesn_t_change(running: Etcd) -> None:
    before = running.observer.view()
    job = before.jobs["demo"]
    running.delete(keys.node("n0"))
    running.put(keys.slot("demo", 0), replace(SLOT, node="n1"))
    running.put(keys.flags("n0"), NodeFlags(cordoned="why"))
    assert before.nodes == {"n0": LiveNode(NODE, 7, 1)}
    assert before.flags == {}
    assert job.slots == {0: SLOT}
    assert running.observer.view().jobs["demo"].slots[0].node == "n1"


def test_deleted_records_are_gone(running: Etcd) -> None:
    for key in [*running.items]:
        running.delete(key)
    view = running.observer.view()
    assert not view.nodes
    assert not view.assignments
    assert not view.jobs


def test_a_job_without_its_spec_is_no_job(etcd: Etcd) -> None:
    etcd.put(keys.generation("demo"), GENERATION)
    assert not etcd.observer.view().jobs


# ---- times


def test_the_phase_s_time_is_when_it_was_first_seen(running: Etcd) -> None:
    def phase_at() -> float:
        return running.observer.view().jobs["demo"].phase_at

    assert phase_at() == 1.0
    running.put(keys.generation("demo"), replace(GENERATION, reason="other words"), now=2.0)
    assert phase_at() == 1.0
    running.put(keys.generation("demo"), replace(GENERATION, phase=Phase.RESTORE), now=3.0)
    assert phase_at() == 3.0
    running.put(keys.generation("demo"), replace(GENERATION, generation=2), now=4.0)
    assert phase_at() == 4.0


def progress(step: int = 5, rate: float = 1.0, **more: Any) -> Progress:
    rank = RankProgress(0, "t", generation=1, phase=StepPhase.COMPUTING, step=step, **more)
    return Progress("a", (rank,), rate)


def test_progress_is_a_rank_that_moved(running: Etcd) -> None:
    def put(value: Progress, now: float) -> float:
        running.put(keys.progress("demo", "n0"), value, now=now)
        return running.observer.view().jobs["demo"].progress_at

    assert put(progress(5), 2.0) == 2.0
    assert put(progress(5, rate=0.5), 3.0) == 2.0
    assert put(progress(6), 4.0) == 4.0
    running.delete(keys.progress("demo", "n0"), now=5.0)
    assert running.observer.view().jobs["demo"].progress_at == 4.0
    running.put(keys.generation("demo"), replace(GENERATION, phase=Phase.RUNNING), now=6.0)
    assert running.observer.view().jobs["demo"].progress_at == 6.0


def test_a_broken_group_is_remembered_until_the_next_generation(running: Etcd) -> None:
    def broken_at() -> float | None:
        return running.observer.view().jobs["demo"].broken_at

    running.put(keys.progress("demo", "n0"), progress(), now=2.0)
    assert broken_at() is None
    running.put(keys.progress("demo", "n0"), progress(broken_generation=1), now=3.0)
    running.put(keys.progress("demo", "n0"), progress(broken_generation=1, step=9), now=4.0)
    assert broken_at() == 3.0
    running.put(keys.generation("demo"), replace(GENERATION, phase=Phase.RUNNING), now=5.0)
    assert broken_at() == 3.0
    running.put(keys.generation("demo"), replace(GENERATION, generation=2), now=6.0)
    assert broken_at() is None
    # still of generation 1
    running.put(keys.progress("demo", "n0"), progress(broken_generation=1, step=10), now=7.0)
    assert broken_at() is None


def test_a_new_leader_sees_a_broken_group(running: Etcd) -> None:
    running.put(keys.progress("demo", "n0"), progress(broken_generation=1), now=3.0)
    assert running.seen_anew(9.0).view().jobs["demo"].broken_at == 9.0


# ---- suspects


def suspect(etcd: Etcd, node: str = "n0", incarnation: str = "a") -> Suspect | None:
    return etcd.observer.view().suspects.get((node, incarnation))


def test_a_placed_node_whose_key_is_gone_is_suspect(running: Etcd) -> None:
    assert suspect(running) is None
    running.delete(keys.node("n0"))
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1")


def test_it_is_none_any_more_when_it_registers_again(running: Etcd) -> None:
    running.delete(keys.node("n0"))
    running.observer.verdict("n0", "a", Verdict.ALIVE, "it answers")
    running.put(keys.node("n0"), NODE)
    assert suspect(running) is None
    running.delete(keys.node("n0"))
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1"), "the old verdict is void"


def test_it_is_none_any_more_when_it_is_recorded_dead(running: Etcd) -> None:
    running.delete(keys.node("n0"))
    running.put(keys.flags("n0"), NodeFlags(dead=(DeadIncarnation("a", "silent"),)))
    assert suspect(running) is None


def test_another_incarnation_makes_the_placed_one_suspect(running: Etcd) -> None:
    running.put(keys.node("n0"), replace(NODE, incarnation="b"))
    assert suspect(running) is not None
    assert suspect(running, incarnation="b") is None


@pytest.mark.parametrize("placed_by", ["slot", "assignment", "spare"])
def test_whatever_places_it(etcd: Etcd, placed_by: str) -> None:
    etcd.put(keys.node("n0"), NODE)
    if placed_by == "slot":
        etcd.put(keys.job_spec("demo"), JOB)
        etcd.put(keys.slot("demo", 0), SLOT)
    elif placed_by == "assignment":
        etcd.put(keys.assignment("n0"), PLACE)
    else:
        etcd.put(keys.spare("n0"), SpareAssignment("n0", "demo", 1))
    assert suspect(etcd) is None
    etcd.delete(keys.node("n0"))
    assert suspect(etcd) is not None


def test_a_node_without_a_place_is_never_suspect(etcd: Etcd) -> None:
    etcd.put(keys.node("n0"), NODE)
    etcd.delete(keys.node("n0"))
    assert not etcd.observer.view().suspects


def test_a_slot_of_a_job_that_has_ended_makes_nobody_suspect(running: Etcd) -> None:
    running.delete(keys.node("n0"))
    running.delete(keys.assignment("n0"))
    assert suspect(running) is not None
    running.put(keys.generation("demo"), replace(GENERATION, phase=Phase.FINISHED))
    assert suspect(running) is None


def test_a_new_leader_suspects_who_is_gone_already(running: Etcd) -> None:
    running.delete(keys.node("n0"))
    view = running.seen_anew(9.0).view()
    assert view.suspects == {("n0", "a"): Suspect("n0", "a", "")}


def test_a_new_leader_knows_by_its_place_where_to_ask_who_is_gone_already(running: Etcd) -> None:
    running.put(keys.assignment("n0"), replace(PLACE, control_address="127.0.0.1:1"))
    running.delete(keys.node("n0"))
    view = running.seen_anew(9.0).view()
    assert view.suspects == {("n0", "a"): Suspect("n0", "a", "127.0.0.1:1")}
    running.put(keys.assignment("n0"), replace(PLACE, incarnation="b", control_address="other"))
    suspects = running.seen_anew(9.0).view().suspects
    assert suspects["n0", "a"].control_address == ""
    assert suspects["n0", "b"].control_address == "other"


def test_verdicts(running: Etcd) -> None:
    running.observer.verdict("n0", "a", Verdict.DEAD, "refused")
    running.delete(keys.node("n0"))
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1"), "it was no suspect then"
    running.observer.verdict("n0", "a", Verdict.DEAD, "refused")
    running.observer.verdict("n0", "other", Verdict.ALIVE, "")
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1", Verdict.DEAD, "refused")
    running.observer.forget_verdicts()
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1")


def test_addresses_of_long_gone_incarnations_are_forgotten(running: Etcd) -> None:
    for number in range(3000):
        running.put(keys.node("n1"), replace(NODE, node="n1", incarnation=f"i{number}"))
        if number % 100 == 0:
            running.observer.view()
    running.delete(keys.node("n0"))
    assert suspect(running) == Suspect("n0", "a", "127.0.0.1:1")
    assert len(running.observer._addresses) < 1500


# ---- records that can't be read


def test_an_unreadable_record_of_a_node_keeps_its_last_value(running: Etcd) -> None:
    running.put(keys.node("n0"), b"{")
    assert "nodes/n0" in running.observer.unreadable["nodes/n0"]
    assert running.observer.view().nodes["n0"].record == NODE
    running.put(keys.node("n0"), replace(NODE, unhealthy="hot"))
    assert not running.observer.unreadable
    assert running.observer.view().nodes["n0"].record.unhealthy == "hot"


@pytest.mark.parametrize(
    "key", [keys.job_spec("demo"), keys.generation("demo"), keys.slot("demo", 0)]
)
def test_an_unreadable_record_of_a_job_leaves_the_whole_job_alone(running: Etcd, key: str) -> None:
    running.put(keys.job_spec("other"), JOB)
    good = running.items[key].value
    running.put(key, b'{"generation": "many"}' if "generation" in key else b"[")
    assert set(running.observer.view().jobs) == {"other"}
    running.put(key, good)
    assert set(running.observer.view().jobs) == {"demo", "other"}


def test_an_unreadable_status_or_ack_hides_no_job(running: Etcd) -> None:
    running.put(keys.job_status("demo"), b"{")
    running.put(keys.ack("demo", "n0"), b"{")
    assert running.observer.view().jobs["demo"].status is None
    assert len(running.observer.unreadable) == 2


def test_unreadable_flags_keep_the_node_out(running: Etcd) -> None:
    running.put(keys.flags("n0"), NodeFlags(dead=(DeadIncarnation("z", "old"),)))
    running.put(keys.flags("n0"), b"{")
    flags = running.observer.view().flags_of("n0")
    assert "can't be read" in flags.quarantined
    assert flags.is_dead("z")


def test_an_unreadable_assignment_still_takes_the_node(etcd: Etcd) -> None:
    etcd.put(keys.assignment("n0"), b"{")
    assert "n0" in etcd.observer.view().assignments
    etcd.delete(keys.assignment("n0"))
    assert not etcd.observer.view().assignments
    assert not etcd.observer.unreadable


# ---- revisions for the guards


def test_mod_revisions_of_what_the_leader_guards(running: Etcd) -> None:
    key = keys.generation("demo")
    assert running.observer.mod_revision(key) == 3
    assert running.observer.mod_revision(keys.flags("n0")) == 0
    running.observer.wrote(key, 50)
    running.observer.wrote(keys.job_status("demo"), 50)
    assert running.observer.mod_revision(key) == 50
    assert running.observer.mod_revision(keys.job_status("demo")) == 0
    running.delete(key)
    assert running.observer.mod_revision(key) == 0
