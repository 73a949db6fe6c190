# SPDX-License-Identifier: Apache-2.0
"""All states of small jobs, as far as that ends in minutes; ``make model-check`` does the rest.

No sampling: every interleaving of what leader, nodes and trainers do, with the failures at every
point. Every state and every move is checked; from every state an end must be reachable.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.modelcheck import checks
from tests.modelcheck.explore import Search
from tests.modelcheck.values import Shape


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "failures", "shape"),
    [pytest.param(*one, id=f"{one[0]}, {one[1]}") for one in checks.quick()],
)
def test_all_states(
    name: str, failures: str, shape: Shape, record_property: Callable[[str, object], None]
) -> None:
    result = Search(shape).run()
    record_property("model check", checks.row(name, failures, result))
    assert result.complete
    if len(shape.faults) < 2:
        assert set(result.ends) == {"FINISHED"}
