# SPDX-License-Identifier: Apache-2.0
"""``hotspare demo``, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cli.localcluster.processes import running_with, subreaper

pytestmark = pytest.mark.timeout(400)

END = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the demo makes its temporary folder."""
    yield tmp_path
    _wait_for_nothing(str(tmp_path))


def _start(folder: Path, out: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from coordinator.cli import demo; sys.exit(demo.run())",
        ],
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def _wait_for_nothing(text: str, timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while running_with(text):
        assert time.monotonic() < deadline, running_with(text)
        threading.Event().wait(0.02)


def _wait_line(demo: subprocess.Popen[str], start: str) -> list[str]:
    assert demo.stdout is not None
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if line.startswith(start):
            return lines
    pytest.fail(f"the demo has ended without a line {start!r}:\n{''.join(lines)}")


def test_the_demo_ends_with_identical_weights(folder: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    with _start(folder) as demo:
        said, _ = demo.communicate(timeout=END)
    assert demo.returncode == 0, said
    lines = said.splitlines()
    assert lines[-1] == "weights identical: yes"
    for phase in ("detected", "paused", "pulled", "regrouped", "first step"):
        assert any(line.strip().startswith(phase) for line in lines), said
    assert running_with(str(folder)) == []
    assert list(folder.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "step"])
def test_an_interrupted_demo_leaves_nothing(
    folder: Path, ending: signal.Signals, when: str
) -> None:
    with _start(folder) as demo:
        _wait_line(demo, when)
        demo.send_signal(ending)
        said, _ = demo.communicate(timeout=60.0)
    assert demo.returncode == 130, said
    assert running_with(str(folder)) == []
    assert list(folder.iterdir()) == []


def test_a_killed_demo_leaves_no_process(folder: Path) -> None:
    with subreaper():
        with _start(folder) as demo:
            _wait_line(demo, "step")
            demo.kill()
        _wait_for_nothing(str(folder))
        while _reaped():
            pass


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False
