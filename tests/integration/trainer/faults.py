# SPDX-License-Identifier: Apache-2.0
"""What a test makes go wrong inside a trainer, by environment variables."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from workerd.trainer import Job
from workerd.trainer.errors import GroupBroken
from workerd.trainer.group import Group


def install() -> None:
    """LATE=STEP: this rank does not learn that the agreement of that step has ended."""
    late = os.environ.get("LATE")
    if late is None:
        return
    agree = Group.agree
    calls = 0

    def learns_late(self: Group, bits: int = 0) -> int:
        nonlocal calls
        calls += 1
        agreed = agree(self, bits)
        if calls == int(late) + 1:
            while True:
                try:
                    self.check()
                except GroupBroken:
                    raise
                time.sleep(0.001)  # noqa: TID251 - a test's script
        return agreed

    Group.agree = learns_late  # type: ignore[method-assign]


def at(place: str, job: Job) -> None:
    """`PLACE`=STEP:DEED or STEP:RANK:DEED does a deed there."""
    wanted = os.environ.get(place.upper())
    pace = float(os.environ.get("PACE", "0"))
    if place == "forward" and os.environ.get("TELL"):
        print("begins", job.step, flush=True)
    if place == "forward" and pace:
        time.sleep(pace)  # noqa: TID251 - a test's script
    if wanted is None:
        return
    step, deed = wanted.split(":", 1)
    if job.step != int(step):
        return
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "raise":
        raise RuntimeError("on purpose")
    elif deed == "broken":  # as a script may, once it misses its peers
        assert job.session is not None
        if job.session.standing.joined > 1:
            return
        while not job.session.disturbed():
            time.sleep(0.001)  # noqa: TID251 - a test's script
        print("raised without peers", flush=True)
        raise FloatingPointError("the loss is no number")
    elif deed == "wish":  # until it is to ask for a stop
        assert job.session is not None
        while not job.session.wish:
            time.sleep(0.001)  # noqa: TID251 - a test's script
    elif deed.startswith("hold="):  # until the file is there
        path = Path(deed.removeprefix("hold="))
        path.with_suffix(".held").touch()
        while not path.exists():
            time.sleep(0.001)  # noqa: TID251 - a test's script
