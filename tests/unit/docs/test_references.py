# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_and_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)", text):
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), name
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:\w+/)+\w+\.py)\b", text):
        assert (ROOT / path).exists(), path
