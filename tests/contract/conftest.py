# SPDX-License-Identifier: Apache-2.0
"""An etcd for each test that breaks it, and one for all tests that do not; real and simulated."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from coordinator.store import Store
from tests.contract.both import AnyEtcd, open_store
from tests.etcd import Etcd
from tests.simulator.clock import Clock
from tests.simulator.etcd import FakeEtcd


@pytest.fixture(params=["real", "simulated"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which etcd a test runs on: each runs on both, unless it is ``only_real``."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[Etcd]:
    """A real etcd that no test may break; use keys below a prefix of your own."""
    with Etcd() as etcd:
        yield etcd


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A store with a prefix of its own on an etcd that the test doesn't break."""
    shared: AnyEtcd = FakeEtcd(Clock())
    if kind == "real":
        shared = request.getfixturevalue("shared_etcd")
    with open_store(shared, f"/test/{uuid.uuid4()}") as store:
        yield store


@pytest.fixture
def etcd(kind: str) -> Iterator[AnyEtcd]:
    """An etcd of the test's own, to kill and to freeze."""
    if kind == "simulated":
        yield FakeEtcd(Clock())
        return
    with Etcd() as etcd:
        yield etcd


@pytest.fixture
def own_store(etcd: AnyEtcd) -> Iterator[Store]:
    """A store on the test's own etcd."""
    with open_store(etcd) as store:
        yield store
