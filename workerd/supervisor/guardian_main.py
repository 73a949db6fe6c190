# SPDX-License-Identifier: Apache-2.0
"""The guardian: a small process that outlives workerd's SIGKILL just long enough to clean up.

``python -I -S guardian_main.py FOLDER MARK``, with FOLDER holding ``sweep.py`` and MARK the
``NAME=value`` in the environment of every trainer of one workerd. Its standard input is a pipe
whose other end only workerd holds. workerd writes ``+PID`` when a trainer (which leads a session)
has started and ``-PID`` when nothing of it is left; the end of the pipe is workerd's end.
"""

import signal
import sys
import time

PATIENCE = 30.0


def main() -> None:
    folder, mark = sys.argv[1:]
    sys.path.insert(0, folder)
    import sweep  # type: ignore[import-not-found]  # found in FOLDER: -I leaves it out

    # A stop of the whole service reaches it too; it goes when workerd has gone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line.startswith("+"):
            sessions.add(pid)
        else:
            sessions.discard(pid)
    deadline = time.monotonic() + PATIENCE
    sweep.sweep(sessions, {mark.encode()}, lambda: time.monotonic() >= deadline)


main()
