# SPDX-License-Identifier: Apache-2.0
"""A thread that talks to etcd for the agent, so that the agent never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.store import StoreError


@dataclass(frozen=True, slots=True)
class ErrandDone:
    """What became of an errand; ``error`` is None when ``result`` is its result."""

    kind: str
    result: object = None
    error: StoreError | None = None


class Errands:
    """Runs errands one after the other and tells ``sink`` of each."""

    def __init__(self, name: str, sink: Callable[[ErrandDone], None]) -> None:
        self._sink = sink
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, kind: str, run: Callable[[], object]) -> None:
        """Run it after those before it. It may raise StoreError; anything else is a defect."""
        self._queue.put((kind, run))

    def close(self, timeout: float) -> bool:
        """Finish what was submitted, within ``timeout`` seconds; whether it was."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            kind, run = item
            try:
                result = run()
            except StoreError as error:
                self._sink(ErrandDone(kind, error=error))
            else:
                self._sink(ErrandDone(kind, result=result))
