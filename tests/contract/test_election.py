# SPDX-License-Identifier: Apache-2.0
"""One leader at a time, whose writes fail from the moment that it is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coordinator.store import (
    Absent,
    Created,
    Delete,
    Deposed,
    Elected,
    ElectionEvent,
    GuardFailed,
    LeaseEvent,
    Put,
    Store,
    StoreUnavailable,
    keys,
)
from tests.contract.both import AnyEtcd, only_real, open_store, time_of
from tests.contract.recorder import Recorder


class Candidate:
    """An election with its lease and what came of it."""

    def __init__(self, store: Store, name: str, ttl: int = 5) -> None:
        self.store = store
        self.events: Recorder[ElectionEvent] = Recorder(store)
        self.lease_events: Recorder[LeaseEvent] = Recorder(store)
        self.lease = store.lease(ttl, self.lease_events.put)
        self.election = store.election(name, name.encode(), self.lease, self.events.put)
        self.election.start()

    def elected(self, timeout: float = 30.0) -> Created:
        event = self.events.next(timeout)
        assert isinstance(event, Elected), event
        return event.guard


@contextmanager
def candidates(store: Store, *names: str, ttl: int = 5) -> Iterator[list[Candidate]]:
    """Candidates that stand in this order."""
    standing: list[Candidate] = []
    try:
        for name in names:
            standing.append(Candidate(store, name, ttl))
            deadline = time_of(store).now() + 10
            while store.get(keys.election(name)) is None:
                time_of(store).wait(0.01)
                assert time_of(store).now() < deadline
        yield standing
    finally:
        for each in standing:
            each.election.close()
            each.lease.close(revoke=True)


def test_the_first_one_leads_and_hands_over_when_it_resigns(store: Store) -> None:
    with candidates(store, "a", "b", "c") as (a, b, c):
        guard = a.elected()
        assert guard.key == "election/a"
        b.events.nothing_for(0.3)
        leader = b.election.leader()
        assert leader is not None
        assert (leader.key, leader.value) == ("election/a", b"a")
        store.commit([guard], [Put("jobs/j/status", b"by a")])
        a.election.resign()
        assert a.events.next() == Deposed("resigned")
        b_guard = b.elected()
        with pytest.raises(GuardFailed) as caught:
            store.commit([guard], [Put("jobs/j/status", b"by a again")])
        assert caught.value.failed == (guard,)
        store.commit([b_guard], [Put("jobs/j/status", b"by b")])
        c.events.nothing_for(0.3)
        b.election.resign()
        c.elected()
        c.election.resign()
        assert c.election.leader() is None


def test_the_end_of_the_lease_hands_over(store: Store) -> None:
    with candidates(store, "a", "b", ttl=2) as (a, b):
        guard = a.elected()
        a.lease.close(revoke=False)  # as if the process had died: nobody renews
        deposed = a.events.next()
        assert isinstance(deposed, Deposed)
        assert "gone" in deposed.reason
        b.elected()
        with pytest.raises(GuardFailed):
            store.commit([guard], [Put("x", b"")])
        a.events.nothing_for(0.3)


def test_a_revoked_lease_deposes_at_once(store: Store) -> None:
    with candidates(store, "a", "b") as (a, b):
        a.elected()
        began = time_of(store).now()
        store.revoke(a.lease.id)
        assert isinstance(a.events.next(), Deposed)
        b.elected()
        assert time_of(store).now() - began < 4, "well before the TTL"


def test_one_that_waits_can_fail_without_anyone_being_elected(store: Store) -> None:
    with candidates(store, "a", "b", "c") as (a, b, c):
        a.elected()
        b.election.resign()
        c.events.nothing_for(0.5)
        assert b.events.seen == [], "it never led"
        a.election.resign()
        c.elected()


def test_a_key_made_anew_is_not_the_own_one(store: Store) -> None:
    with candidates(store, "a") as (a,):
        guard = a.elected()
        store.commit([], [Delete(guard.key)])
        store.commit([Absent(guard.key)], [Put(guard.key, b"a")])
        assert isinstance(a.events.next(), Deposed)


def test_an_earlier_life_of_the_same_name_is_waited_for(store: Store) -> None:
    old, _ = store.grant(2)
    store.commit([], [Put("election/a", b"old", old)])
    candidate = Candidate(store, "a")
    candidate.events.nothing_for(0.5)
    guard = candidate.elected()
    found = store.get("election/a")
    assert found is not None
    assert (found.value, found.create_revision) == (b"a", guard.create_revision)
    candidate.election.resign()
    candidate.lease.close(revoke=True)


def test_a_lease_that_is_gone_cannot_stand(store: Store) -> None:
    recorder: Recorder[LeaseEvent] = Recorder(store)
    lease = store.lease(5, recorder.put)
    store.revoke(lease.id)
    events: Recorder[ElectionEvent] = Recorder(store)
    election = store.election("a", b"", lease, events.put)
    election.start()
    deposed = events.next()
    assert isinstance(deposed, Deposed)
    assert "lease not found" in deposed.reason
    election.resign()
    lease.close(revoke=False)


def test_a_registration_whose_answer_is_lost_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = store.commit
    lost = iter([True])

    def lose(*args: object, **kwargs: object) -> int:
        revision = commit(*args, **kwargs)  # type: ignore[arg-type]
        if next(lost, False):
            raise StoreUnavailable("the answer was lost", outcome_unknown=True)
        return revision

    monkeypatch.setattr(store, "commit", lose)
    with candidates(store, "a") as (a,):
        found = store.get("election/a")
        assert found is not None
        assert a.elected() == Created("election/a", found.create_revision)


def test_leader_and_candidates_live_through_an_outage(etcd: AnyEtcd, own_store: Store) -> None:
    with candidates(own_store, "a", "b") as (a, b):
        guard = a.elected()
        etcd.restart()
        own_store.commit([guard], [Put("x", b"")])
        a.events.nothing_for(1.0)
        b.events.nothing_for(0.1)
        a.election.resign()
        b.elected()
        etcd.kill()
        etcd.start()
        etcd.await_ready()
        own_store.revoke(b.lease.id)
        b.events.until(Deposed)


@only_real
def test_never_two_at_once_under_a_storm(store: Store) -> None:
    """Every leader writes under its guard, then goes; its number is one more than the last."""
    store.commit([], [Put("n", b"0")])
    done: list[int] = []

    def run(name: str) -> None:
        for _ in range(4):
            with candidates(store, name) as (me,):
                guard = me.elected()
                found = store.get("n")
                assert found is not None
                number = int(found.value) + 1
                store.commit([guard], [Put("n", str(number).encode())])
                done.append(number)
                me.election.resign()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == list(range(1, 13))


def test_resign_while_etcd_is_away_ends_in_time(etcd: AnyEtcd) -> None:
    with open_store(etcd, timeout=1.0) as store:
        candidate = Candidate(store, "a")
        candidate.elected()
        etcd.freeze()
        began = time_of(store).now()
        with pytest.raises(StoreUnavailable):
            candidate.election.resign()
        candidate.lease.close(revoke=False)
        assert time_of(store).now() - began < 8
        etcd.thaw()
