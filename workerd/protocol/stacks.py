# SPDX-License-Identifier: Apache-2.0
"""The stacks of a trainer that stands still, written by a signal's handler in the process itself.

The handler is of the C kind (faulthandler): it needs neither the main thread nor the interpreter's
lock, so a trainer that waits in a collective, sleeps or spins answers as well. A stopped process,
or one that sleeps in the kernel uninterruptibly, doesn't: what the kernel says of its threads is
all there is then.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

SIGNAL: Final = signal.SIGRTMIN + 10
"""Above those that glibc and common runtimes use."""

_NAME: Final = "stacks"
_MOST: Final = 1 << 16  # bytes that are read


def of_page(page: str | os.PathLike[str]) -> Path:
    """Where the stacks of the trainer with this progress page go."""
    return Path(page).with_name(_NAME)


def register(page: str | os.PathLike[str]) -> None:
    """In the trainer: from now on the signal writes all threads' stacks. Raises OSError."""
    # Never closed: the handler writes to its descriptor.
    file = os.open(of_page(page), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)


def ask(pid: int, page: str | os.PathLike[str]) -> bool:
    """In workerd: asks for the stacks anew; whether the process has a handler that will answer."""
    if not _catches(pid):
        return False
    of_page(page).write_bytes(b"")
    os.kill(pid, SIGNAL)
    return True


def read(page: str | os.PathLike[str]) -> str:
    """What a trainer has written so far."""
    try:
        with of_page(page).open("rb") as file:
            return file.read(_MOST).decode(errors="replace").strip()
    except OSError:
        return ""


def threads(pid: int) -> str:
    """What the kernel says of a process's threads: name, state as in proc(5), where it waits."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            stat = (task / "stat").read_text(errors="replace")
            where = (task / "wchan").read_text(errors="replace").strip("0\n")
        except OSError:
            continue  # it has ended
        name, _, rest = stat.partition("(")[2].rpartition(")")
        lines.append(f"{task.name} {name}: {rest.split()[0]} {where}".rstrip())
    return "\n".join(lines)


def _catches(pid: int) -> bool:
    """Whether a process handles the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (SIGNAL - 1) & 1)
    return False
