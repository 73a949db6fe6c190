# SPDX-License-Identifier: Apache-2.0
"""One thread that waits for the end of processes and only says so."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable


class EndWatcher:
    """Calls ``sink(name)`` once for each watched process when it has ended; it is not reaped."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._new: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="process-ends", daemon=True)
        self._thread.start()

    def watch(self, pid: int, name: str) -> None:
        """Watch a child that has not been reaped. Raises OSError."""
        self._new.put((os.pidfd_open(pid), name))
        os.write(self._pipe[1], b".")

    def close(self) -> None:
        """End the thread; ends that come later are not told."""
        self._new.put(None)
        os.write(self._pipe[1], b".")
        self._thread.join()
        for descriptor in self._pipe:
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe[0], select.POLLIN)
        names: dict[int, str] = {}
        try:
            while True:
                for descriptor, _ in poll.poll():
                    if descriptor == self._pipe[0]:
                        os.read(descriptor, 4096)
                        while not self._new.empty():
                            item = self._new.get()
                            if item is None:
                                return
                            names[item[0]] = item[1]
                            poll.register(item[0], select.POLLIN)
                    else:
                        poll.unregister(descriptor)
                        os.close(descriptor)
                        self._sink(names.pop(descriptor))
        finally:
            for descriptor in names:
                os.close(descriptor)
