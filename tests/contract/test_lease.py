# SPDX-License-Identifier: Apache-2.0
"""Leases: kept over outages, lost only when etcd says so, with a deadline that needs no etcd."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from coordinator.store import (
    Lease,
    LeaseDeadlinePassed,
    LeaseEvent,
    LeaseRenewed,
    Put,
    Store,
    StoreUnavailable,
    errors,
)
from coordinator.store.lease import LeaseLost
from tests.contract.both import AnyEtcd, only_real, open_store, time_of
from tests.contract.recorder import Recorder

PAUSE = threading.Event()


def keep(store: Store, ttl: int = 2) -> tuple[Lease, Recorder[LeaseEvent]]:
    recorder: Recorder[LeaseEvent] = Recorder(store)
    return store.lease(ttl, recorder.put), recorder


def test_it_is_renewed_at_about_a_third_of_its_ttl(store: Store) -> None:
    now = time_of(store).now
    before = now()
    lease, events = keep(store, 4)
    assert lease.ttl == 4
    assert before + 4 <= lease.deadline() <= now() + 4
    store.commit([], [Put("nodes/a", b"", lease.id)])
    times = []
    for _ in range(4):
        renewed = events.next(4)
        assert isinstance(renewed, LeaseRenewed)
        assert renewed.lease_id == lease.id
        assert renewed.deadline <= now() + 4, "counted from the sending"
        assert lease.deadline() >= renewed.deadline
        times.append(renewed.deadline)
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert all(1.0 < pause < 3.0 for pause in pauses)
    assert len({round(pause, 4) for pause in pauses}) > 1, "jittered"
    assert store.get("nodes/a") is not None
    lease.close(revoke=True)
    assert store.get("nodes/a") is None
    assert store.time_to_live(lease.id) <= 0


def test_a_revoked_lease_is_lost_once(store: Store) -> None:
    lease, events = keep(store)
    store.revoke(lease.id)
    lost = events.until(LeaseLost, timeout=10)
    assert lost.lease_id == lease.id
    assert f"{lease.id:x}" in lost.reason
    events.nothing_for(2.5)
    lease.close(revoke=True)


def test_it_is_kept_over_a_restart_of_etcd(etcd: AnyEtcd, own_store: Store) -> None:
    lease, events = keep(own_store, 5)
    own_store.commit([], [Put("nodes/a", b"", lease.id)])
    events.until(LeaseRenewed)
    for _ in range(2):
        etcd.restart()
        after = time_of(own_store).now()
        while events.until(LeaseRenewed).deadline < after + 5:
            pass
    assert not any(isinstance(e, LeaseLost) for e in events.seen)
    found = own_store.get("nodes/a")
    assert found is not None
    assert found.lease == lease.id
    lease.close(revoke=False)


def test_the_deadline_passes_once_while_etcd_is_frozen(etcd: AnyEtcd, own_store: Store) -> None:
    lease, events = keep(own_store)
    events.until(LeaseRenewed)
    deadline = lease.deadline()
    etcd.freeze()
    events.until(LeaseDeadlinePassed)
    deadline = lease.deadline()
    assert deadline <= time_of(own_store).now() < deadline + 2
    events.nothing_for(2.0)
    etcd.thaw()
    # etcd slept as well, so by its clock the lease may or may not be over.
    answer = events.next()
    assert isinstance(answer, LeaseLost | LeaseRenewed)
    assert sum(isinstance(e, LeaseDeadlinePassed) for e in events.seen) == 1
    lease.close(revoke=True)


def test_an_outage_is_not_a_loss(etcd: AnyEtcd, own_store: Store) -> None:
    """A restarted etcd gives every lease its full TTL again: it may turn out well."""
    lease, events = keep(own_store)
    events.until(LeaseRenewed)
    for _ in range(2):
        etcd.kill()
        events.until(LeaseDeadlinePassed)
        events.nothing_for(0.5)
        etcd.start()
        renewed = events.next()
        assert isinstance(renewed, LeaseRenewed)
        assert lease.deadline() > time_of(own_store).now()
    assert sum(isinstance(e, LeaseDeadlinePassed) for e in events.seen) == 2
    lease.close(revoke=True)


def test_with_a_new_leader_every_lease_has_its_whole_ttl_again(
    etcd: AnyEtcd, own_store: Store
) -> None:
    lease, ttl = own_store.grant(10)
    time_of(own_store).wait(6.0)
    assert own_store.time_to_live(lease) <= 4
    etcd.restart()
    etcd.await_ready()
    assert 5 < own_store.time_to_live(lease) <= ttl


@only_real
def test_a_lease_is_resumed(store: Store) -> None:
    lease, _ = keep(store, 3)
    store.commit([], [Put("nodes/a", b"", lease.id)])
    lease.close(revoke=False)
    assert store.time_to_live(lease.id) > 0, "it was not revoked"
    PAUSE.wait(1.5)
    recorder: Recorder[LeaseEvent] = Recorder(store)
    resumed = Lease.resume(store, lease.id, 3, recorder.put)
    assert resumed.id == lease.id
    assert resumed.deadline() <= time.monotonic() + 1.6, "what is left, not the whole TTL"
    recorder.until(LeaseRenewed, timeout=1.5)
    PAUSE.wait(2.5)
    assert store.get("nodes/a") is not None
    resumed.close(revoke=True)
    with pytest.raises(errors.LeaseLost, match=f"{lease.id:x} does not exist"):
        Lease.resume(store, lease.id, 3, recorder.put)


def test_no_grant_no_lease() -> None:
    with Store(["127.0.0.1:1"], prefix="/x", timeout=0.3) as store, pytest.raises(StoreUnavailable):
        keep(store)


@only_real
def test_close_does_not_hang_while_etcd_is_frozen(etcd: AnyEtcd) -> None:
    with open_store(etcd, timeout=1.0) as store:
        lease, _ = keep(store)
        etcd.freeze()
        PAUSE.wait(1.0)
        began = time.monotonic()
        lease.close(revoke=True)
        assert time.monotonic() - began < 5
        etcd.thaw()


def test_close_from_the_sink(store: Store) -> None:
    events: Recorder[LeaseEvent] = Recorder(store)

    def sink(event: LeaseEvent) -> None:
        lease.close(revoke=False)
        events.put(event)

    lease = store.lease(2, sink)
    events.next()
    events.nothing_for(1.0)
    lease.close(revoke=True)
