# SPDX-License-Identifier: Apache-2.0
"""The errands of the agent's desk, on virtual time instead of a thread."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.store import StoreError, StoreTimeout
from tests.simulator.store import FakeStore
from tests.simulator.times import Times
from workerd.agent.desk import READ
from workerd.agent.errands import ErrandDone, Errands


class SimErrands(Errands):
    """One after the other; each takes its way to etcd, and a write its time there."""

    def __init__(self, store: FakeStore, times: Times, sink: Callable[[ErrandDone], None]) -> None:
        # Not the real one's: that one makes a thread.
        self._fake = store
        self._times = times
        self._done = sink
        self._waiting: list[tuple[str, Callable[[], object]]] = []
        self._busy = False

    def submit(self, kind: str, run: Callable[[], object]) -> None:
        self._waiting.append((kind, run))
        if not self._busy:
            self._next()

    def close(self, timeout: float) -> bool:
        return True

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if self._waiting:
            kind, run = self._waiting.pop(0)
            there = 0.0 if kind == READ else self._fake.etcd.service()
            self._fake.clock.after(self._times.reach + there, lambda: self._carry_out(kind, run))

    def _carry_out(self, kind: str, run: Callable[[], object]) -> None:
        later = 0.0
        try:
            done = ErrandDone(kind, result=run())
        except StoreError as error:
            done = ErrandDone(kind, error=error)
            later = self._fake.timeout if isinstance(error, StoreTimeout) else 0.0
        if later:
            self._fake.clock.after(later, lambda: self._tell(done))
        else:
            self._tell(done)

    def _tell(self, done: ErrandDone) -> None:
        self._done(done)
        self._next()
