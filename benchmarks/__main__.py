# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks [NAME...]``: measure, print a table, write build/bench.json.

A NAME is that of a benchmark or the beginning of one: recovery, soak, scale.64. Without any, all
but the largest run. Rows of benchmarks that don't run this time stay in the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import detection, kills, overhead, pull, recovery, scale, soak
from benchmarks.scale import rendezvous
from benchmarks.table import Row, table

_FILE = Path(__file__).resolve().parents[1] / "build" / "bench.json"

_BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "recovery.process": recovery.process,
    "recovery.node": recovery.node,
    "detection": detection.rows,
    "overhead": overhead.rows,
    "pull": pull.rows,
    "soak": soak.rows,
    "kills": kills.rows,
    "scale.64": scale.of(64),
    "scale.512": scale.of(512),
    "scale.2048": scale.of(2048),
    "scale.10240": scale.of(10_240),
    "rendezvous.64": rendezvous.of(64),
    "rendezvous.512": rendezvous.of(512),
    "rendezvous.2048": rendezvous.of(2048),
    "rendezvous.10240": rendezvous.of(10_240),
}

_BY_NAME_ONLY = frozenset(
    {"kills", "scale.2048", "scale.10240", "rendezvous.2048", "rendezvous.10240"}
)
"""What takes over half an hour, or more of a machine than most have."""


def main(names: list[str]) -> int:
    """Run the benchmarks that are named; returns the exit code."""
    chosen = [
        one
        for one in _BENCHMARKS
        if any(one.startswith(n) for n in names) or not (names or one in _BY_NAME_ONLY)
    ]
    if not chosen:
        print(f"no such benchmark; there are: {', '.join(_BENCHMARKS)}", file=sys.stderr)
        return 2
    measured: list[Row] = []
    for name in chosen:
        print(f"==> {name}", flush=True)
        rows = _BENCHMARKS[name]()
        print(table(rows), flush=True)
        measured += rows
        _write(measured)
    return 0


def _write(rows: list[Row]) -> None:
    new = {row.name: row.record() for row in rows}
    kept = json.loads(_FILE.read_text()) if _FILE.exists() else []
    old = {one["name"]: one for one in kept}
    _FILE.parent.mkdir(exist_ok=True)
    _FILE.write_text(json.dumps(list({**old, **new}.values()), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
