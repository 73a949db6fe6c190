# SPDX-License-Identifier: Apache-2.0
"""Which examples are tried, and what the tests have counted, at the end of the run."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples for everybody: whether a change may land must not hang on another draw. New ones
# are looked for with --hypothesis-profile=search.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False, print_blob=True)
settings.load_profile("same")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of the model check."""
    rows = [
        str(value)
        for report in terminalreporter.getreports("passed")
        for name, value in report.user_properties
        if name == "model check"
    ]
    if rows:
        from tests.modelcheck.checks import HEAD

        terminalreporter.section("model check: all states")
        terminalreporter.write_line(HEAD)
        for row in sorted(rows):
            terminalreporter.write_line(row)
