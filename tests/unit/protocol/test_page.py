# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import membership_pb2
from workerd.protocol.page import (
    MAX_GENERATION,
    MAX_STEP,
    PAGE_BYTES,
    PageError,
    ProgressPage,
    StepPhase,
    pack,
)


def test_phases_are_those_of_the_record() -> None:
    assert {p.name: p.value for p in StepPhase} == dict(membership_pb2.StepPhase.items())


def test_a_new_page_is_empty_and_private(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    page = ProgressPage.create(tmp_path / "page")
    view = page.read()
    assert (view.generation, view.step, view.phase) == (0, -1, StepPhase.EMPTY)
    assert before <= view.changed_ns <= time.monotonic_ns()
    assert stat.S_IMODE((tmp_path / "page").stat().st_mode) == 0o600
    assert (tmp_path / "page").stat().st_size == PAGE_BYTES
    page.close()


def test_both_ends_see_each_other(tmp_path: Path) -> None:
    workerd = ProgressPage.create(tmp_path / "page")
    trainer = ProgressPage.open(tmp_path / "page")
    first = workerd.read()
    trainer.write(3, 41, StepPhase.PREPARED)
    view = workerd.read()
    assert (view.generation, view.step, view.phase) == (3, 41, StepPhase.PREPARED)
    assert view.changed_ns > first.changed_ns
    workerd.beat()
    assert trainer.read().heartbeat_ns > first.heartbeat_ns
    assert trainer.read().changed_ns == view.changed_ns
    trainer.wait(2)
    trainer.excuse(7)
    later = workerd.read()
    assert (later.waiting, later.excused_ns) == (2, 7)
    assert later.changed_ns > view.changed_ns
    assert (later.generation, later.step, later.phase) == (3, 41, StepPhase.PREPARED)
    trainer.close()
    workerd.close()


@given(
    generation=st.integers(0, MAX_GENERATION),
    step=st.integers(-1, MAX_STEP),
    phase=st.sampled_from(StepPhase),
)
def test_every_value_comes_back(
    tmp_path_factory: pytest.TempPathFactory, generation: int, step: int, phase: StepPhase
) -> None:
    page = ProgressPage.create(tmp_path_factory.mktemp("pages") / "page")
    page.write(generation, step, phase)
    view = page.read()
    assert (view.generation, view.step, view.phase) == (generation, step, phase)
    page.close()


@pytest.mark.parametrize(
    ("generation", "step"), [(-1, 0), (MAX_GENERATION + 1, 0), (1, -2), (1, MAX_STEP + 1)]
)
def test_what_does_not_fit_is_refused(generation: int, step: int) -> None:
    with pytest.raises(PageError, match="do not fit"):
        pack(generation, step, StepPhase.COMPUTING)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "other").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(PageError, match="not 64 bytes"):
        ProgressPage.open(tmp_path / "short")
    with pytest.raises(PageError, match="of this version"):
        ProgressPage.open(tmp_path / "other")
    ProgressPage.create(tmp_path / "page").close()
    with pytest.raises(FileExistsError):
        ProgressPage.create(tmp_path / "page")
