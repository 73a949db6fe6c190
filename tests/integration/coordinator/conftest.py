# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd
from tests.integration.coordinator.cluster import Cluster

_PREFIXES = itertools.count(1)


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[Etcd]:
    """One that no test stops, and whose history no test cuts."""
    with Etcd() as etcd:
        yield etcd


@pytest.fixture
def cluster(shared_etcd: Etcd, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of its own on the shared etcd."""
    made = Cluster(shared_etcd, f"/test/{next(_PREFIXES)}", tmp_path)
    yield made
    made.close()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose etcd the test may stop or compact."""
    with Etcd() as etcd:
        made = Cluster(etcd, "/test/own", tmp_path)
        yield made
        made.close()
