# SPDX-License-Identifier: Apache-2.0
"""What every test of a whole cluster may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.model import JobSpec
from tests.cluster.support import undisturbed


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all test processes of this session."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def reference(common_folder: Path) -> Callable[[JobSpec], list[str]]:
    """The digests of a job to which nothing happens."""
    return lambda job: undisturbed(job, common_folder)
