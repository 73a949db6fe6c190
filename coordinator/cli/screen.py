# SPDX-License-Identifier: Apache-2.0
"""What the demo shows: a block that is drawn over on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

_BAR = 30
_EVERY = 5  # steps between two plain lines


@dataclass(frozen=True, slots=True)
class Sight:
    """What there is to see of a running job."""

    state: str
    reason: str
    step: int
    steps: int
    loss: float | None
    nodes: Mapping[str, str]
    """What each node does."""


class Screen:
    """Writes to a terminal or to anything else."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._drawn = 0
        self._plain: tuple[object, ...] = ()

    def say(self, text: str = "") -> None:
        """A line that stays."""
        self._clear()
        print(text, file=self._out, flush=True)

    def show(self, sight: Sight) -> None:
        """The present state, in place of what was shown before."""
        if self._terminal:
            self._draw(_block(sight))
            return
        nodes = tuple(sight.nodes.items())
        key = (sight.state, nodes, sight.step // _EVERY)
        if key != self._plain:
            self._plain = key
            said = "  ".join(f"{name} {what}" for name, what in nodes)
            print(f"{_headline(sight)}  [{said}]", file=self._out, flush=True)

    def close(self) -> None:
        """Leave the last block where it is."""
        self._drawn = 0

    def _draw(self, lines: Sequence[str]) -> None:
        self._clear()
        # No line may wrap: the block is cleared by its number of lines.
        text = "".join(f"\x1b[?7l{line}\x1b[?7h\n" for line in lines)
        self._out.write(text)
        self._out.flush()
        self._drawn = len(lines)

    def _clear(self) -> None:
        if self._drawn:
            self._out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0


def _headline(sight: Sight) -> str:
    loss = "" if sight.loss is None else f"  loss {sight.loss:.4f}"
    return f"step {sight.step:3d}/{sight.steps}{loss}  {sight.state}"


def _block(sight: Sight) -> list[str]:
    full = _BAR * min(sight.step, sight.steps) // max(1, sight.steps)
    lines = [f"  {'█' * full}{'·' * (_BAR - full)}  {_headline(sight)}"]
    lines += [f"    {name:4} {what}" for name, what in sight.nodes.items()]
    if sight.state not in ("RUNNING", "FINISHED") and sight.reason:
        lines.append(f"    {sight.reason.splitlines()[0]}")
    return lines
