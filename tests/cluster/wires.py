# SPDX-License-Identifier: Apache-2.0
"""A cluster whose cables a test can cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.wires import WiredCluster, Wires
from coordinator.cli.localcluster.processes import running_with
from tests.cluster.support import show


@contextlib.contextmanager
def wired(nodes: int, *coordinator: str, lease_ttl: float) -> Iterator[WiredCluster]:
    """A cluster on wires of its own; the test is skipped, with the reason, where that can't be."""
    wires = Wires([f"n{number}" for number in range(nodes)] + ["c0", "c1"])
    try:
        try:
            wires.build()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        one = WiredCluster(
            wires, nodes=nodes, lease_ttl=lease_ttl, coordinator_arguments=coordinator
        )
        with one:
            try:
                yield one
            except BaseException:
                show(one)
                raise
        assert running_with(str(one.folder)) == []
    finally:
        wires.close()
