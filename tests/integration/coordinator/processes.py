# SPDX-License-Identifier: Apache-2.0
"""Coordinator processes."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from protos import admin_pb2_grpc
from tests.etcd import Etcd

SOON = 60.0
"""A generous deadline for what should happen within a second or a lease."""
TTL = 2
"""Of leases here: the least that etcd grants by default."""


class Coordinator:
    """A coordinator process."""

    def __init__(self, etcd: Etcd, prefix: str, name: str, log: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "coordinator"),
                    *("--etcd", ",".join(etcd.endpoints), "--prefix", prefix, "--id", name),
                    *("--listen", "127.0.0.1:0", "--lease-ttl", str(TTL), "--log-level", "debug"),
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=out,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
        self.address = ""

    def ready(self) -> Coordinator:
        """Wait until it says where it listens."""
        assert self.process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        reader = threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True)
        reader.start()
        line = lines.get(timeout=SOON)
        assert line.startswith("listening on "), self.log.read_text()
        self.address = line.removeprefix("listening on ").strip()
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(SOON)

    @contextlib.contextmanager
    def stub(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield admin_pb2_grpc.AdminStub(channel)
