# SPDX-License-Identifier: Apache-2.0
"""Sources in processes of their own, and a bad network before them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protos import membership_pb2
from workerd.shards.client import PullResult, pull
from workerd.shards.errors import ShardError
from workerd.shards.state import TrackedState
from workerd.shards.stream import Listener
from workerd.shards.wire import ShardIdentity

WAIT = 60.0
"""Seconds after which something is taken never to happen."""
# About 13 MB in 150 tensors: several messages, and tensors that share one.
MEDIUM = (256, 16)
# About 51 MB: more than all sockets between a source and its receiver hold.
LARGE = (512, 16)


def build(seed: int, width: int = 64, layers: int = 6, steps: int = 0) -> TrackedState:
    """A model, its optimizer and what goes with them, after some steps."""
    torch.manual_seed(seed)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.BatchNorm1d(width)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
    for _ in range(steps):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return TrackedState({"model": model, "optimizer": optimizer, "scheduler": scheduler})


def identity(generation: int = 1, **changes: Any) -> ShardIdentity:
    values: dict[str, Any] = {
        "job": "job",
        "generation": generation,
        "step": 2,
        "shard_position": 0,
        "instance": "source",
        "nonce": "nonce",
        **changes,
    }
    return ShardIdentity(**values)


def source(address: str, node: str = "node", **changes: Any) -> membership_pb2.Source:
    return membership_pb2.Source(
        **{"node": node, "instance": "source", "address": address, **changes}
    )


def receive(
    state: TrackedState,
    *sources: membership_pb2.Source,
    timeout: float = WAIT,
    stop: threading.Event | None = None,
    **changes: Any,
) -> PullResult:
    wanted: dict[str, Any] = {
        "host": "127.0.0.1",
        "job": "job",
        "generation": 1,
        "step": 2,
        "shard_position": 0,
        "nonce": "nonce",
        **changes,
    }
    return pull(sources, state, timeout=timeout, stop=stop or threading.Event(), **wanted)


def memory(line: str) -> int:
    """Bytes of this process, by the name that /proc/self/status has for it."""
    for entry in Path("/proc/self/status").read_text().splitlines():
        if entry.startswith(f"{line}:"):
            return int(entry.split()[1]) * 1024
    raise LookupError(line)


def reset_peak() -> int:
    """Forget the peak of resident memory; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


class Process:
    """A source in a process of its own, which does what `ask` says."""

    def __init__(self, *arguments: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.shards.source", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        self.pid = self._process.pid
        self.address: str = self.ask("address")

    def ask(self, *words: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Proxy:
    """A network before the receivers. What is bad about it strikes the first connection alone."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        flip_at: int | None = None,
        cut_at: int | None = None,
        hold_at: int | None = None,
    ) -> None:
        """Of what a source sends: a byte to change, where to cut, where to stop passing."""
        self._flip_at, self._cut_at, self._hold_at = flip_at, cut_at, hold_at
        self.held = threading.Event()
        self.release = threading.Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = ("", 0)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        monkeypatch.setattr("workerd.shards.client.Listener", self._listen)

    def _listen(self, host: str) -> Listener:
        listener = Listener(host)
        self._target = (host, int(listener.address.rpartition(":")[2]))
        listener.address = self._address
        return listener

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            bad = self.connections == 1
            try:
                server = socket.create_connection(self._target, WAIT)
            except OSError:
                client.close()
                continue
            self._open += [client, server]
            self._start(self._pump, client, server, bad)
            self._start(self._pump, server, client, False)

    def _pump(self, origin: socket.socket, target: socket.socket, bad: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(origin.recv(65536)):
                following = passed + len(data)
                if bad and self._flip_at is not None and passed <= self._flip_at < following:
                    data[self._flip_at - passed] ^= 0x10
                if bad and self._hold_at is not None and following > self._hold_at:
                    self.held.set()
                    self.release.wait(WAIT)
                if bad and self._cut_at is not None and following > self._cut_at:
                    break
                target.sendall(data)
                passed = following
        for end in (origin, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.release.set()
        # Closing alone would not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT)
        for end in self._open:
            end.close()


@contextmanager
def closing(*things: Any) -> Iterator[None]:
    """Close them in the end, the last one first."""
    try:
        yield
    finally:
        for thing in reversed(things):
            thing.close()


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(work())
        except ShardError as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # noqa: TID251 - counts of another thread's doing
