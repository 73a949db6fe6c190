# SPDX-License-Identifier: Apache-2.0
"""What so many ranks that join at once ask of the rendezvous store, phase by phase.

The store is the one that a trainer offers, in a process of its own; the ranks are clients of one
other process, some at a time on each of its threads. Each does what ``workerd.trainer.group`` does
with the store, in one replica group of all of them: it connects, says what must be equal
everywhere (``facts``), says where its agreement listens (``tell``), learns where the ranks are to
which it connects (``learn``), and reads rank 0's facts (``compare``).

``connect`` includes looking up names: torch asks for the name of each peer's address, in every
client and, one after the other, in the store's only thread. A name server that drops one such
question costs 5 s there (seen from 16 connections at once on).

The sockets of the agreement, between the ranks themselves, are left out. So is Gloo, whose full
mesh reads each pair's address from the store: ranks times ranks, 10,240 of them about 100 million
reads. It is not for such groups; NCCL reads one id by each rank.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from benchmarks.table import Row
from coordinator.cli.localcluster.processes import tied

_THREADS: Final = 16
_SAMPLES: Final = 3
_TIMEOUT: Final = timedelta(seconds=120)
_FACTS: Final = json.dumps({"buckets": secrets.token_hex(16), "parameters": secrets.token_hex(16)})
_PHASES: Final = ("connect", "facts", "tell", "learn", "compare")


def of(ranks: int) -> Callable[[], list[Row]]:
    """The benchmark with so many ranks."""
    return lambda: _rows(ranks)


def _rows(ranks: int) -> list[Row]:
    samples: dict[str, list[float]] = {one: [] for one in (*_PHASES, "total", "cpu")}
    for _ in range(_SAMPLES):
        with _store() as (address, pid):
            spans = _join(address, ranks)
            samples["cpu"].append(_cpu(pid))
        for phase in _PHASES:
            samples[phase].append(spans[phase])
        samples["total"].append(sum(spans.values()))
    name = f"rendezvous.{ranks}"
    return [Row.of(f"{name}.{one}", taken, "s") for one, taken in samples.items()]


def _join(address: str, ranks: int) -> dict[str, float]:
    """Seconds of each phase, which all ranks begin together."""
    import torch.distributed

    dist: Any = torch.distributed
    host, _, port = address.rpartition(":")
    stores: list[Any] = [None] * ranks
    token = secrets.token_bytes(16)

    def connect(rank: int) -> None:
        client = dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT
        )
        stores[rank] = dist.PrefixStore("scale/1/nonce/", client)

    def learn(rank: int) -> None:
        for number in range((ranks - 1).bit_length()):
            stores[rank].get(f"position0/agreement/{(rank + (1 << number)) % ranks}")

    work: dict[str, Callable[[int], None]] = {
        "connect": connect,
        "facts": lambda rank: stores[rank].set(f"position0/facts/{rank}", _FACTS),
        "tell": lambda rank: stores[rank].set(
            f"position0/agreement/{rank}", token + b"127.0.0.1 65535"
        ),
        "learn": learn,
        "compare": lambda rank: stores[rank].get("position0/facts/0"),
    }
    spans = {}
    for phase in _PHASES:
        began = time.perf_counter()
        _each(ranks, work[phase])
        spans[phase] = time.perf_counter() - began
    return spans


def _each(ranks: int, work: Callable[[int], None]) -> None:
    """Do it for each rank on some threads. Raises what one of them raised."""
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def some(first: int) -> None:
        try:
            for rank in range(first, ranks, _THREADS):
                work(rank)
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            errors.put(error)

    threads = [threading.Thread(target=some, args=(first,)) for first in range(_THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if not errors.empty():
        raise errors.get()


@contextmanager
def _store() -> Iterator[tuple[str, int]]:
    """A store in a process of its own: its address and the process's id."""
    program = [sys.executable, "-m", "benchmarks.scale.rendezvous"]
    process = subprocess.Popen(
        tied(program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError("the store's process has ended; see its traceback above")
        yield address, process.pid
    finally:
        process.kill()
        process.wait()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _serve() -> None:
    from workerd.trainer.serving import Serving

    serving = Serving("127.0.0.1")
    print(serving.offer_store(1).address, flush=True)
    sys.stdin.read()
    serving.close()


if __name__ == "__main__":
    _serve()
