# SPDX-License-Identifier: Apache-2.0
"""Real processes, found and killed by session and by mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import workerd.supervisor
from workerd.supervisor import sweep
from workerd.supervisor.watcher import EndWatcher

FOLDER = Path(workerd.supervisor.__file__).parent
SLEEP = ["sleep", "600"]


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def mark() -> str:
    return f"TEST_SWEEP={uuid.uuid4().hex}"


def environment(mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**os.environ, name: value}


def test_a_sweep_kills_the_session_and_the_marked_and_nobody_else(
    processes: list[subprocess.Popen[bytes]], mark: str
) -> None:
    marked = subprocess.Popen(SLEEP, env=environment(mark), start_new_session=True)
    unmarked = subprocess.Popen(SLEEP, start_new_session=True)
    other = subprocess.Popen(SLEEP, env=environment(mark + "x"), start_new_session=True)
    processes += [marked, unmarked, other]
    assert sorted(sweep.find({unmarked.pid}, {mark.encode()})) == sorted([marked.pid, unmarked.pid])
    assert sweep.sweep({unmarked.pid}, {mark.encode()}) == []
    assert marked.wait(10) == unmarked.wait(10) == -signal.SIGKILL
    assert other.poll() is None


def test_a_sweep_gives_up_when_told_to(processes: list[subprocess.Popen[bytes]], mark: str) -> None:
    processes.append(subprocess.Popen(SLEEP, env=environment(mark)))
    environ = Path(f"/proc/{processes[0].pid}/environ")
    deadline = time.monotonic() + 60
    # For a moment after its exec a process shows none.
    while mark.encode() not in environ.read_bytes():
        assert time.monotonic() < deadline
    assert sweep.sweep((), {mark.encode()}, lambda: True) == [processes[0].pid]
    assert processes[0].poll() is None


def guardian(mark: str) -> subprocess.Popen[bytes]:
    script = str(FOLDER / "guardian_main.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, str(FOLDER), mark],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def ignores(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) & 1 << number - 1)
    return False


def test_the_guardian_kills_when_its_pipe_ends_and_not_before(
    processes: list[subprocess.Popen[bytes]], mark: str
) -> None:
    by_mark = subprocess.Popen(SLEEP, env=environment(mark))
    by_session = subprocess.Popen(SLEEP, start_new_session=True)
    gone = subprocess.Popen(SLEEP, start_new_session=True)
    guard = guardian(mark)
    processes += [by_mark, by_session, gone, guard]
    assert guard.stdin is not None
    for line in (f"+{by_session.pid}\n", f"+{gone.pid}\n", f"-{gone.pid}\n"):
        guard.stdin.write(line.encode())
    guard.stdin.flush()
    deadline = time.monotonic() + 30
    while not ignores(guard.pid, signal.SIGTERM) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    guard.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(0.5)
    assert by_mark.poll() is by_session.poll() is None
    guard.stdin.close()
    assert guard.wait(30) == 0
    assert by_mark.wait(10) == by_session.wait(10) == -signal.SIGKILL
    assert gone.poll() is None


def run_shim(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    shim = str(FOLDER / "exec_shim.py")
    return subprocess.run(
        [sys.executable, "-I", "-S", shim, str(parent), *command],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_the_shim_becomes_the_command() -> None:
    done = run_shim(os.getpid(), "sh", "-c", "echo $0 $1; exit 7", "a", "b")
    assert (done.returncode, done.stdout) == (7, "a b\n")


def test_the_shim_says_what_it_cannot_run() -> None:
    done = run_shim(os.getpid(), "/no/such")
    assert done.returncode == 127
    assert done.stderr == "workerd: cannot run '/no/such': No such file or directory\n"
    assert run_shim(os.getpid(), "/etc/passwd").returncode == 126


def test_the_shim_ends_when_its_parent_is_gone() -> None:
    done = run_shim(1, "true")
    assert done.returncode == 1
    assert "it ended while it started" in done.stderr


def test_the_shim_hands_signals_on_as_they_were() -> None:
    done = run_shim(os.getpid(), "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & 1 << signal.SIGPIPE - 1
    assert not ignored & 1 << signal.SIGXFSZ - 1


def test_an_end_is_told_once_and_the_child_is_left_to_be_reaped() -> None:
    told: list[str] = []
    event = threading.Event()

    def sink(name: str) -> None:
        told.append(name)
        if len(told) == 2:
            event.set()

    watcher = EndWatcher(sink)
    first = subprocess.Popen(["true"])
    second = subprocess.Popen(SLEEP)
    watcher.watch(first.pid, "first")
    watcher.watch(second.pid, "second")
    second.kill()
    assert event.wait(30)
    watcher.close()
    assert sorted(told) == ["first", "second"]
    assert os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT) is not None
    assert (first.wait(), second.wait()) == (0, -signal.SIGKILL)
