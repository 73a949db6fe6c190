# SPDX-License-Identifier: Apache-2.0
"""The ways in which a trainer can stand still."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from workerd.trainer.job import Job


def hang(job: Job) -> None:
    """Stand still, once, as HANG says; HUNG is the file that says it has been done."""
    how = os.environ.get("HANG")
    if how is None:
        return
    done = Path(os.environ["HUNG"])
    try:
        done.touch(exist_ok=False)
    except FileExistsError:
        return
    if how == "sleeps":
        threading.Event().wait()
    elif how == "holds the interpreter":
        silent, _ = os.pipe()
        ctypes.PyDLL(None).read(silent, ctypes.create_string_buffer(1), 1)
    elif how == "waits in the kernel":
        # The parent of a vfork sleeps uninterruptibly until the child is another program, and this
        # child first opens a pipe that nobody writes to.
        pipe = str(done.with_suffix(".pipe"))
        os.mkfifo(pipe)
        opening = [(os.POSIX_SPAWN_OPEN, 9, pipe, os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=opening)
    elif how == "says so":
        with job.expect(seconds=600):
            threading.Event().wait(float(os.environ["SECONDS"]))
    elif how == "is stopped":
        os.kill(os.getpid(), 19)
    else:
        raise ValueError(how)
