# SPDX-License-Identifier: Apache-2.0
"""Finds and kills what trainers have left: data-loader workers, compilers, anything.

A process belongs to a trainer if it is in the trainer's session, or if the trainer's mark is in
the environment that it was started with. (A group would not do: a child leaves it at will. The
parent-death signal does not pass to children. A cgroup would do, but takes rights that a workerd
in a container or under a user's own account doesn't have.)

Imports nothing of Hotspare: the guardian runs it on its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection

_SESSION_AT = 3  # of the fields after the command's name in /proc/<pid>/stat: state is 0


def _belongs(pid: int, sessions: Collection[int], marks: Collection[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return False
        if int(fields[_SESSION_AT]) in sessions:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return not set(marks).isdisjoint(file.read().split(b"\0"))
    except (OSError, IndexError, ValueError):
        # It has ended meanwhile, or is somebody else's: then it is none of a trainer of ours.
        return False


def find(sessions: Collection[int], marks: Collection[bytes]) -> list[int]:
    """The living processes of these sessions, or with one of these ``NAME=value`` marks."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if pid != own and _belongs(pid, sessions, marks)]


def _kill(pids: list[int], sessions: Collection[int], marks: Collection[bytes]) -> list[int]:
    """Kill them; return descriptors that tell when they have ended."""
    descriptors = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        descriptors.append(descriptor)
        # The descriptor holds on to the process: what belongs now is what will be killed.
        if _belongs(pid, sessions, marks):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptors


def _wait(descriptors: list[int], seconds: float) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    left = len(descriptors)
    while left and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            poll.unregister(descriptor)
            left -= 1
    for descriptor in descriptors:
        os.close(descriptor)


def sweep(
    sessions: Collection[int],
    marks: Collection[bytes],
    give_up: Callable[[], bool] = lambda: False,
    round_seconds: float = 1.0,
) -> list[int]:
    """Kill until nothing is left, or ``give_up()`` says so between two rounds.

    A process that forks while it is being looked for is found in the next round. Returns what is
    left: empty unless it gave up (a process may hang in the kernel).
    """
    while True:
        left = find(sessions, marks)
        if not left or give_up():
            return left
        _wait(_kill(left, sessions, marks), round_seconds)
