# SPDX-License-Identifier: Apache-2.0
"""The whole model check: ``python -m tests.modelcheck ['CONFIGURATION FAILURES']...``.

A search that has too many states is cut short, and says so.
"""

from __future__ import annotations

import sys

from tests.modelcheck import checks
from tests.modelcheck.explore import Search
from tests.modelcheck.values import Violation


def main() -> int:
    """Runs all searches whose row begins with one of the arguments.

    Returns 1 if one found something, or didn't end.
    """
    wanted = sys.argv[1:] or [""]
    failed = False
    print(checks.HEAD, flush=True)
    for name, failures, shape in [*checks.single(), *checks.pairs()]:
        if not any(f"{name} {failures}".startswith(one) for one in wanted):
            continue
        try:
            result = Search(shape).run()
            print(checks.row(name, failures, result), flush=True)
            failed = failed or not result.complete
        except Violation as error:
            failed = True
            print(f"{name:18} {failures:20} VIOLATION: {error}", flush=True)
    return int(failed)


sys.exit(main())
