# SPDX-License-Identifier: Apache-2.0
"""Writes whose answer is lost: never carried out twice, and the caller can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from coordinator.store import (
    Absent,
    GuardFailed,
    Put,
    Store,
    StoreUnavailable,
    Unchanged,
)
from tests.contract.both import AnyEtcd, only_real, open_store
from tests.contract.recorder import full_history
from tests.etcd import Etcd


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Start ``work`` in a thread; the result waits for it and returns or raises what it did."""
    results: list[object] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the waiter
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(timeout=20)
        assert not thread.is_alive()
        if raised:
            raise raised[0]
        return results[0]

    return result


def test_an_answer_that_never_comes_leaves_the_outcome_unknown(etcd: AnyEtcd) -> None:
    with open_store(etcd, timeout=1.0) as store:
        store.commit([], [Put("before", b"")])
        etcd.freeze()
        # At its deadline, or a moment before when the connection's ping isn't answered.
        with pytest.raises(StoreUnavailable) as caught:
            store.commit([Absent("a")], [Put("a", b"mine")])
        assert caught.value.outcome_unknown
        etcd.thaw()
        # etcd read the request from its socket after all. Which of the two it will be cannot be
        # known, but repeating it is safe.
        try:
            store.commit([Absent("a")], [Put("a", b"mine")])
        except GuardFailed as failed:
            current = failed.current["a"]
            assert current is not None
            assert current.value == b"mine"
        found = store.get("a")
        assert found is not None
        assert found.create_revision == found.mod_revision, "it was written once"


@only_real
def test_a_connection_that_breaks_leaves_the_outcome_unknown(etcd: Etcd) -> None:
    with Store(etcd.endpoints, prefix="/own", timeout=10.0, keepalive=20.0) as store:
        first = store.commit([], [Put("a", b"0")])
        etcd.freeze()
        result = in_thread(lambda: store.commit([Unchanged("a", first)], [Put("a", b"1")]))
        threading.Event().wait(0.5)
        etcd.kill()
        etcd.start()
        with pytest.raises(StoreUnavailable) as caught:
            result()
        assert caught.value.outcome_unknown, "sending it again could have answered GuardFailed"


@only_real
def test_a_commit_waits_for_an_etcd_that_comes_back_in_time(etcd: Etcd) -> None:
    with Store(etcd.endpoints, prefix="/own", timeout=20.0) as store:
        store.commit([], [Put("a", b"1")])
        etcd.kill()
        with (
            Store(etcd.endpoints, prefix="/own", timeout=0.5) as probe,
            pytest.raises(StoreUnavailable),
        ):
            probe.get("a")
        # Nobody listens: it is certain that nothing was sent, so it is sent again.
        result = in_thread(lambda: store.commit([Absent("b")], [Put("b", b"2")]))
        etcd.start()
        assert isinstance(result(), int)


@only_real
def test_commits_under_kills_are_carried_out_at_most_once(etcd: Etcd) -> None:
    """Count up with a guard while etcd is killed again and again, then look at the history."""
    stop = threading.Event()
    confirmed: list[int] = []
    unknown = 0

    def count() -> None:
        nonlocal unknown
        value, revision = 0, 0
        with Store(etcd.endpoints, prefix="/own", timeout=5.0) as store:
            while not stop.is_set():
                guard = Unchanged("n", revision) if revision else Absent("n")
                try:
                    revision = store.commit([guard], [Put("n", str(value + 1).encode())])
                    value += 1
                    confirmed.append(value)
                except StoreUnavailable as error:
                    unknown += error.outcome_unknown
                except GuardFailed as failed:
                    # Only this writer writes: so the commit whose answer was lost went through.
                    current = failed.current["n"]
                    assert current is not None
                    assert int(current.value) == value + 1
                    value, revision = value + 1, current.mod_revision

    result = in_thread(count)
    for _ in range(4):
        _await_more(confirmed, 20)
        etcd.restart()
    _await_more(confirmed, 20)
    stop.set()
    result()
    with Store(etcd.endpoints, prefix="/own") as store:
        last = store.get("n")
        assert last is not None
        written = full_history(store, 0, last.mod_revision)
    assert [int(value or b"") for _, _, value in written] == list(range(1, len(written) + 1))
    assert set(confirmed) <= set(range(1, len(written) + 1))


def _await_more(confirmed: list[int], count: int) -> None:
    target = len(confirmed) + count
    waiter = threading.Event()
    for _ in range(2000):
        if len(confirmed) >= target:
            return
        waiter.wait(0.01)
    raise AssertionError(f"only {len(confirmed)} commits were confirmed")
