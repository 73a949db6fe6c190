# SPDX-License-Identifier: Apache-2.0
"""The examples stay what they are for: short, alike, and large enough to be real."""

from __future__ import annotations

import difflib
import runpy

from coordinator.cli import demo


def _lines(name: str) -> list[str]:
    """A script's lines of code, without indentation: a block more is no other code."""
    text = (demo.examples() / name).read_text()
    code = text.partition('"""\n')[2]
    return [line.strip() for line in code.splitlines() if line.strip()]


def test_the_script_with_hotspare_differs_in_about_ten_lines() -> None:
    plain, hot = _lines("train_gpt_plain.py"), _lines("train_gpt.py")
    changed = [line for line in difflib.ndiff(plain, hot) if line[0] in "+-"]
    assert sum(line[0] == "+" for line in changed) <= 10, changed
    assert len(hot) <= len(plain)
    assert len(hot) <= 40


def test_the_script_of_a_sharded_replica_fits_one_screen() -> None:
    assert len(_lines("fsdp.py")) <= 30


def test_the_model_is_as_large_as_it_says_and_the_text_always_the_same() -> None:
    gpt = runpy.run_path(str(demo.examples() / "gpt.py"))
    parameters = sum(one.numel() for one in gpt["GPT"]().parameters())
    assert 5_000_000 <= parameters <= 6_000_000
    one, two = gpt["Corpus"](12), gpt["Corpus"](12)
    assert one.batch(3, 1, 3).tolist() == two.batch(3, 1, 3).tolist()
    parts = [row for rank in range(3) for row in one.batch(3, rank, 3).tolist()]
    assert sorted(parts) == sorted(one.batch(3, 0, 1).tolist())


def test_the_job_file_is_valid() -> None:
    spec = demo.job()
    assert spec.replicas == 3
    assert spec.spares == 1
