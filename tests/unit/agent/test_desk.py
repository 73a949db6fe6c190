# SPDX-License-Identifier: Apache-2.0
"""Whether the lease is minded, which is what the service manager's watchdog goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from coordinator.model import Node
from coordinator.store import Lease, LeaseDeadlinePassed, LeaseRenewed, Store
from workerd.agent.desk import REGISTER, Desk
from workerd.agent.errands import ErrandDone, Errands
from workerd.agent.registration import Registered


class FakeLease:
    id = 7
    until = 105.0

    def deadline(self) -> float:
        return self.until


class NoErrands:
    def __init__(self, name: str, sink: Callable[[ErrandDone], None]) -> None:
        pass

    def submit(self, kind: str, run: Callable[[], object]) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.lease = FakeLease()
        self.desk = Desk(
            cast(Store, None),
            "n0",
            5.0,
            lambda event: None,
            errands=cast(Callable[[str, Callable[[ErrandDone], None]], Errands], NoErrands),
            clock=lambda: self.now,
        )

    def register(self) -> None:
        outcome = Registered(cast(Lease, self.lease), 1, Node(node="n0"))
        self.desk.errand(ErrandDone(REGISTER, outcome, None))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_lease_renewed_in_time_is(bench: Bench) -> None:
    assert bench.desk.minded  # none yet: it is being registered
    bench.register()
    bench.now = 104.9
    assert bench.desk.minded
    bench.lease.until = 110.0
    bench.now = 109.0
    assert bench.desk.minded


def test_one_whose_renewals_cease_without_a_word_is_not(bench: Bench) -> None:
    bench.register()
    bench.now = 105.0
    assert not bench.desk.minded


def test_one_that_is_known_to_be_overdue_is(bench: Bench) -> None:
    bench.register()
    bench.now = 105.0
    bench.desk.lease(LeaseDeadlinePassed(FakeLease.id))
    bench.now = 1000.0
    assert bench.desk.minded
    bench.desk.lease(LeaseRenewed(FakeLease.id, 1001.0))
    assert not bench.desk.minded  # renewed, and then silent again
