# SPDX-License-Identifier: Apache-2.0
"""How fast trainers go, from their progress pages."""

from __future__ import annotations

from collections import deque

WINDOW = 10.0
"""Seconds that the rate looks back."""


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
