# SPDX-License-Identifier: Apache-2.0
"""Processes that never outlive the one that started them, and what /proc tells about others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

# The parent-death signal must be asked for in the child, after the fork and before the program. A
# preexec_fn would run Python, and gRPC's handlers, in a fork of a process with threads: children
# were seen to hang there. So a small program does it.
# The parent may have gone before the request: then no signal would ever come. And it defers its own
# signals while it starts one, so that none comes between the start and its knowing of it.
_SHIM = (
    "import ctypes,os,signal,sys;"
    "signal.pthread_sigmask(signal.SIG_SETMASK,());"
    "ctypes.CDLL(None).prctl(1,9);"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


def tied(command: Sequence[str]) -> list[str]:
    """The command, as one that the kernel ends with the thread that starts it."""
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]


class ClusterError(Exception):
    """A process of the cluster ended, or a condition did not come in time."""


class Process:
    """A child process that the kernel kills when this process ends, however it ends.

    Start it from a thread that lives as long as it does: the kernel watches that thread. Its
    output goes to ``log``; it leads a session of its own, so that Ctrl-C reaches only the parent.
    Raises OSError if it can't be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=cwd,
                env={**_inherited(), **(environment or {})},
                start_new_session=True,
            )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        assert self._popen.stdout is not None
        self._pump = threading.Thread(
            target=self._copy, args=(self._popen.stdout,), name=f"{name}-output", daemon=True
        )
        self._pump.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def _copy(self, output: BinaryIO) -> None:
        with self.log.open("ab") as log, output:
            for line in output:
                log.write(line)
                log.flush()
                with self._changed:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_line(self, text: str, timeout: float) -> str:
        """The first line of its standard output that contains ``text``, within seconds.

        Raises :class:`ClusterError` if it ends without one, or none comes in time.
        """

        def found() -> str | None:
            return next((line for line in self._lines if text in line), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._ended, timeout)
            line = found()
        if line is None:
            raise ClusterError(
                f"{self.name} has not said {text!r}; its log ends:\n{tail(self.log)}"
            )
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        self._popen.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within seconds; it is reaped then."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._pump.join(timeout)
        return True

    def kill(self) -> None:
        """End it and everything that it has started, at once, with SIGKILL."""
        kill_all(tree(self.pid))
        self.wait(10.0)


def _inherited() -> dict[str, str]:
    """This process's environment, less what would configure another cluster's daemons."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOTSPARE_", "ETCD_", "ETCDCTL_"))
    }


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log; empty when there is none."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def tree(pid: int) -> list[int]:
    """A process and all of its living descendants, parents first."""
    found = [pid]
    for one in found:
        found.extend(children(one))
    return found


def children(pid: int) -> Iterator[int]:
    """The living children of a process; none when it is gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            yield from (int(one) for one in text.split() if is_running(int(one)))


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (one.partition(b"=") for one in raw.split(b"\0") if one)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def running_with(text: str) -> list[int]:
    """The running processes whose command line or environment contains ``text``.

    This process is left out.
    """
    wanted = os.fsencode(text)
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            folder = Path("/proc", name)
            said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            if wanted in said and is_running(int(name)):
                found.append(int(name))
    return found


@contextlib.contextmanager
def _opened(pids: Iterable[int]) -> Iterator[list[int]]:
    """Descriptors of the processes that still exist."""
    descriptors = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
        yield descriptors
    finally:
        for one in descriptors:
            os.close(one)


def _await(descriptors: list[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for one in descriptors:
        select.select([one], [], [], max(0.0, deadline - time.monotonic()))


def kill_all(pids: Iterable[int], timeout: float = 10.0) -> None:
    """SIGKILL processes at once and wait, at most ``timeout`` seconds, until they have ended."""
    with _opened(pids) as descriptors:
        for one in descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one, signal.SIGKILL)
        _await(descriptors, timeout)


def wait_ended(pids: Iterable[int], timeout: float = 10.0) -> None:
    """Wait, at most ``timeout`` seconds, until processes have ended by themselves."""
    with _opened(pids) as descriptors:
        _await(descriptors, timeout)


def reap(pids: Iterable[int]) -> None:
    """Reap those of the ended processes that have become this process's children."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Adopt the orphans of this process's descendants meanwhile.

    A killed workerd leaves its trainers behind as zombies of process 1, which in many a container
    reaps nobody.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Let the signals that end this process wait for the end of the context.

    A process that is started inside of it inherits that, unless it is :func:`tied`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let the first signal that ends this process raise KeyboardInterrupt in the main thread.

    What comes after the first is ignored: it would cut the cleaning-up short.
    """
    fired = False

    def handle(number: int, frame: object) -> None:
        nonlocal fired
        if not fired:
            fired = True
            raise KeyboardInterrupt(signal.Signals(number).name)

    before = {one: signal.signal(one, handle) for one in _ENDING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
