# SPDX-License-Identifier: Apache-2.0
"""The test bed: an etcd, a coordinator, processes that play nodes, and what they use."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.cli.localcluster.admin import Admin
from coordinator.cli.localcluster.etcd import Etcd
from coordinator.cli.localcluster.processes import Process, tied
from coordinator.store import Store

PREFIX = "/hotspare/scale"
_ROOT = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes have used so far: seconds of CPU, and etcd's own counts."""

    cpu: dict[str, float]
    etcd: dict[str, float]

    def since(self, before: Usage) -> Usage:
        """The difference."""
        return Usage(
            {name: value - before.cpu[name] for name, value in self.cpu.items()},
            {name: value - before.etcd.get(name, 0.0) for name, value in self.etcd.items()},
        )


class Players:
    """A process that plays nodes."""

    def __init__(self, address: str, ttl: int, epoch: float) -> None:
        program = [sys.executable, "-m", "benchmarks.scale.process"]
        self._popen = subprocess.Popen(
            tied([*program, address, PREFIX, str(ttl), repr(epoch)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.pid = self._popen.pid

    def ask(self, *order: Any) -> Any:
        """Give an order and wait for its answer. Raises RuntimeError when the process has ended."""
        self.send(*order)
        return self.answer()

    def send(self, *order: Any) -> None:
        """Give an order."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()

    def answer(self) -> Any:
        """Wait for the answer to the oldest order. Raises RuntimeError as :meth:`ask` does."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError("the process that plays nodes has ended; see its traceback above")
        return json.loads(line)

    def close(self) -> None:
        """End it: its nodes stop renewing their leases."""
        self._popen.kill()
        self._popen.wait()


class Bed:
    """A context, in which all of it runs."""

    def __init__(self, ttl: int, players: int) -> None:
        self._ttl = ttl
        self._count = players
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bed:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspare-")))
            self._etcd = Etcd(folder)
            stack.callback(self._etcd.close)
            self._etcd.start()
            address = self._etcd.address
            self.store = stack.enter_context(Store([address], prefix=PREFIX, timeout=60.0))
            self.coordinator = Process(
                "coordinator",
                [
                    *(sys.executable, "-m", "coordinator", "--etcd", address, "--prefix", PREFIX),
                    *("--id", "c0", "--listen", "127.0.0.1:0"),
                    # What is late here is late for want of processors, not dead; and with many
                    # nodes etcd answers a renewal only after all that came before it.
                    *("--pause", "300", "--lease-ttl", str(self._ttl // 6)),
                ],
                folder / "coordinator.log",
                cwd=folder,
            )
            stack.callback(self.coordinator.kill)
            line = self.coordinator.wait_line("listening on ", 30.0)
            listens = line.rpartition("listening on ")[2].strip()
            self.admin = Admin(lambda: [listens])
            stack.callback(self.admin.close)
            self.players = []
            epoch = time.monotonic()  # one clock for all processes of a machine
            for _ in range(self._count):
                self.players.append(Players(address, self._ttl, epoch))
                stack.callback(self.players[-1].close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def usage(self) -> Usage:
        """What has been used until now."""
        return Usage(self.cpu(), dict(self._metrics()))

    def cpu(self) -> dict[str, float]:
        """Seconds of CPU that have been used until now."""
        cpu = {"etcd": _cpu(self._etcd.process.pid), "leader": _cpu(self.coordinator.pid)}
        cpu["nodes"] = sum(_cpu(one.pid) for one in self.players)
        return cpu

    def memory(self) -> dict[str, float]:
        """MB that are resident now."""
        pids = {"etcd": self._etcd.process.pid, "leader": self.coordinator.pid}
        return {name: _resident(pid) for name, pid in pids.items()}

    def _metrics(self) -> Iterator[tuple[str, float]]:
        """etcd's counters of interest, by names that are the same in 3.4 and 3.5."""
        with urllib.request.urlopen(f"http://{self._etcd.address}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        for line in lines:
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            for metric, ours in _METRICS.items():
                if name.replace("_debugging", "") == metric:
                    yield ours, float(value)


_METRICS = {
    "etcd_mvcc_put_total": "puts",
    "etcd_mvcc_delete_total": "deletes",
    "etcd_mvcc_range_total": "ranges",
    "etcd_mvcc_txn_total": "txns",
    "etcd_mvcc_events_total": "events",
    "etcd_network_client_grpc_received_bytes_total": "bytes_in",
    "etcd_network_client_grpc_sent_bytes_total": "bytes_out",
}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LookupError(pid)
