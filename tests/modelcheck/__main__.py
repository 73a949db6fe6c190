# SPDX-License-Identifier: Apache-2.0
"""The whole model check: ``python -m tests.modelcheck [JOBS ['CONFIGURATION FAILURES']...]``.

JOBS searches at a time, each in a process of its own, whose memory goes with it. A search that has
too many states is cut short, and says so.
"""

from __future__ import annotations

import multiprocessing
import sys

from tests.modelcheck import checks


def main(jobs: int, wanted: list[str]) -> int:
    """Runs all searches whose row begins with one of the arguments.

    Returns 1 if one found something, or didn't end.
    """
    every = [
        one
        for one in checks.every()
        if any(f"{one[0]} {one[1]}".startswith(begin) for begin in wanted)
    ]
    print(checks.HEAD, flush=True)
    failed = 0
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for good, row in pool.imap_unordered(checks.search, every):
            print(row, flush=True)
            failed += not good
    print(f"{len(every)} searches, {failed} of them with a violation or cut short", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int((*sys.argv[1:], "1")[0]), sys.argv[2:] or [""]))
