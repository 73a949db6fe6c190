# SPDX-License-Identifier: Apache-2.0
"""Docker's command line, as the tests of systemd and compose use it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SOON = 180.0
"""A generous deadline for what takes seconds."""
_COMMAND = 300.0


class DockerError(AssertionError):
    """A command that should have worked; the text has all that it printed."""


def docker(*arguments: str, text: str | None = None) -> str:
    """What ``docker ARGUMENTS`` prints. Raises :class:`DockerError`."""
    done = subprocess.run(
        ["docker", *arguments], input=text, capture_output=True, text=True, timeout=_COMMAND
    )
    if done.returncode:
        raise DockerError(
            f"docker {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def wait_for(what: Callable[[], T | None], why: str, seconds: float = SOON) -> T:
    """The first result of ``what`` that is true; what fails is tried again."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        said = ""
        try:
            if found := what():
                return found
        except DockerError as error:
            said = f"\n{error}"
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds:g} s: {why}{said}")
        pause.wait(0.3)
