# SPDX-License-Identifier: Apache-2.0
"""What every benchmark answers: rows with their samples, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure."""

    name: str
    value: float
    """The median of the samples."""
    unit: str
    samples: tuple[float, ...]
    versus: str | None = None
    """What the ratio compares with."""
    ratio: float | None = None

    @classmethod
    def of(
        cls,
        name: str,
        samples: Iterable[float],
        unit: str,
        *,
        versus: str | None = None,
        against: float | None = None,
    ) -> Row:
        """The median of `samples`; its ratio to `against`, a figure of what `versus` names."""
        taken = tuple(samples)
        value = statistics.median(taken)
        return cls(name, value, unit, taken, versus, value / against if against else None)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest sample."""
        return min(self.samples), max(self.samples)

    def record(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        return dataclasses.asdict(self)


def table(rows: Sequence[Row]) -> str:
    """The rows for people: median, smallest to largest, number of samples, comparison."""
    lines = [("", "median", "", "from", "to", "samples", "versus")]
    for row in rows:
        low, high = row.spread
        versus = row.versus or ""
        if row.ratio is not None:
            versus = f"{row.ratio:.3f} of {versus}"
        lines.append(
            (row.name, _figure(row.value), row.unit, _figure(low), _figure(high),
             str(len(row.samples)), versus)
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, 2, 6}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _figure(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
