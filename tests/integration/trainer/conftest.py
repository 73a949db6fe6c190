# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer.conductor import Conductor
from tests.integration.trainer.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks trainers."""
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def conduct(tmp_path: Path, nursery: Nursery) -> Iterator[Callable[..., Conductor]]:
    """Makes conductors; whatever they started is gone afterwards."""
    made: list[Conductor] = []

    def make(**environment: Any) -> Conductor:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Conductor(nursery, folder, **environment))
        return made[-1]

    yield make
    for conductor in made:
        conductor.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Callable[..., str]:
    """The digest of a run that nothing happens to, by its environment; run once each."""
    known: dict[tuple[tuple[str, Any], ...], str] = {}

    def digest(size: int = 3, **environment: Any) -> str:
        key = (("size", size), *sorted(environment.items()))
        if key not in known:
            conductor = Conductor(nursery, tmp_path_factory.mktemp("undisturbed"), **environment)
            try:
                conductor.start(size)
                known[key] = conductor.finish()
            finally:
                conductor.close()
        return known[key]

    return digest
