# SPDX-License-Identifier: Apache-2.0
"""Whatever is opened is given back: threads and descriptors, with etcd there and away."""

from __future__ import annotations

import gc
import os
import threading
import time

from coordinator.store import Election, Lease, Store, Watch
from tests.contract.both import AnyEtcd, only_real
from tests.contract.recorder import Recorder
from tests.etcd import Etcd


def count() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def settled(limit: tuple[int, int], timeout: float = 15.0) -> tuple[int, int]:
    """The counts once they are within ``limit``, or after the timeout: gRPC ends some late."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        gc.collect()
        now = count()
        if (now[0] <= limit[0] and now[1] <= limit[1]) or time.monotonic() > deadline:
            return now
        pause.wait(0.1)


def use(store: Store, name: str) -> None:
    events: Recorder[object] = Recorder(store)
    watches = [Watch(store, ["a/", f"b/{name}"], events.put) for _ in range(2)]
    for watch in watches:
        watch.start()
    lease = Lease(store, 5, events.put)
    election = Election(store, name, b"", lease, events.put)
    election.start()
    events.next()
    for watch in watches:
        watch.close()
    election.resign()
    lease.close(revoke=True)


@only_real
def test_many_times_over(shared_etcd: Etcd, store: Store) -> None:
    use(store, "warm-up")
    with Store(shared_etcd.endpoints, prefix="/leaks") as other:
        use(other, "warm-up")
    before = settled((0, 0), timeout=1.0)
    for number in range(15):
        use(store, f"c{number}")
        with Store(shared_etcd.endpoints, prefix="/leaks") as other:
            use(other, f"c{number}")
    limit = (before[0] + 1, before[1] + 3)
    after = settled(limit)
    assert after[0] <= limit[0], [t.name for t in threading.enumerate()]
    assert after[1] <= limit[1]


@only_real
def test_over_reconnects(etcd: AnyEtcd, own_store: Store) -> None:
    events: Recorder[object] = Recorder(own_store)
    watch = Watch(own_store, ["a/", "b/"], events.put)
    watch.start()
    lease = Lease(own_store, 5, events.put)
    etcd.restart()
    own_store.get("x")
    before = settled((0, 0), timeout=1.5)
    for _ in range(4):
        etcd.restart()
        own_store.get("x")
    etcd.kill()
    threading.Event().wait(3.0)
    etcd.start()
    etcd.await_ready()
    own_store.get("x")
    limit = (before[0] + 1, before[1] + 3)
    after = settled(limit)
    assert after[0] <= limit[0], [t.name for t in threading.enumerate()]
    assert after[1] <= limit[1]
    watch.close()
    lease.close(revoke=True)
