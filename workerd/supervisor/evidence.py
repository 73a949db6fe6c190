# SPDX-License-Identifier: Apache-2.0
"""What the kernel and its own files say about a trainer that has ended."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CORE_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
_CORE_USES_PID: Final = Path("/proc/sys/kernel/core_uses_pid")
_VMSTAT: Final = Path("/proc/vmstat")
_ERROR_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process has ended; ``signal`` is 0 when it exited by itself."""

    code: int = 0
    signal: int = 0
    core: str = ""  # where its core was dumped to; empty when none was
    stderr: str = ""  # the end of what it wrote there
    error_file: str = ""  # what it left for torch.distributed.elastic
    oom_kills: int = 0  # processes of this host that the kernel killed for memory in its life


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since the host's start.

    Those killed for the limit of a cgroup are counted too. 0 where the kernel doesn't say (before
    4.13).
    """
    try:
        found = re.search(r"^oom_kill (\d+)$", _VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def error_file(path: Path) -> str:
    """The traceback in an error file as ``torch.distributed.elastic`` writes it.

    Empty when there is none; what can't be understood is given as it is. Source: the ErrorHandler
    of torch.distributed.elastic.multiprocessing.errors.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_ERROR_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    try:
        said = json.loads(text)["message"]
        if isinstance(said, str):
            return said
        stack = said.get("extraInfo", {}).get("py_callstack")
        return str(stack or said["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text


def core(pid: int, directory: str) -> str:
    """Where the core of a process that ran in ``directory`` was dumped to (see core(5))."""
    try:
        pattern = CORE_PATTERN.read_text().rstrip("\n")
        uses_pid = _CORE_USES_PID.read_text().strip() != "0"
    except OSError as error:
        return f"dumped; where to can't be read: {error}"
    if pattern.startswith("|"):
        return f"given to {pattern[1:].split()[0]}"
    names = "".join(_expanded(pattern, pid))
    if uses_pid and "%p" not in pattern:
        names += f".{pid}"
    found = glob.glob(os.path.join(glob.escape(directory or os.getcwd()), names))
    if not found:
        return f"dumped as {pattern}; not found in {directory or os.getcwd()}"
    return max(found, key=os.path.getmtime)


def _expanded(pattern: str, pid: int) -> Iterator[str]:
    """A glob for the names that a core pattern stands for."""
    for part in re.findall(r"%.?|[^%]+", pattern):
        if not part.startswith("%"):
            yield glob.escape(part)
        elif part == "%%":
            yield "%"
        elif part == "%p":
            yield str(pid)
        elif len(part) > 1:
            yield "*"
