# SPDX-License-Identifier: Apache-2.0
"""How often what fails in large training clusters, as published.

The counts are those of the Llama 3 pre-training (Grattafiori et al., "The Llama 3 Herd of Models",
2024, arXiv:2407.21783, section 3.3.4, table 5): 419 unexpected interruptions in 54 days on 16,384
H100, that is on 2,048 nodes of eight: 3.8 per thousand days of a node.

What each cause does to a node, how long a machine is away, and everything that isn't in that
table (the faults of what decides: etcd, coordinators, workerd) are assumptions.
"""

from __future__ import annotations

from tests.simulator.faults import Kind

DAYS, NODES = 54, 2048

CAUSES = (
    ("faulty GPU", "device", 148),
    ("GPU HBM3 memory", "device", 72),
    ("software bug", "trainer", 54),
    ("network switch or cable", "line", 35),
    ("host maintenance", "machine", 32),
    ("GPU SRAM memory", "device", 19),
    ("GPU system processor", "device", 17),
    ("network interface", "line", 7),
    ("NCCL watchdog time-out", "hang", 7),
    ("silent data corruption", "device", 6),
    ("GPU thermal interface or sensor", "device", 6),
    ("SSD", "machine", 3),
    ("power supply", "machine", 3),
    ("server chassis", "machine", 2),
    ("IO expansion board", "machine", 2),
    ("dependency", "trainer", 2),
    ("CPU", "machine", 2),
    ("system memory", "machine", 2),
)
"""Cause, effect, interruptions in ``DAYS`` on ``NODES`` nodes."""

DECIDING = (
    ("a trainer hangs", "hang", 1.0),
    ("workerd stands still", "workerd", 2.0),
    ("a node is cut off from etcd", "etcd line", 4.0),
    ("the leading coordinator dies", "leader", 4.0),
    ("etcd changes its leader", "etcd leader", 4.0),
    ("etcd is away", "etcd", 2.0),
    ("all nodes are cut off from etcd", "leases", 2.0),
    ("an answer of etcd is lost", "answer", 4.0),
)
"""Besides: fault, effect, how often a day in the whole cluster."""


def published(nodes: int) -> tuple[Kind, ...]:
    """The published mix, for so many nodes, and the faults of what decides."""
    return tuple(
        Kind(name, effect, count / DAYS / NODES * nodes) for name, effect, count in CAUSES
    ) + tuple(Kind(name, effect, rate) for name, effect, rate in DECIDING)


def storm(per_hour: float) -> tuple[Kind, ...]:
    """Every effect alike, so many faults an hour together."""
    effects = dict.fromkeys(one[1] for one in (*CAUSES, *DECIDING))
    return tuple(Kind(one, one, 24.0 * per_hour / len(effects)) for one in effects)
