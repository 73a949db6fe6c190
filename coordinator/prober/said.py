# SPDX-License-Identifier: Apache-2.0
"""What the prober says."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.model import Line, Statement, Verdict


@dataclass(frozen=True, slots=True)
class Probed:
    """What one probe said of one incarnation of a node."""

    node: str
    incarnation: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Contacted:
    """The connection to a watched incarnation stands otherwise than before."""

    node: str
    incarnation: str
    line: Line
    detail: str


@dataclass(frozen=True, slots=True)
class Witnessed:
    """What another node says about one. ``tried``: which try of the leader's it was asked for."""

    node: str
    incarnation: str
    tried: float
    statement: Statement
