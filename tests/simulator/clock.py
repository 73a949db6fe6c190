# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what is due is done in the order of its time, and time jumps to it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

_START = 1000.0  # some code takes 0 for "never"


class Due:
    """Something that is to be done at a time; it may be called off."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] | None = run

    def cancel(self) -> None:
        """Don't do it."""
        self.run = None


class Clock:
    """Seconds that pass only when :meth:`step` or :meth:`run_until` says so."""

    def __init__(self) -> None:
        self._now = _START
        self._due: list[tuple[float, int, Due]] = []
        self._number = 0

    def now(self) -> float:
        """The seconds of this clock, as :func:`time.monotonic` gives those of the machine."""
        return self._now

    def at(self, when: float, run: Callable[[], None]) -> Due:
        """Do it at a time, or now if that has passed; things of one time in the order of asking."""
        due = Due(run)
        self._number += 1
        heapq.heappush(self._due, (max(when, self._now), self._number, due))
        return due

    def after(self, seconds: float, run: Callable[[], None]) -> Due:
        """Do it so many seconds from now."""
        return self.at(self._now + seconds, run)

    def step(self, limit: float = float("inf")) -> bool:
        """Do what is due next, unless that is after ``limit``; whether there was something."""
        while self._due:
            when, _, due = self._due[0]
            if when > limit:
                return False
            heapq.heappop(self._due)
            if due.run is not None:
                self._now = when
                due.run()
                return True
        return False

    def run_until(self, when: float) -> None:
        """Do all that is due up to a time; then it is that time."""
        while self.step(when):
            pass
        self._now = max(self._now, when)
