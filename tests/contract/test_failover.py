# SPDX-License-Identifier: Apache-2.0
"""Three members: any one of them may die or freeze, the leader too."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from coordinator.store import (
    Absent,
    Changed,
    Disconnected,
    GuardFailed,
    Lease,
    LeaseEvent,
    LeaseRenewed,
    Listed,
    Put,
    Store,
    StoreUnavailable,
    WatchEvent,
    calls,
)
from coordinator.store.lease import LeaseLost
from tests.contract.recorder import Recorder, history, watching
from tests.etcd import Etcd, Member


@pytest.fixture(scope="module")
def three() -> Iterator[Etcd]:
    with Etcd(members=3) as etcd:
        yield etcd


@pytest.fixture
def store(three: Etcd) -> Iterator[Store]:
    three.start()
    three.thaw()
    three.await_ready()
    prefix = f"/test/{time.monotonic_ns()}"
    with Store(three.endpoints, prefix=prefix, timeout=5.0, keepalive=1.0) as store:
        yield store


def write(store: Store, key: str) -> None:
    """Write ``key`` once, over whatever happens."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            store.commit([Absent(key)], [Put(key, b"")])
            return
        except GuardFailed:
            return
        except StoreUnavailable:
            continue
    raise AssertionError("no write came through")


def test_every_member_may_be_killed_in_turn(three: Etcd, store: Store) -> None:
    lease_events: Recorder[LeaseEvent] = Recorder(store)
    lease = Lease(store, 5, lease_events.put)
    store.commit([], [Put("nodes/n", b"", lease.id)])
    events: Recorder[WatchEvent]
    with watching(store, "k/", "nodes/") as events:
        events.until(Listed)
        victims: list[Member] = sorted(three.members, key=lambda m: m is not three.leader())
        for number, victim in enumerate(victims):
            write(store, f"k/{number}-before")
            victim.kill()
            write(store, f"k/{number}-while")
            assert store.get("nodes/n") is not None
            victim.start(three.members, three.flags)
            three.await_ready()
            write(store, f"k/{number}-after")
        events.until_true(lambda: len(history(events.seen)) >= 9)
        names = [key for _, key, _ in history(events.seen)]
        assert names == [f"k/{n}-{w}" for n in range(3) for w in ("before", "while", "after")]
        assert sum(isinstance(e, Changed) for e in events.seen) == 9
    assert store.get("nodes/n") is not None
    lease_events.until(LeaseRenewed)
    assert not any(isinstance(e, LeaseLost) for e in lease_events.seen)
    lease.close(revoke=True)


def test_a_frozen_leader_holds_nobody(three: Etcd, store: Store) -> None:
    with watching(store, "k/") as events:
        events.until(Listed)
        leader = three.leader()
        leader.freeze()
        began = time.monotonic()
        write(store, "k/a")
        assert store.get("k/a") is not None
        changed = events.until(Changed)
        assert changed.changes[0].key == "k/a"
        assert time.monotonic() - began < 15
        leader.thaw()
        write(store, "k/b")
        events.until_true(lambda: len(history(events.seen)) >= 2)
        assert [key for _, key, _ in history(events.seen)] == ["k/a", "k/b"]


def test_without_a_majority_it_is_unavailable(three: Etcd, store: Store) -> None:
    write(store, "a")
    for member in three.members[:2]:
        member.kill()
    with Store(three.endpoints, prefix="/x", timeout=2.0) as brief:
        with pytest.raises(StoreUnavailable):
            brief.get("a")
        with pytest.raises(StoreUnavailable):
            brief.commit([], [Put("a", b"")])
    three.start()
    three.await_ready()
    assert store.get("a") is not None


def test_names_that_move_are_looked_up_again(
    three: Etcd, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when containers are made anew: the names stay, the addresses do not."""
    there = "127.0.0.9"  # nobody listens there
    getaddrinfo = socket.getaddrinfo

    def lookup(host: str, port: int, **more: int) -> list[tuple[object, ...]]:
        if host in ("etcd-0", "etcd-1"):
            return [(0, 0, 0, "", (there, port))]
        return list(getaddrinfo(host, port, **more))

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(calls, "_LOOK_UP_EVERY", 0.2)
    ports = [endpoint.rpartition(":")[2] for endpoint in three.endpoints]
    names = [f"etcd-0:{ports[0]}", f"etcd-1:{ports[1]}"]
    with (
        Store(names, prefix=store.prefix, timeout=1.0, keepalive=1.0) as named,
        watching(named, "k/") as events,
    ):
        events.until(Disconnected)
        with pytest.raises(StoreUnavailable):
            named.get("a")
        there = "127.0.0.1"
        events.until(Listed)
        write(named, "k/a")
        assert [c.key for c in events.until(Changed).changes] == ["k/a"]
