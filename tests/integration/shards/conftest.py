# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.integration.shards.support import Process
from workerd.shards.server import ShardServer


@pytest.fixture
def server() -> Iterator[ShardServer]:
    made = ShardServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def processes() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(*arguments: int) -> Process:
        made.append(Process(*arguments))
        return made[-1]

    yield make
    for process in made:
        process.close()
