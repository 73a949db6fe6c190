# SPDX-License-Identifier: Apache-2.0
"""Runs before a trainer, in its process: ties its life to workerd's, then becomes the command.

``python -I -S exec_shim.py PARENT COMMAND...``, started by the main thread of process PARENT. The
kernel's parent-death signal belongs to the thread that started the process, and survives exec.
It imports nothing of Hotspare: it is on the way of every trainer's start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_RUN = 127, 126


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"workerd: prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # workerd may have died before the signal was asked for: then it never comes.
    if os.getppid() != parent:
        sys.exit("workerd: it ended while it started this trainer")
    # This interpreter ignores them, and what is ignored stays so over exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - the job's command, and no shell wanted
    except OSError as error:
        sys.stderr.write(f"workerd: cannot run {command[0]!r}: {error.strerror}\n")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN)


main()
