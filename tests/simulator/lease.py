# SPDX-License-Identifier: Apache-2.0
"""A lease of the simulated etcd that is kept alive."""

from __future__ import annotations

import math
from collections.abc import Callable

from coordinator.store import (
    Lease,
    LeaseDeadlinePassed,
    LeaseEvent,
    LeaseRenewed,
    StoreUnavailable,
)
from coordinator.store.lease import LeaseLost
from tests.simulator.clock import Due
from tests.simulator.store import FakeStore


class FakeLease(Lease):
    """Renewed at about a third of its TTL, as the real one.

    Where etcd is *quiet*, renewals that change nothing take place without an event: who has
    thousands of nodes for a day can't look at each. When the connection breaks, or the process
    ends, the time of the last renewal is drawn; everything that follows from it is the same.
    """

    def __init__(self, store: FakeStore, ttl: float, sink: Callable[[LeaseEvent], None]) -> None:
        # Not the real one's: that one makes a thread.
        self._fake = store
        self._tell = sink
        lease_id, granted = store.grant(ttl)
        self._id, self._ttl = lease_id, granted
        self._granted = store.clock.now()
        self._deadline = self._granted + granted
        self._passed = False
        self._over = False
        self._next_due: Due | None = None
        self._kept = False
        store.streams[self] = None
        if store.etcd.quiet:
            self._keep()
        else:
            self._next_due = store.clock.after(self._pause(), self._renew)
        store.clock.at(self._deadline, self._look)

    def deadline(self) -> float:
        if self._kept:
            return self._fake.clock.now() + self._ttl - self._ttl / 3
        return self._deadline

    def close(self, revoke: bool) -> None:
        self._end()
        if revoke:
            try:
                self._fake.revoke(self._id)
            except StoreUnavailable:
                return  # the TTL does the same, later

    def _end(self) -> None:
        self._leave()
        self._over = True
        if self._next_due is not None:
            self._next_due.cancel()
        self._fake.streams.pop(self, None)

    def _is_over(self) -> bool:
        return self._over

    def _pause(self) -> float:
        return self._ttl / 3 * (1 - 0.2 * self._fake.etcd.random.random())

    # ---- renewals

    def _renew(self) -> None:
        self._next_due = None
        if self._over:
            return
        if not self._fake.reachable:
            self._next_due = self._fake.clock.after(
                self._fake.etcd.random.uniform(0.5, 1.0), self._renew
            )
            return
        ttl = self._fake.etcd.lessor.renew(self._id)
        if ttl <= 0:
            self._lost()
            return
        self._deadline = self._fake.clock.now() + ttl
        quiet = self._fake.etcd.quiet
        told, self._passed = self._passed, False
        if not quiet or told:
            self._tell(LeaseRenewed(self._id, self._deadline))
        if self._is_over():
            return
        if quiet:
            self._keep()
        else:
            self._next_due = self._fake.clock.after(self._pause(), self._renew)
        self._fake.clock.at(self._deadline, self._look)

    def _lost(self) -> None:
        self._end()
        self._tell(LeaseLost(self._id, f"etcd has no lease {self._id:x}: it ended or was revoked"))

    def _look(self) -> None:
        """Whether the deadline has passed."""
        if self._over or self._passed or self._kept or self._fake.clock.now() < self._deadline:
            return
        self._passed = True
        self._tell(LeaseDeadlinePassed(self._id))

    # ---- without a call for each

    def _keep(self) -> None:
        self._kept = self._fake.etcd.lessor.keep(self._id, self) > 0

    def _leave(self) -> None:
        if not self._kept:
            return
        self._kept = False
        now = self._fake.clock.now()
        renewed = now - self._fake.etcd.random.random() * self._ttl / 3
        self._deadline = max(renewed, self._granted) + self._ttl
        self._fake.etcd.lessor.leave(self._id, self._deadline)
        self._fake.clock.at(self._deadline, self._look)

    def revoked(self) -> None:
        """The next renewal will show it."""
        self._kept = False
        self._deadline = math.inf
        wait = self._fake.etcd.random.random() * self._ttl / 3
        self._next_due = self._fake.clock.after(wait, self._renew)

    def lost(self, reason: str, after: float) -> None:
        """etcd can't be reached: the deadline will tell."""
        self._leave()

    def found(self) -> None:
        """It can again: renew at once."""
        if self._next_due is not None:
            self._next_due.cancel()
        self._renew()
