# SPDX-License-Identifier: Apache-2.0
"""Reads and guarded writes, on an etcd that works."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.store import (
    Absent,
    Compacted,
    Created,
    Delete,
    Guard,
    GuardFailed,
    Put,
    Store,
    StoreRequestError,
    StoreTimeout,
    StoreUnavailable,
    Unchanged,
    errors,
    target,
)
from tests.contract.both import AnyEtcd, only_real, open_store
from tests.etcd import Etcd, ctl


def test_what_is_put_is_read(store: Store) -> None:
    assert store.get("nodes/a") is None
    revision = store.commit([], [Put("nodes/a", b"1")])
    found = store.get("nodes/a")
    assert found is not None
    assert (found.key, found.value, found.lease) == ("nodes/a", b"1", 0)
    assert found.create_revision == found.mod_revision == revision
    later = store.commit([], [Put("nodes/a", b"2")])
    found = store.get("nodes/a")
    assert found is not None
    assert (found.create_revision, found.mod_revision) == (revision, later)
    store.commit([], [Delete("nodes/a"), Delete("nodes/never")])
    assert store.get("nodes/a") is None


@only_real
def test_keys_lie_below_the_cluster_prefix(shared_etcd: Etcd, store: Store) -> None:
    store.commit([], [Put("nodes/a", b"readable")])
    assert ctl(shared_etcd, "get", "--prefix", store.prefix).split() == [
        f"{store.prefix}nodes/a",
        "readable",
    ]
    with Store(shared_etcd.endpoints, prefix=store.prefix + "x") as other:
        assert other.get("nodes/a") is None
        assert other.list("").items == {}


def test_several_keys_are_read_at_one_revision(store: Store) -> None:
    names = [f"k/{i}" for i in range(300)]
    for start in range(0, 300, 100):
        revision = store.commit([], [Put(k, k.encode()) for k in names[start : start + 100]])
    snapshot = store.read([*names, "missing"])
    assert snapshot.revision == revision
    assert {k: v.value for k, v in snapshot.items.items()} == {k: k.encode() for k in names}
    assert store.read([]).items == {}


@only_real
def test_a_large_range_is_listed_in_pages_of_one_revision(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.connection._PAGE", 7)
    store.commit([], [Put(f"k/{i:03}", b"old") for i in range(50)])
    revision = store.commit([], [Put("kk", b"x"), Put("j", b"x")])
    retried = store.calls.retried
    pages = 0

    def write_between(*args: Any, **kwargs: Any) -> Any:
        nonlocal pages
        pages += 1
        answer = retried(*args, **kwargs)
        if pages == 2:
            put = Put("k/049", b"new")
            with Store([store.endpoints], prefix=store.prefix) as other:
                other.commit([], [put, Delete("k/048"), Put("k/050", b"new")])
        return answer

    monkeypatch.setattr(store.calls, "retried", write_between)
    snapshot = store.list("k/")
    assert pages == 8
    assert snapshot.revision == revision
    assert list(snapshot.items) == [f"k/{i:03}" for i in range(50)]
    assert {kv.value for kv in snapshot.items.values()} == {b"old"}
    assert store.list("k/", revision=revision).items == snapshot.items
    assert len(store.list("k/").items) == 50
    assert "k/050" in store.list("k/").items


def test_the_names_below_a_prefix_whatever_is_below_them(store: Store) -> None:
    assert store.below("k/") == ([], store.list("k/").revision)
    below = ["a", "a/b/c", "a/b/d", "a-b/c", "a.b", "a0/c", "b", "z/"]
    many = [f"m/{number}" for number in range(100)]
    store.commit(
        [], [Put(one, b"") for one in ("k", "k0", "l/a", *(f"k/{i}" for i in below + many))]
    )
    names, revision = store.below("k/")
    assert names == sorted({"a", "a-b", "a.b", "a0", "b", "m", "z"})
    assert revision == store.list("k/").revision


@only_real
def test_pages_shrink_where_values_are_large(
    shared_etcd: Etcd, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(6):
        store.commit([], [Put(f"k/{i}", b"x" * 300_000)])
    monkeypatch.setattr(target, "_MAX_MESSAGE", 500_000)
    with Store(shared_etcd.endpoints, prefix=store.prefix) as small:
        assert len(small.list("k/").items) == 6
        with pytest.raises(StoreRequestError, match="larger than max"):
            small.read([f"k/{i}" for i in range(6)])


@only_real
def test_a_listing_whose_pages_are_compacted_begins_again(
    etcd: AnyEtcd, own_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.store.connection._PAGE", 7)
    own_store.commit([], [Put(f"k/{i:03}", b"old") for i in range(20)])
    retried = own_store.calls.retried
    pages = 0

    def compact_between(*args: Any, **kwargs: Any) -> Any:
        nonlocal pages
        pages += 1
        answer = retried(*args, **kwargs)
        if pages == 1:
            with open_store(etcd) as other:
                etcd.compact(other.commit([], [Put("k/000", b"new")]))
        return answer

    monkeypatch.setattr(own_store.calls, "retried", compact_between)
    snapshot = own_store.list("k/")
    assert snapshot.items["k/000"].value == b"new"
    assert len(snapshot.items) == 20
    with pytest.raises(Compacted, match="'k/'"):
        own_store.list("k/", revision=2)


def test_the_past_is_listed_until_it_is_compacted(etcd: AnyEtcd, own_store: Store) -> None:
    first = own_store.commit([], [Put("k/a", b"1"), Put("k/b", b"1"), Put("j", b"1")])
    second = own_store.commit([], [Put("k/a", b"2"), Delete("k/b"), Put("k/c", b"2")])
    third = own_store.commit([], [Put("k/b", b"3")])
    assert (second, third) == (first + 1, first + 2)

    def values(revision: int) -> dict[str, bytes]:
        then = own_store.list("k/", revision=revision)
        assert then.revision == revision
        return {key: one.value for key, one in then.items.items()}

    assert values(first) == {"k/a": b"1", "k/b": b"1"}
    assert values(second) == {"k/a": b"2", "k/c": b"2"}
    assert values(third) == {"k/a": b"2", "k/b": b"3", "k/c": b"2"}
    etcd.compact(second)
    assert values(second) == {"k/a": b"2", "k/c": b"2"}
    with pytest.raises(Compacted, match="'k/'"):
        own_store.list("k/", revision=first)


def test_what_changes_nothing_makes_no_revision(store: Store) -> None:
    revision = store.commit([], [Put("a", b"")])
    assert store.commit([], [Delete("never")]) == revision
    assert store.commit([], [Delete("never"), Delete("a")]) == revision + 1


def test_guards(store: Store) -> None:
    first = store.commit([Absent("a")], [Put("a", b"1")])
    second = store.commit([Created("a", first), Unchanged("a", first)], [Put("a", b"2")])
    guards: list[Guard] = [Created("a", first), Unchanged("a", first), Absent("a"), Absent("b")]
    with pytest.raises(GuardFailed) as caught:
        store.commit(guards, [Put("a", b"3"), Put("c", b"3")])
    failed = caught.value
    assert failed.failed == (Unchanged("a", first), Absent("a"))
    assert failed.current["a"] == store.get("a")
    assert failed.current["b"] is None
    assert failed.revision >= second
    assert "Unchanged(key='a'" in str(failed)
    assert "Created" not in str(failed)
    assert store.get("c") is None
    store.commit([], [Delete("a")])
    with pytest.raises(GuardFailed, match="there is no such key"):
        store.commit([Created("a", first)], [Put("c", b"3")])
    third = store.commit([Absent("a")], [Put("a", b"4")])
    with pytest.raises(GuardFailed):
        store.commit([Created("a", first)], [Put("c", b"3")])
    assert store.commit([Created("a", third)], []) == third


def test_the_limits_of_a_transaction_are_those_of_etcd(store: Store) -> None:
    guards = [Absent(f"g/{i}") for i in range(128)]
    writes = [Put(f"w/{i}", b"") for i in range(128)]
    store.commit(guards, writes)
    with pytest.raises(StoreRequestError, match=r"129 guards in one transaction: .* at most 128"):
        store.commit([*guards, Absent("more")], [])
    with pytest.raises(StoreRequestError, match=r"129 writes in one transaction: .* at most 128"):
        store.commit([], [*writes, Put("more", b"")])
    assert store.get("more") is None


def test_requests_that_etcd_refuses(store: Store) -> None:
    with pytest.raises(StoreRequestError, match=r"commit 'a': INVALID_ARGUMENT.*too large"):
        store.commit([], [Put("a", b"x" * 2_000_000)])
    with pytest.raises(StoreRequestError, match="duplicate key"):
        store.commit([], [Put("a", b""), Put("a", b"")])
    with pytest.raises(errors.LeaseLost, match="commit 'a'"):
        store.commit([], [Put("a", b"", lease=12345)])
    with pytest.raises(StoreRequestError, match="future revision"):
        store.list("", revision=2**40)


def test_leases(store: Store) -> None:
    lease, ttl = store.grant(1)
    assert ttl == 2, "etcd grants at least 1.5 times its election timeout"
    store.commit([], [Put("a", b"", lease)])
    found = store.get("a")
    assert found is not None
    assert found.lease == lease
    assert 0 < store.time_to_live(lease) <= ttl
    store.revoke(lease)
    store.revoke(lease)
    assert store.get("a") is None
    assert store.time_to_live(lease) <= 0


def test_nobody_listens() -> None:
    with Store(["127.0.0.1:1"], prefix="/x", timeout=0.6) as store:
        with pytest.raises(StoreUnavailable, match=r"etcd 127\.0\.0\.1:1: read 'a': UNAVAIL") as e:
            store.get("a")
        assert not e.value.outcome_unknown
        with pytest.raises(StoreUnavailable) as e:
            store.commit([], [Put("a", b"")])
        assert not e.value.outcome_unknown, "it never left"


def test_a_frozen_etcd_is_a_timeout(etcd: AnyEtcd, own_store: Store) -> None:
    own_store.get("a")
    etcd.freeze()
    with (
        open_store(etcd, timeout=1.0) as fresh,
        pytest.raises(StoreUnavailable),
    ):
        fresh.get("a")
    # Its pings are far between: the deadline comes before one goes unanswered.
    with open_store(etcd, timeout=0.5, keepalive=6.0) as warm:
        etcd.thaw()
        warm.get("a")
        etcd.freeze()
        with pytest.raises(StoreTimeout, match="DEADLINE_EXCEEDED"):
            warm.get("a")


def test_a_closed_store(etcd: AnyEtcd) -> None:
    store = open_store(etcd)
    store.get("a")
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable):
        store.get("a")
