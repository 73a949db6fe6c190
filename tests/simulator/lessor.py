# SPDX-License-Identifier: Apache-2.0
"""The leases of the simulated etcd: who renews them, when they are over, how fast they go."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulator.clock import Clock, Due

MIN_TTL = 2
"""Seconds: etcd's one and a half election timeouts, rounded up."""
LOOK = 0.5
"""Seconds between two looks for leases that are over."""
AT_ONCE = 500
"""Leases that are revoked in one look: 1,000 a second."""


class Keeper(Protocol):
    """Who keeps a lease alive without a call for each renewal."""

    def revoked(self) -> None:
        """The lease was ended under it."""


@dataclass(slots=True)
class Granted:
    """A lease as etcd has it."""

    id: int
    ttl: int
    expires: float
    keeper: Keeper | None = None
    keys: set[str] = field(default_factory=set)


class Lessor:
    """Calls ``end`` with the keys of each lease that has ended."""

    def __init__(
        self, clock: Clock, dice: random.Random, end: Callable[[set[str]], object]
    ) -> None:
        self.leases: dict[int, Granted] = {}
        self.expired = 0
        """Leases that nobody has renewed in time."""
        self._clock = clock
        self._dice = dice
        self._end = end
        self._expiries: list[tuple[float, int]] = []
        self._look_at = math.inf
        self._look_due: Due | None = None

    def grant(self, ttl: float) -> Granted:
        """A new lease."""
        given = max(MIN_TTL, math.ceil(ttl))
        lease = Granted(self._dice.getrandbits(62) | 1, given, self._clock.now() + given)
        self.leases[lease.id] = lease
        self._await_end(lease)
        return lease

    def renew(self, lease_id: int) -> int:
        """The TTL of a lease that lives on; 0 when there is none."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return 0
        lease.expires = self._clock.now() + lease.ttl
        self._await_end(lease)
        return lease.ttl

    def keep(self, lease_id: int, keeper: Keeper) -> int:
        """Renew it until :meth:`leave`; the TTL, 0 when there is no such lease."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return 0
        lease.keeper, lease.expires = keeper, math.inf
        return lease.ttl

    def leave(self, lease_id: int, expires: float) -> None:
        """Nobody renews it any more; it was last renewed a TTL before ``expires``."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            lease.keeper, lease.expires = None, expires
            self._await_end(lease)

    def revoke(self, lease_id: int) -> bool:
        """End a lease, with its keys; whether there was one."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self._end(lease.keys)
        if lease.keeper is not None:
            lease.keeper.revoked()
        return True

    # ---- while etcd is away

    def stop(self) -> None:
        """Nothing ends while etcd is away."""
        if self._look_due is not None:
            self._look_due.cancel()
        self._look_due, self._look_at = None, math.inf

    def go_on(self, *, anew: bool) -> None:
        """It is back; ``anew``: with another leader, so that every lease has its whole TTL."""
        if anew:
            for lease in self.leases.values():
                lease.expires = self._clock.now() + lease.ttl
                heapq.heappush(self._expiries, (lease.expires, lease.id))
        self._plan()

    # ---- the end of leases

    def _await_end(self, lease: Granted) -> None:
        heapq.heappush(self._expiries, (lease.expires, lease.id))
        self._plan()

    def _plan(self) -> None:
        if not self._expiries:
            return
        first = max(self._expiries[0][0], self._clock.now())
        at = (math.floor(first / LOOK) + 1) * LOOK
        if at < self._look_at:
            self.stop()
            self._look_at = at
            self._look_due = self._clock.at(at, self._look)

    def _look(self) -> None:
        self._look_due, self._look_at = None, math.inf
        now, ended = self._clock.now(), 0
        while self._expiries and self._expiries[0][0] <= now and ended < AT_ONCE:
            expires, lease_id = heapq.heappop(self._expiries)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.expires == expires:
                self.expired += 1
                self.revoke(lease_id)
                ended += 1
        self._plan()
