# SPDX-License-Identifier: Apache-2.0
"""What Hotspare costs a step, against the plain DistributedDataParallel loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from benchmarks.jobs import JobRun
from benchmarks.table import Row
from coordinator.cli.localcluster import LocalCluster
from coordinator.model import JobSpec

_PAIRS: Final = 20
_STEPS: Final = 25
_TARGET_US: Final = 50.0


def rows() -> list[Row]:
    """Blocks of steps with and without Hotspare in turn, in the same two processes."""
    with LocalCluster(nodes=2) as cluster:
        result = cluster.folder / "overhead.json"
        command = (
            sys.executable,
            str(Path(__file__).with_name("overhead_job.py")),
            str(_PAIRS),
            str(_STEPS),
            str(cluster.folder / "rendezvous"),
            str(result),
        )
        spec = JobSpec(
            name="overhead",
            command=command,
            environment=(("OMP_NUM_THREADS", "1"),),
            replicas=2,
        )
        JobRun(cluster, spec).finish(300.0)
        measured: list[dict[str, float]] = json.loads(result.read_text())
    plain = [one["plain"] * 1e3 for one in measured]
    return [
        Row.of(
            "overhead.step",
            (one["bookkeeping"] / 1e3 for one in measured),
            "us",
            versus=f"target of {_TARGET_US:g} us",
            against=_TARGET_US,
        ),
        Row.of("overhead.streams", (one["streams"] / 1e3 for one in measured), "us"),
        Row.of("overhead.agreement", (one["agreement"] / 1e3 for one in measured), "us"),
        Row.of(
            "overhead.ratio",
            (one["hotspare"] / one["plain"] for one in measured),
            "",
            versus="plain DistributedDataParallel",
            against=1.0,
        ),
        Row.of("overhead.plain_step", plain, "ms"),
    ]
