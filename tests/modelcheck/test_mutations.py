# SPDX-License-Identifier: Apache-2.0
"""The model check bites: with a rule of the protocol dropped, it finds what goes wrong."""

from __future__ import annotations

import pytest

from tests.modelcheck.explore import Search
from tests.modelcheck.mutations import MUTATIONS, Mutation
from tests.modelcheck.values import Violation


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_dropped_rule_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.patch(monkeypatch)
    with pytest.raises(Violation, match=mutation.says):
        Search(mutation.shape).run()
