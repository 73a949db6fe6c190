# SPDX-License-Identifier: Apache-2.0
"""``make simulate``: a cluster's days in minutes."""

from __future__ import annotations

import argparse
import gc
import logging
import sys

from tests.simulator import mix
from tests.simulator.group import Violation
from tests.simulator.run import report, run


def main() -> int:
    """Simulate, and print what came of it; 1 when an invariant didn't hold."""
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2048, help="eight GPUs each")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--storm",
        type=float,
        metavar="FAULTS",
        help="so many faults an hour, every kind alike, instead of the published mix",
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    gc.disable()  # next to nothing here is part of a circle, and there is much to look through
    kinds = mix.published(given.nodes) if given.storm is None else mix.storm(given.storm)
    try:
        outcome = run(
            given.nodes,
            given.hours,
            given.seed,
            kinds,
            repair=1.0 if given.storm is None else 0.2,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except Violation as error:
        print(error)
        return 1
    print(report(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
