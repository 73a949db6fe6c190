# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(
                    pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() says no")
                )
