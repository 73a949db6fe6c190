# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.store import Store
from tests.etcd import Etcd
from tests.integration.workerd.support import Leader, Workerd


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


@pytest.fixture
def prefix() -> str:
    return f"/hotspare/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def store(etcd: Etcd, prefix: str) -> Iterator[Store]:
    with Store(etcd.endpoints, prefix=prefix) as opened:
        yield opened


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short: a Unix socket's path has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="hs-") as made:
        yield Path(made)


@pytest.fixture
def workerd(etcd: Etcd, prefix: str, folder: Path) -> Iterator[Callable[..., Workerd]]:
    started: list[Workerd] = []

    def start(node: str, *options: str, ttl: float = 5.0, name: str = "") -> Workerd:
        one = Workerd(etcd.endpoints[0], prefix, node, folder / (name or node), *options, ttl=ttl)
        started.append(one)
        return one

    yield start
    for one in started:
        one.close()
        print(f"---- {one.node}\n{one.logged()}")


@pytest.fixture
def leader(store: Store, folder: Path) -> Callable[..., Leader]:
    def make(job: str = "j", **spec: object) -> Leader:
        return Leader(store, job, folder, **spec)

    return make
