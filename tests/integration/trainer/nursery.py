# SPDX-License-Identifier: Apache-2.0
"""Starts trainers quickly: one process imports torch once, and forks one child per trainer.

The children are what a fresh interpreter would be after its imports: nothing here has threads.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


class Child:
    """A trainer process, which the nursery has forked and reaps."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(reap=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        tick = threading.Event()
        for _ in range(int(timeout / 0.01)):
            code = self.poll()
            if code is not None:
                return code
            tick.wait(0.01)
        raise subprocess.TimeoutExpired([str(self.pid)], timeout)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The forking process, from the outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **order: object) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer: int | None = json.loads(self._process.stdout.readline())
            return answer

    def start(self, script: Path, environment: Mapping[str, str], output: Path) -> Child:
        pid = self.ask(script=str(script), environment=dict(environment), output=str(output))
        assert pid is not None
        return Child(self, pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> None:

    import workerd.shards.client
    import workerd.shards.server
    import workerd.trainer.job  # noqa: F401

    orders = os.dup(0)
    with os.fdopen(orders) as lines:
        for line in lines:
            order = json.loads(line)
            if "reap" in order:
                pid, status = os.waitpid(order["reap"], os.WNOHANG)
                answer = None if pid == 0 else os.waitstatus_to_exitcode(status)
                print(json.dumps(answer), flush=True)
                continue
            pid = os.fork()
            if pid == 0:
                break
            print(json.dumps(pid), flush=True)
        else:
            return
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(order["environment"])
    sys.argv = [order["script"]]
    runpy.run_path(order["script"], run_name="__main__")


if __name__ == "__main__":
    main()
