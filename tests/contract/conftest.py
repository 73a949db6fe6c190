# SPDX-License-Identifier: Apache-2.0
"""A real etcd for each test that breaks it, and one for all tests that do not."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from coordinator.store import Store
from tests.etcd import Etcd


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[Etcd]:
    """An etcd that no test may break; use keys below a prefix of your own."""
    with Etcd() as etcd:
        yield etcd


@pytest.fixture
def store(shared_etcd: Etcd) -> Iterator[Store]:
    """A store with a prefix of its own on the shared etcd."""
    with Store(shared_etcd.endpoints, prefix=f"/test/{uuid.uuid4()}", keepalive=1.0) as store:
        yield store


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """An etcd of the test's own, to kill and to freeze."""
    with Etcd() as etcd:
        yield etcd


@pytest.fixture
def own_store(etcd: Etcd) -> Iterator[Store]:
    """A store on the test's own etcd."""
    with Store(etcd.endpoints, prefix="/own", keepalive=1.0) as store:
        yield store
