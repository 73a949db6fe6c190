# SPDX-License-Identifier: Apache-2.0
"""The leader's prober, over the simulated network and on virtual time.

Pings that come back aren't played one by one: what has happened to a node is noticed as late as the
next ping would notice it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from coordinator.model import Answer, Line, Statement, Verdict
from coordinator.prober import Contacted, Probed, Prober, Witnessed

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

Who = tuple[str, str]


class SimProber(Prober):
    """Asks nodes, and holds on to some."""

    def __init__(
        self, cluster: Cluster, sink: Callable[[Probed | Contacted | Witnessed], None]
    ) -> None:
        # Not the real one's: that one makes a thread.
        self._cluster = cluster
        self._to = sink
        self._dice = random.Random(f"prober {cluster.seed}")
        self._lines: dict[Who, Line | None] = {}
        self._trying: set[Who] = set()
        self._patience = 0.0
        cluster.probers.append(self)

    def probe(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        self._cluster.probes += 1
        there = self._cluster.nodes.get(address)
        silent = there is None or not there.up or there.mute or there.isolated
        after = timeout if silent else self._cluster.times.ask
        self._cluster.clock.after(after, lambda: self._answer(node, incarnation, address, timeout))

    def _answer(self, node: str, incarnation: str, address: str, timeout: float) -> None:
        there = self._cluster.nodes.get(address)
        if there is None or not there.up or there.mute or there.isolated:
            detail = f"no answer from {address} in {timeout:g} s"
            accepts = there is not None and there.up and not there.isolated
            verdict = Verdict.DEAD if accepts else Verdict.SILENT
            self._to(Probed(node, incarnation, verdict, detail))
        elif there.incarnation != incarnation:
            detail = f"{address} answers as incarnation {there.incarnation}"
            self._to(Probed(node, incarnation, Verdict.DEAD, detail))
        else:
            self._to(Probed(node, incarnation, Verdict.ALIVE, f"{address} answers"))

    # ---- who is held on to

    def watch(self, targets: Mapping[Who, str], patience: float) -> None:
        self._patience = patience
        for who in self._lines.keys() - targets.keys():
            del self._lines[who]
        for who in sorted(targets.keys() - self._lines.keys()):
            self._lines[who] = None
            self._look(who, self._cluster.times.ask)

    def hurry(self, node: str, incarnation: str) -> None:
        self._look((node, incarnation), self._patience)

    def happened(self, node: str) -> None:
        """Something has happened to a node: the next ping shows it."""
        for who in sorted(self._lines):
            if who[0] == node:
                self._look(who, self._dice.uniform(1, 2) * self._patience)

    def close(self) -> None:
        self._lines.clear()

    def _look(self, who: Who, seconds: float) -> None:
        if who not in self._trying:
            self._trying.add(who)
            self._cluster.clock.after(seconds, lambda: self._seen(who))

    def _seen(self, who: Who) -> None:
        """A ping has come back, or not; then the node is tried anew."""
        self._trying.discard(who)
        if who not in self._lines:
            return
        line, before = self._true(who), self._lines[who]
        if line is Line.ANSWERS:
            self._say(who, line)
        elif before is Line.ANSWERS or before is Line.SILENT:
            self._say(who, Line.LOST)
            self._look(who, self._patience)
        elif before is not None:
            self._say(who, line)
            if line is Line.SILENT:
                self._look(who, self._patience)

    def _say(self, who: Who, line: Line) -> None:
        if self._lines[who] is not line:
            self._lines[who] = line
            self._to(Contacted(*who, line, f"{who[0]} is {line.name}"))

    def _true(self, who: Who) -> Line:
        there = self._cluster.nodes[who[0]]
        if not there.up or there.isolated:
            return Line.SILENT
        if there.mute:
            return Line.FROZEN
        return Line.ANSWERS if there.incarnation == who[1] else Line.REPLACED

    def witness(
        self,
        who: Who,
        tried: float,
        addresses: tuple[str, ...],
        witnesses: tuple[Who, ...],
        patience: float,
    ) -> None:
        for name, _ in witnesses:
            self._cluster.clock.after(
                patience,
                lambda name=name: self._testify(who, tried, name),  # type: ignore[misc]
            )

    def _testify(self, who: Who, tried: float, name: str) -> None:
        asked, there = self._cluster.nodes[name], self._cluster.nodes[who[0]]
        if not asked.up or asked.mute or asked.isolated:
            answer = Answer.NONE
        else:
            answer = Answer.ACCEPTED if asked.reaches(there) else Answer.SILENT
        self._to(Witnessed(*who, tried, Statement(name, answer, answer.name)))
