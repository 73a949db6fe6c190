# SPDX-License-Identifier: Apache-2.0
"""What a pull of a shard costs, against a plain TCP socket that moves the same bytes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.table import Row, table
from protos import membership_pb2
from workerd.shards.client import pull
from workerd.shards.memory import host_view
from workerd.shards.server import ShardServer
from workerd.shards.state import TrackedState
from workerd.shards.wire import ShardIdentity

_WIDTH: Final = 2048
_LAYERS: Final = 10
"""Square layers; with AdamW's two averages they make half a gigabyte."""
_PAIRS: Final = 9
_PIECE: Final = 1 << 20
_VERSUS: Final = "plain TCP socket"


def rows() -> list[Row]:
    """Each pull is paired with the mean of the plain transfers just before and after it.

    The clock of a pull starts before the source has read a byte of the state: the checksums of
    both sides are in it.
    """
    state = _state(1)
    size = sum(host_view(_flat(tensor)).nbytes for tensor in state.serve(0).tensors.values())
    ratios, pulls, plains, received, served = [], [], [], [], []
    with _source() as ask:
        plains.append(_plain(ask, state, size))
        for generation in range(1, _PAIRS + 1):
            rate, receiver, source = _pull(ask, state, generation)
            plains.append(_plain(ask, state, size))
            ratios.append(2 * rate / (plains[-2] + plains[-1]))
            pulls.append(rate)
            received.append(receiver)
            served.append(source)
    plain = Row.of("pull.plain", plains, "GB/s")
    return [
        Row.of("pull.ratio", ratios, "", versus=_VERSUS, against=1),
        Row.of("pull.rate", pulls, "GB/s", versus=_VERSUS, against=plain.value),
        plain,
        Row.of("pull.memory.receiver", received, "MB"),
        Row.of("pull.memory.source", served, "MB"),
    ]


def _state(seed: int) -> TrackedState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, _WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return TrackedState({"model": model, "optimizer": optimizer})


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _plain(ask: Any, state: TrackedState, size: int) -> float:
    """GB/s of the source's memory into this one's, tensor by tensor."""
    port = ask("plain")["port"]
    tensors = state.serve(0).tensors.values()
    started = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for tensor in tensors:
            left = host_view(_flat(tensor))
            while left:
                left = left[connection.recv_into(left[:_PIECE]) :]
    return size / (time.perf_counter() - started) / 1e9


def _pull(ask: Any, state: TrackedState, generation: int) -> tuple[float, float, float]:
    """GB/s of a pull, and the MB by which it made the receiver and the source grow."""
    address = ask("offer", generation)["address"]
    source = membership_pb2.Source(node="source", instance="source", address=address)
    before = _reset_peak()
    started = time.perf_counter()
    result = pull(
        [source],
        state,
        host="127.0.0.1",
        job="bench",
        generation=generation,
        step=1,
        shard_position=0,
        nonce="bench",
        timeout=60,
        stop=threading.Event(),
    )
    rate = result.bytes / (time.perf_counter() - started) / 1e9
    grown = _memory("VmHWM") - before
    return rate, grown, ask("end", generation)["grown"]


def _memory(line: str) -> float:
    """MB of this process, by the name that /proc/self/status has for it."""
    for entry in Path("/proc/self/status").read_text().splitlines():
        if entry.startswith(f"{line}:"):
            return int(entry.split()[1]) / 1024
    raise LookupError(line)


def _reset_peak() -> float:
    """Forget the peak of resident memory; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


@contextmanager
def _source() -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pull", "source"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise RuntimeError("a pipe is missing")

    def ask(*words: Any) -> Any:
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    with process:
        try:
            yield ask
        finally:
            stdin.close()


def _serve() -> None:
    """The source's process: does what each line of its input says and answers with one line."""
    state = _state(0)
    server = ShardServer("127.0.0.1")
    before = 0.0
    listener = socket.create_server(("127.0.0.1", 0))
    for line in sys.stdin:
        word, *rest = json.loads(line)
        if word == "plain":
            print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
            with listener.accept()[0] as connection:
                for tensor in state.serve(1).tensors.values():
                    memory = host_view(_flat(tensor))
                    for start in range(0, len(memory), _PIECE):
                        connection.sendall(memory[start : start + _PIECE])
        elif word == "offer":
            identity = ShardIdentity("bench", rest[0], 1, 0, "source", "bench")
            server.offer(identity, state.serve(1))
            before = _reset_peak()
            print(json.dumps({"address": server.address}), flush=True)
        else:
            server.end(rest[0], 10)
            print(json.dumps({"grown": _memory("VmHWM") - before}), flush=True)
    server.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["source"]:
        _serve()
    else:
        print(table(rows()))
