# SPDX-License-Identifier: Apache-2.0
"""Starts trainer processes, ends them, and sees to it that nothing of them is left."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from workerd.protocol import link
from workerd.supervisor import evidence, sweep
from workerd.supervisor.evidence import Ending
from workerd.supervisor.runtime import RuntimeFolder
from workerd.supervisor.watcher import EndWatcher

_log = logging.getLogger(__name__)

WORKERD_VARIABLE: Final = "HOTSPARE_WORKERD"  # marks everything that one workerd has started
_OWN_VARIABLES: Final = "HOTSPARE_"
# Where a script's @record of torch.distributed.elastic leaves what it raised.
_ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
_DEFAULTS: Final = {"PYTHONFAULTHANDLER": "1"}  # a crash leaves Python's stack in stderr
_HERE: Final = Path(__file__).resolve().parent
_GUARDIAN: Final = "guardian"
_CALM: Final = 10.0  # seconds after which a process that can't be killed is worth a warning


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A trainer process has ended; :meth:`Supervisor.ended` tells how."""

    instance: str


@dataclass(frozen=True, slots=True)
class ProcessCleared:
    """Nothing that the trainer had started is left: call :meth:`Supervisor.reap`."""

    instance: str


@dataclass(frozen=True, slots=True)
class GuardianEnded:
    """The guardian is gone: call :meth:`Supervisor.guard`."""


ProcessEvent: TypeAlias = ProcessEnded | ProcessCleared | GuardianEnded


@dataclass(frozen=True, slots=True)
class _Child:
    """One trainer process that has not been reaped."""

    process: subprocess.Popen[bytes]
    directory: str  # that it was started in; empty for workerd's own
    oom_kills: int  # of this host, when it was started


class SpawnError(Exception):
    """A trainer could not be started; the text says why."""


class Supervisor:
    """The processes of this node's trainers.

    Its methods are for the main thread alone: a trainer dies with the thread that started it.
    ``sink`` is called on other threads. Raises OSError if the guardian can't be started.
    """

    def __init__(
        self, folder: RuntimeFolder, mark: str, sink: Callable[[ProcessEvent], None]
    ) -> None:
        self._folder = folder
        self._mark = mark
        self._sink = sink
        self._children: dict[str, _Child] = {}
        self._pids: set[int] = set()
        self._closing = threading.Event()
        self._sweeps: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._watcher = EndWatcher(self._process_ended)
        self._sweeper = threading.Thread(target=self._sweep, name="sweeper", daemon=True)
        self._sweeper.start()
        self._guardian: subprocess.Popen[bytes] | None = None
        self.guard()

    def guard(self) -> None:
        """Start the guardian, again if it has ended. Raises OSError."""
        if self._guardian is not None:
            _log.warning("the guardian has ended (%s): another one starts", self._guardian.wait())
            assert self._guardian.stdin is not None
            with contextlib.suppress(OSError):  # what was still in the pipe is lost with it
                self._guardian.stdin.close()
        self._guardian = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(_HERE / "guardian_main.py"),
                str(_HERE),
                f"{WORKERD_VARIABLE}={self._mark}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
        self._watcher.watch(self._guardian.pid, _GUARDIAN)
        for pid in self._pids:
            self._tell(f"+{pid}\n")

    def start(
        self,
        instance: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        working_directory: str,
    ) -> int:
        """Start a trainer in the folder made for it, and return its process id.

        It gets workerd's environment without workerd's own variables, the job's, and what it
        needs to meet workerd. Raises :class:`SpawnError`.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)
        }
        own = {
            link.SOCKET_VARIABLE: str(self._folder.socket),
            link.INSTANCE_VARIABLE: instance,
            link.PAGE_VARIABLE: str(self._folder.page(instance)),
            WORKERD_VARIABLE: self._mark,
            _ERROR_FILE_VARIABLE: str(self._folder.error_file(instance)),
        }
        shim = [sys.executable, "-I", "-S", str(_HERE / "exec_shim.py"), str(os.getpid())]
        try:
            with (
                self._folder.output(instance, "stdout").open("wb") as out,
                self._folder.output(instance, "stderr").open("wb") as err,
            ):
                child = subprocess.Popen(
                    [*shim, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=working_directory or None,
                    env={**_DEFAULTS, **inherited, **environment, **own},
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            raise SpawnError(f"cannot start {command[0]!r}: {error}") from error
        self._children[instance] = _Child(child, working_directory, evidence.oom_kills())
        self._pids.add(child.pid)
        self._tell(f"+{child.pid}\n")
        self._watcher.watch(child.pid, instance)
        return child.pid

    def terminate(self, instance: str) -> None:
        """SIGTERM to the trainer itself: what it has started is its own business for now."""
        self._signal(instance, signal.SIGTERM)

    def kill(self, instance: str) -> None:
        """SIGKILL to the trainer's process group; what else it has started follows its end."""
        child = self._children.get(instance)
        if child is not None:
            # Not reaped yet, so the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def pid(self, instance: str) -> int | None:
        """The process of a trainer that has not been reaped."""
        child = self._children.get(instance)
        return None if child is None else child.process.pid

    def ended(self, instance: str) -> Ending:
        """How a trainer has ended, after :class:`ProcessEnded`. The rest of it is killed."""
        child = self._children[instance]
        self.kill(instance)
        # It stays a zombie until nothing of it is left: so its session's number isn't given to
        # another process while that session is being swept.
        pid = child.process.pid
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._sweeps.put((instance, pid))
        assert result is not None  # only with WNOHANG
        exited = result.si_code == os.CLD_EXITED
        return Ending(
            code=result.si_status if exited else 0,
            signal=0 if exited else result.si_status,
            core=evidence.core(pid, child.directory) if result.si_code == os.CLD_DUMPED else "",
            stderr=self._folder.last_words(instance),
            error_file=evidence.error_file(self._folder.error_file(instance)),
            oom_kills=evidence.oom_kills() - child.oom_kills,
        )

    def reap(self, instance: str) -> None:
        """After :class:`ProcessCleared`: the process's number may be used again."""
        child = self._children.pop(instance).process
        child.wait()
        self._pids.discard(child.pid)
        self._tell(f"-{child.pid}\n")
        self._folder.retire(instance)

    def close(self) -> None:
        """Kill what still runs, and end the guardian and the threads."""
        self._closing.set()
        for instance in list(self._children):
            self.kill(instance)
        self._watcher.close()
        self._sweeps.put(None)
        self._sweeper.join()
        for child in self._children.values():
            child.process.wait()
        if self._guardian is not None and self._guardian.stdin is not None:
            with contextlib.suppress(OSError):
                self._guardian.stdin.close()
            try:
                self._guardian.wait(timeout=_CALM)
            except subprocess.TimeoutExpired:
                _log.warning("the guardian has not ended; it still tries to kill trainers")

    def _signal(self, instance: str, number: int) -> None:
        child = self._children.get(instance)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process.pid, number)

    def _tell(self, line: str) -> None:
        if self._guardian is None or self._guardian.stdin is None:
            return
        # If it has ended, its end is on the way as an event, and the next one is told all.
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(line.encode())

    # ---- other threads

    def _process_ended(self, name: str) -> None:
        self._sink(GuardianEnded() if name == _GUARDIAN else ProcessEnded(name))

    def _sweep(self) -> None:
        while (item := self._sweeps.get()) is not None:
            instance, session = item
            mark = f"{link.INSTANCE_VARIABLE}={instance}".encode()
            left = sweep.sweep({session}, {mark}, _after(_CALM))
            if left:
                _log.warning("trainer %s: processes %s of it can't be killed", instance, left)
                sweep.sweep({session}, {mark}, self._closing.is_set)
            self._sink(ProcessCleared(instance))


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since now."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until
