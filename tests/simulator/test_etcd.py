# SPDX-License-Identifier: Apache-2.0
"""What the simulated etcd does besides the contract that it shares with the real one."""

from __future__ import annotations

import pytest

from coordinator.store import (
    Changed,
    GuardFailed,
    LeaseDeadlinePassed,
    LeaseEvent,
    LeaseRenewed,
    Put,
    StoreTimeout,
    StoreUnavailable,
    Unchanged,
    WatchEvent,
)
from coordinator.store.lease import LeaseLost
from tests.simulator.clock import Clock
from tests.simulator.etcd import FakeEtcd
from tests.simulator.store import FakeStore


def test_at_most_a_thousand_leases_are_revoked_a_second() -> None:
    clock = Clock()
    store = FakeStore(FakeEtcd(clock), prefix="/x")
    for number in range(3000):
        lease, _ = store.grant(5)
        store.commit([], [Put(f"nodes/n{number}", b"", lease)])
    gone: list[float] = []

    def sink(event: WatchEvent) -> None:
        if isinstance(event, Changed):
            gone.extend([clock.now()] * len(event.changes))

    watch = store.watch(["nodes/"], sink)
    watch.start()
    clock.run_until(clock.now() + 20)
    assert len(gone) == 3000
    for first in range(3000 - 1000):
        assert gone[first + 1000] - gone[first] > 0.9
    assert gone[-1] - gone[0] < 3.0


@pytest.mark.parametrize("quiet", [False, True])
def test_a_lease_ends_a_ttl_after_its_last_renewal(quiet: bool) -> None:
    ended = []
    for seed in range(50):
        clock = Clock()
        etcd = FakeEtcd(clock, seed, quiet=quiet)
        store, other = FakeStore(etcd, prefix="/x"), FakeStore(etcd, prefix="/x")
        events: list[LeaseEvent] = []
        lease = store.lease(6, events.append)
        store.commit([], [Put("nodes/n", b"", lease.id)])
        clock.run_until(clock.now() + 100)
        assert other.get("nodes/n") is not None
        began = clock.now()
        store.cut(after=1.5)
        while other.get("nodes/n") is not None:
            assert clock.step(began + 20)
        ended.append(clock.now() - began)
        clock.run_until(began + 10)
        store.mend()
        clock.run_until(began + 20)
        told = [type(one) for one in events]
        assert told[-2:] == [LeaseDeadlinePassed, LeaseLost]
        assert quiet or LeaseRenewed in told
        assert not quiet or LeaseRenewed not in told
    assert 6 - 2 <= min(ended) < 5
    assert 6 <= max(ended) < 6 + 1


@pytest.mark.parametrize("quiet", [False, True])
def test_nobody_loses_a_lease_by_a_change_of_the_leader(quiet: bool) -> None:
    clock = Clock()
    etcd = FakeEtcd(clock, quiet=quiet)
    stores = [FakeStore(etcd, prefix="/x") for _ in range(20)]
    events: list[LeaseEvent] = []
    leases = [store.lease(3, events.append) for store in stores]
    for _ in range(10):
        clock.run_until(clock.now() + 7)
        etcd.change_leader()
    clock.run_until(clock.now() + 10)
    assert len(etcd.lessor.leases) == len(leases)
    assert not any(isinstance(one, LeaseLost) for one in events)


def test_a_revoked_lease_is_noticed_with_the_next_renewal() -> None:
    clock = Clock()
    store = FakeStore(FakeEtcd(clock, quiet=True), prefix="/x")
    events: list[LeaseEvent] = []
    lease = store.lease(6, events.append)
    store.revoke(lease.id)
    clock.run_until(clock.now() + 2)
    assert [type(one) for one in events] == [LeaseLost]


def test_what_is_sent_to_a_frozen_etcd_may_arrive_later() -> None:
    outcomes = set()
    for seed in range(20):
        etcd = FakeEtcd(Clock(), seed)
        store = FakeStore(etcd, prefix="/x")
        first = store.commit([], [Put("a", b"1")])
        etcd.freeze()
        with pytest.raises(StoreTimeout) as caught:
            store.commit([Unchanged("a", first)], [Put("a", b"2")])
        assert caught.value.outcome_unknown
        etcd.thaw()
        found = store.get("a")
        assert found is not None
        outcomes.add(found.value)
    assert outcomes == {b"1", b"2"}


def test_an_answer_can_be_lost() -> None:
    store = FakeStore(FakeEtcd(Clock()), prefix="/x")
    first = store.commit([], [Put("a", b"1")])
    store.answers_to_lose = 1
    with pytest.raises(StoreUnavailable) as caught:
        store.commit([Unchanged("a", first)], [Put("a", b"2")])
    assert caught.value.outcome_unknown
    with pytest.raises(GuardFailed):
        store.commit([Unchanged("a", first)], [Put("a", b"2")])
