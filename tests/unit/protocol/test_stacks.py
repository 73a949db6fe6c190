# SPDX-License-Identifier: Apache-2.0
"""The stacks of another process, whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workerd.protocol import stacks

REGISTERED = """
import ctypes, os, sys, threading
from workerd.protocol import stacks
stacks.register(sys.argv[1])
def aside():
    threading.Event().wait()
def deep():
    print(flush=True)
    threading.Event().wait()
threading.Thread(target=aside, daemon=True).start()
deep()
"""
PLAIN = "import threading; print(flush=True); threading.Event().wait()"

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script, and wait for its first line."""
    started: list[subprocess.Popen[bytes]] = []

    def one(script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, str(tmp_path / "page")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def test_all_threads_tell_where_they_are(start: Start, tmp_path: Path) -> None:
    process = start(REGISTERED)
    for _ in range(2):  # anew, each time
        assert stacks.ask(process.pid, tmp_path / "page")
        deadline = time.monotonic() + 30
        while stacks.read(tmp_path / "page").count("File") < 4 and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        said = stacks.read(tmp_path / "page")
        assert said.count(" in deep") == said.count(" in aside") == 1, said
    assert process.poll() is None, "it goes on"


def test_a_process_that_would_be_ended_is_not_asked(start: Start, tmp_path: Path) -> None:
    process = start(PLAIN)
    assert not stacks.ask(process.pid, tmp_path / "page")
    assert process.poll() is None
    assert stacks.read(tmp_path / "page") == ""


def test_the_kernel_tells_of_a_stopped_one(start: Start) -> None:
    process = start(PLAIN)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert ": T" in stacks.threads(process.pid)


def test_nobody_is_there() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert stacks.threads(child.pid) == ""
    assert not stacks.ask(child.pid, "/nowhere/page")
