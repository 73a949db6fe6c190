# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.scale.process``: a process that plays nodes, and does what it is told.

It reads orders from its standard input and answers each on its standard output, a line of JSON
both. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.scale.clock import Clock, Marks
from benchmarks.scale.node import EmulatedNode
from benchmarks.scale.wires import NODES, Wire, wires

_AT_ONCE = 32
"""Nodes that register at a time."""


class _Played:
    """The nodes of this process."""

    def __init__(self, address: str, prefix: str, ttl: int, epoch: float) -> None:
        self._address = address
        self._prefix = prefix.rstrip("/") + "/"
        self._ttl = ttl
        self._clock = Clock(epoch)
        self._marks = Marks()
        self._wires: list[Wire] = []
        self._nodes: dict[str, EmulatedNode] = {}
        # Bound, not listening: a probe of a killed node is refused at once.
        self._refuses = socket.socket()
        self._refuses.bind(("127.0.0.1", 0))

    def _full(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    async def start(self, names: list[str]) -> dict[str, Any]:
        """Register nodes."""
        probe = f"127.0.0.1:{self._refuses.getsockname()[1]}"
        self._wires = wires(self._address, len(names))
        for number, name in enumerate(names):
            wire = self._wires[number // NODES]
            self._nodes[name] = EmulatedNode(
                wire, name, self._full, self._ttl, self._clock, self._marks, probe
            )
        waiting = list(self._nodes.values())
        while waiting:
            now, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            await asyncio.gather(*(one.start() for one in now))
        return {}

    async def stop(self, at: float, generation: int) -> dict[str, Any]:
        """A node is dead since then: the job's step stands until a later generation runs."""
        self._clock.stop(at, generation)
        return {}

    async def kill(self, names: list[str]) -> dict[str, Any]:
        """End nodes as SIGKILL would; says which leases nobody renews any more."""
        killed = [self._nodes.pop(name) for name in names]
        for one in killed:
            one.kill()
        return {"leases": [one.lease for one in killed]}

    async def marks(self) -> dict[str, Any]:
        """When what was done in each generation; raises what has ended a node, if anything."""
        failures = [one.failed() for one in self._wires]
        failures += [one.failed() for one in self._nodes.values()]
        for failure in failures:
            if failure is not None:
                raise failure
        return {"failures": self._marks.failures + sum(one.broken for one in self._wires)} | {
            str(number): marks for number, marks in self._marks.of.items()
        }


async def _serve(arguments: list[str]) -> None:
    address, prefix, ttl, epoch = arguments
    played = _Played(address, prefix, int(ttl), float(epoch))
    does: dict[str, Callable[..., Any]] = {
        "start": played.start,
        "stop": played.stop,
        "kill": played.kill,
        "marks": played.marks,
    }
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        what, *given = json.loads(line)
        print(json.dumps(await does[what](*given)), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1:]))
