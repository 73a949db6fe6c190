# SPDX-License-Identifier: Apache-2.0
"""Several jobs in one pool: failure domains, reserves, priorities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from coordinator.model import Job, JobSpec, JobView, LiveNode, SpareAssignment
from coordinator.plan import KeepWarm, Transition, Wait
from coordinator.plan.placement import Candidates, in_turn
from coordinator.plan.spread import Pool
from tests.unit.plan.views import cluster, node, of, running, spec, the

DOMAINS = ("switch", "rack")


def at(name: str, switch: str, rack: str, *, hot: bool = False) -> LiveNode:
    return node(name, hot=hot, labels=(("rack", rack), ("switch", switch)))


def waiting(of: JobSpec, created: int = 0) -> JobView:
    return JobView(job=Job(spec=of, spec_revision=7), created=created)


def racks(count: int, each: int) -> list[LiveNode]:
    return [
        at(f"r{rack}-{number}", f"s{rack // 2}", f"r{rack}")
        for rack in range(count)
        for number in range(each)
    ]


def rack_of(node: str) -> str:
    return node.partition("-")[0]


class TestDomains:
    def test_replicas_of_a_position_come_into_different_racks(self) -> None:
        """Two nodes a replica: one rack after the other, a position would have every second one."""
        job = waiting(spec(4, 2, spread=DOMAINS))
        start = the(Transition, cluster(job, nodes=racks(4, 2)))
        for position in range(2):
            mine = {rack_of(one.node) for one in start.slots if one.slot % 2 == position}
            assert len(mine) == 4

    def test_switches_come_before_racks(self) -> None:
        nodes = [at("a", "s0", "r0"), at("b", "s0", "r1"), at("c", "s1", "r2")]
        start = the(Transition, cluster(waiting(spec(2, spread=DOMAINS)), nodes=nodes))
        assert [one.node for one in start.slots] == ["a", "c"]

    def test_a_replacement_keeps_clear_of_those_that_stay(self) -> None:
        job = running(spec(spread=DOMAINS))
        placed = [at("n0", "s0", "r0"), at("n1", "s0", "r1"), at("n2", "s1", "r2")]
        spares = [at("a", "s0", "r0"), at("b", "s1", "r2"), at("c", "s1", "r3")]
        view = cluster(job, nodes=[*placed, *spares], dead=["n1"])
        assert the(Transition, view).slots[0].node == "c"

    def test_a_hot_spare_comes_first_wherever_it_is(self) -> None:
        job = running(spec(spread=DOMAINS))
        placed = [at(f"n{number}", "s0", "r0") for number in range(3)]
        spares = [at("a", "s0", "r0", hot=True), at("b", "s1", "r1")]
        view = cluster(job, nodes=[*placed, *spares], dead=["n1"])
        assert the(Transition, view).slots[0].node == "a"

    def test_a_node_without_labels_is_in_a_domain_of_its_own(self) -> None:
        nodes = [at("a", "s0", "r0"), at("b", "s0", "r0"), node("z")]
        start = the(Transition, cluster(waiting(spec(2, spread=DOMAINS)), nodes=nodes))
        assert {one.node for one in start.slots} == {"a", "z"}

    def test_a_job_that_names_no_labels_takes_nodes_by_name(self) -> None:
        start = the(Transition, cluster(waiting(spec(2)), nodes=racks(2, 2)))
        assert [one.node for one in start.slots] == ["r0-0", "r0-1"]

    def test_a_spare_is_kept_away_from_the_job_s_nodes(self) -> None:
        job = running(spec(2, spares=2, spread=DOMAINS))
        placed = [at("n0", "s0", "r0"), at("n1", "s1", "r1")]
        free = [at("a", "s0", "r0"), at("b", "s1", "r2"), at("c", "s2", "r3")]
        view = cluster(job, nodes=[*placed, *free])
        assert [one.node for one in of(KeepWarm, view)] == ["c", "b"]

    def test_ten_thousand_nodes_are_as_even_as_they_can_be(self) -> None:
        """And quickly: it is one decision of the leader."""
        nodes = [
            at(f"n{number:05}", f"s{number // 128}", f"r{number // 8}") for number in range(10_240)
        ]
        view = cluster(nodes=nodes)
        free = Candidates(cold=tuple(one.record.node for one in nodes))
        pool = Pool(view, spec(5_120, spread=DOMAINS), free, {})
        taken = Counter(int(pool.take(number)[1:]) // 8 for number in range(5_120))
        assert len(taken) == 1_280
        assert set(taken.values()) == {4}

    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_what_is_put_back_can_be_taken_again(self, size: int) -> None:
        nodes = racks(4, size)
        view = cluster(nodes=nodes)
        names = tuple(one.record.node for one in nodes)
        pool = Pool(view, spec(4 * size, spread=DOMAINS), Candidates(cold=names), {})
        first = [pool.take(number) for number in range(len(names))]
        assert sorted(first) == sorted(names)
        with pytest.raises(LookupError, match="slot 99"):
            pool.take(99)
        for each in first:
            pool.put_back(each)
        assert pool.left().cold == names
        assert [pool.take(number) for number in range(len(names))] == first
        assert set(Counter(rack_of(one) for one in first[:4]).values()) == {1}


class TestTurns:
    def test_by_priority_and_then_as_they_were_submitted(self) -> None:
        jobs = [
            waiting(spec(name="a"), created=30),
            waiting(spec(name="b"), created=20),
            waiting(spec(name="c", priority=1), created=40),
            waiting(spec(name="d", priority=-1), created=10),
        ]
        assert [one.job.spec.name for one in in_turn(cluster(*jobs))] == ["c", "b", "a", "d"]

    def test_who_comes_first_gets_the_nodes(self) -> None:
        jobs = [
            waiting(spec(2, name="a"), created=1),
            waiting(spec(2, name="b", priority=1), created=2),
        ]
        view = cluster(*jobs, nodes=[node("n0"), node("n1")])
        assert the(Transition, view).generation.job == "b"
        assert the(Wait, view).job == "a"

    def test_spares_go_to_the_higher_priority(self) -> None:
        low, high = _pair(spares=1)
        view = cluster(low, high, nodes=[node("x")])
        assert [(one.node, one.job) for one in of(KeepWarm, view)] == [("x", "high")]

    def test_a_reserve_of_lower_priority_is_taken_for_a_higher_one(self) -> None:
        low, high = _pair(spares=1)
        view = cluster(low, high, nodes=[node("x")], spares={"x": "low"})
        (moved,) = of(KeepWarm, view)
        assert (moved.node, moved.job) == ("x", "high")
        assert "no longer for job low of priority 0" in moved.reason
        kept = replace(view, spares={"x": SpareAssignment("x", "high", 7)})
        assert of(KeepWarm, kept) == []

    def test_not_between_equals(self) -> None:
        low, high = _pair(spares=1, priority=0)
        view = cluster(low, high, nodes=[node("x")], spares={"x": "low"})
        assert of(KeepWarm, view) == []


def _pair(spares: int, priority: int = 5) -> tuple[JobView, JobView]:
    """Two running jobs on nodes of their own."""
    low = running(spec(1, name="low", spares=spares))
    high = running(spec(1, name="high", spares=spares, priority=priority))
    slot = replace(high.slots[0], node="m0", incarnation="m0-0")
    progress = {"m0": replace(high.progress["n0"], incarnation="m0-0")}
    return low, replace(high, slots={0: slot}, progress=progress)
