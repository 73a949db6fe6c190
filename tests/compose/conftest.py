# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/compose/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(900))
            if not os.environ.get("HOTSPARE_TEST_COMPOSE"):
                item.add_marker(pytest.mark.skip(reason="needs docker: make cluster-test runs it"))
