# SPDX-License-Identifier: Apache-2.0
"""Where a daemon's log goes: to the journal with fields, where stderr leads there, else as text.

``journalctl HOTSPARE_JOB=gpt`` and ``HOTSPARE_NODE=n0`` then find what was said about a job or a
node, on all units. A log record names them by ``extra={"job": ..., "node": ...}``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Final, TextIO

JOURNAL: Final = "/run/systemd/journal/socket"

_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4))
_INFO, _DEBUG = 6, 7
_STDERR: Final = 2


def configure(daemon: str, level: str, text: str, node: str = "") -> None:
    """Set the root logger up. ``text`` is the format outside of the journal, ``node`` the own one.

    A crash, and a watchdog's SIGABRT, print the stack of every thread on stderr.
    """
    handler: logging.Handler
    if leads_to_journal(os.environ, sys.stderr):
        handler = JournalHandler(daemon, node, sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        # Also in what is printed past it: a child must not take its stderr for the journal.
        os.environ.pop("JOURNAL_STREAM", None)
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(text))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    faulthandler.enable(_STDERR)


def leads_to_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """Whether systemd has connected this stream to the journal."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class JournalHandler(logging.Handler):
    """Writes records to journald in its own protocol, a datagram for each.

    What it doesn't take (too large, or it isn't there) goes to ``stderr`` with the priority in
    front, which the journal understands too.
    """

    def __init__(self, daemon: str, node: str, stderr: TextIO, journal: str = JOURNAL) -> None:
        super().__init__()
        self._daemon = daemon
        self._node = node
        self._stderr = stderr
        self._journal = journal
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            message = self.format(record)
            fields = {
                "MESSAGE": message,
                "PRIORITY": str(_priority(record.levelno)),
                "SYSLOG_IDENTIFIER": self._daemon,
                "HOTSPARE_NODE": str(getattr(record, "node", "") or self._node),
                "HOTSPARE_JOB": str(getattr(record, "job", "")),
                "LOGGER": record.name,
                "THREAD_NAME": record.threadName or "",
            }
            try:
                self._socket.sendto(encode(fields), self._journal)
            except OSError:
                mark = f"<{_priority(record.levelno)}>"
                self._stderr.writelines(f"{mark}{line}\n" for line in message.splitlines())
                self._stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler: a log record breaks nothing
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()


def encode(fields: Mapping[str, str]) -> bytes:
    """A journal entry; a value of several lines goes with its length. Empty ones are left out."""
    parts = []
    for name, value in fields.items():
        data = value.encode(errors="replace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        elif data:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


def _priority(level: int) -> int:
    for least, priority in _PRIORITIES:
        if level >= least:
            return priority
    return _INFO if level >= logging.INFO else _DEBUG
