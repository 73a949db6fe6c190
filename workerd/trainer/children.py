# SPDX-License-Identifier: Apache-2.0
"""Keeps what a script forks (its data loaders) from outliving or disturbing the trainer."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def guard_children(forget: Callable[[], None]) -> None:
    """From now on a forked child calls `forget`, and dies with the main thread that forked it.

    A child of another thread is not tied to it: that thread may end long before the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    trainer = os.getpid()
    forked_by_main = False

    def before() -> None:
        nonlocal forked_by_main
        forked_by_main = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if os.getppid() != trainer:
            return  # a child's own child
        forget()
        if forked_by_main:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    os.register_at_fork(before=before, after_in_child=in_child)
