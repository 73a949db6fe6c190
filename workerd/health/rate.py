# SPDX-License-Identifier: Apache-2.0
"""How fast trainers go, from their progress pages."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 10.0
"""Seconds that the rate looks back."""


_STEPS = 15
"""Observations that the usual time of a step is the median of."""


class StepTime:
    """Seconds that a step usually takes, whether or not one takes longer now."""

    def __init__(self) -> None:
        self._at: tuple[float, int] | None = None
        self._took: deque[float] = deque(maxlen=_STEPS)

    def observe(self, now: float, step: int) -> None:
        """The place is at ``step``; a step that falls back is no observation."""
        if self._at is None or step < self._at[1]:
            self._at = (now, step)
        elif step > self._at[1]:
            self._took.append((now - self._at[0]) / (step - self._at[1]))
            self._at = (now, step)

    def usual(self) -> float:
        """The median of the last observations; 0 before three of them."""
        return round(statistics.median(self._took), 3) if len(self._took) >= 3 else 0.0

    def clear(self) -> None:
        """Another place."""
        self._at = None
        self._took.clear()


class StepRate:
    """Steps per second of one place, over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def observe(self, now: float, step: int) -> None:
        """The place is at ``step``; a step that falls back begins anew."""
        samples = self._samples
        if samples and step < samples[-1][1]:
            samples.clear()
        if samples and step == samples[-1][1] and len(samples) > 1:
            samples.pop()  # only when it last stood there counts
        samples.append((now, step))
        while len(samples) > 2 and samples[0][0] < now - WINDOW:
            samples.popleft()

    def per_second(self) -> float:
        """The rate; 0 before two different samples."""
        if len(self._samples) < 2:
            return 0.0
        (first, start), (last, end) = self._samples[0], self._samples[-1]
        return round((end - start) / (last - first), 3) if last > first else 0.0

    def clear(self) -> None:
        """Another place."""
        self._samples.clear()
