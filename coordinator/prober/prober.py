# SPDX-License-Identifier: Apache-2.0
"""The thread that holds the connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from coordinator.model import Line, Verdict
from coordinator.prober.lines import Failed, reach, witness
from coordinator.prober.said import Contacted, Probed, Witnessed
from coordinator.prober.watched import Watched

log = logging.getLogger(__name__)

_STOP_WITHIN = 5.0

Who = tuple[str, str]
"""A node and its incarnation."""


async def ask(node: str, incarnation: str, address: str, timeout: float) -> Probed:
    """Ask the workerd at an address which incarnation lives there.

    It has so many seconds to accept a connection, and again to answer. Refused, reset, mute, or
    anybody else answering: dead. Raises nothing but cancellation.
    """
    found = await reach(node, incarnation, address, timeout, lambda: None)
    if isinstance(found, Failed):
        silent = found.line in (Line.SILENT, Line.UNKNOWN)
        verdict = Verdict.SILENT if silent else Verdict.DEAD
        return Probed(node, incarnation, verdict, found.detail)
    found.close()
    return Probed(node, incarnation, Verdict.ALIVE, f"{address} answers")


class Prober:
    """Runs on a thread of its own until it is closed.

    ``sink`` is called on that thread with all that is seen.
    """

    def __init__(self, sink: Callable[[Probed | Contacted | Witnessed], None]) -> None:
        self._sink = sink
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[Who, Watched] = {}
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        """Start one probe; its :class:`Probed` comes within twice ``timeout`` seconds."""
        self._call(lambda: self._start(self._probe(node, incarnation, address, timeout)))

    def watch(self, targets: Mapping[Who, str], patience: float) -> None:
        """Hold on to these incarnations, at these addresses, and to nobody else any more.

        Each change of how one answers is a :class:`Contacted`, from its first answer on.
        ``patience``: seconds between two pings, and how long one may take.
        """
        self._call(lambda: self._watch(targets, patience))

    def hurry(self, node: str, incarnation: str) -> None:
        """Ping who is watched now, not only when it is time."""
        self._call(lambda: self._hurry((node, incarnation)))

    def witness(
        self,
        who: Who,
        tried: float,
        addresses: tuple[str, ...],
        witnesses: tuple[Who, ...],
        patience: float,
    ) -> None:
        """Have others who are watched try to reach ``who``: a :class:`Witnessed` for each of them.

        ``tried`` comes back with their answers, within twice ``patience`` seconds.
        """

        def start() -> None:
            for one in witnesses:
                self._start(self._witness(who, tried, addresses, one, patience))

        self._call(start)

    def close(self) -> None:
        """End all probes and connections, without a word more, and the thread."""
        if self._thread.is_alive():
            self._call(self._loop.stop)
            self._thread.join(_STOP_WITHIN)
        if self._thread.is_alive():
            log.error("the prober's thread did not end in %g s", _STOP_WITHIN)

    # ---- on the thread

    def _call(self, run: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(run)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        self._sink(await ask(node, incarnation, address, timeout))

    async def _witness(
        self, who: Who, tried: float, addresses: tuple[str, ...], one: Who, patience: float
    ) -> None:
        there = self._watched.get(one)
        connection = None if there is None else there.connection
        said = await witness(one[0], connection, addresses, patience)
        self._sink(Witnessed(*who, tried, said))

    def _watch(self, targets: Mapping[Who, str], patience: float) -> None:
        for who in [one for one, held in self._watched.items() if targets.get(one) != held.address]:
            self._start(self._watched.pop(who).close())
        for who, address in targets.items():
            if who not in self._watched:
                self._watched[who] = Watched(*who, address, patience, self._sink)

    def _hurry(self, who: Who) -> None:
        if who in self._watched:
            self._watched[who].hurry()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            closing = [one.close() for one in self._watched.values()]
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(
                    asyncio.gather(*self._tasks, *closing, return_exceptions=True)
                )
            self._loop.close()
