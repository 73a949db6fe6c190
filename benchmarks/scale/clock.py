# SPDX-License-Identifier: Apache-2.0
"""The steps that the trainers of emulated nodes make together, and when nodes did what."""

from __future__ import annotations

import time

STEP = 0.5
"""Seconds of one step."""


class Clock:
    """The job's step, the same for all nodes."""

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._stopped_at: float | None = None
        self._generation = 0

    def stop(self, at: float, generation: int) -> None:
        """A node of a generation is dead since then: no step is agreed on any more in it."""
        self._stopped_at, self._generation = at, generation

    def go(self, generation: int) -> None:
        """A generation runs."""
        if generation > self._generation:
            self._stopped_at = None

    def step(self) -> int:
        """The step now."""
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return int((now - self._epoch) / STEP)

    def until(self, seconds: float) -> float | None:
        """Seconds until the next step that is at least so far away; None while there is none."""
        if self._stopped_at is not None:
            return None
        now = time.monotonic() - self._epoch
        return ((now + seconds) // STEP + 1) * STEP - now


class Marks:
    """When, in monotonic seconds, the first and the last node did something in a generation."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, tuple[float, float, int]]] = {}
        self.failures = 0
        """Calls that etcd has not answered in time, or refused."""

    def set(self, generation: int, what: str) -> None:
        """A node has just done it."""
        now = time.monotonic()
        marks = self.of.setdefault(generation, {})
        first, _, count = marks.get(what, (now, now, 0))
        marks[what] = (first, now, count + 1)
