# SPDX-License-Identifier: Apache-2.0
"""The runtime folder: lock, socket, and for each trainer its page and what it prints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import deque
from pathlib import Path

KEPT = 16
"""Folders of ended trainers that stay, for people to read what they printed."""

_SOCKET_PATH_BYTES = 107  # what a Unix socket's address holds, less its final zero
_TAIL_BYTES = 8192
_TAIL_LINES = 20
_TAIL_CHARACTERS = 2000


class RuntimeFolderError(Exception):
    """The folder can't be used: the text says why."""


class RuntimeFolder:
    """One workerd's folder, mode 0700, locked while this process lives.

    Raises :class:`RuntimeFolderError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket = self.path / "sock"
        self._trainers = self.path / "trainers"
        self._ended: deque[Path] = deque()
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            raise RuntimeFolderError(
                f"runtime folder {self.path}: too long for the Unix socket in it; "
                f"{_SOCKET_PATH_BYTES - len('/sock')} bytes are allowed"
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.stat().st_uid != os.getuid():
                raise RuntimeFolderError(f"runtime folder {self.path}: belongs to another user")
            self.path.chmod(0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise RuntimeFolderError(
                    f"runtime folder {self.path}: another workerd is using it"
                ) from None
            # What a workerd that was killed has left: nobody uses it, the lock says.
            self.socket.unlink(missing_ok=True)
            shutil.rmtree(self._trainers, ignore_errors=True)
            self._trainers.mkdir(mode=0o700)
        except OSError as error:
            raise RuntimeFolderError(f"runtime folder {self.path}: {error}") from error

    def trainer(self, instance: str) -> Path:
        """A new folder for a trainer."""
        folder = self._trainers / instance
        folder.mkdir(mode=0o700)
        return folder

    def page(self, instance: str) -> Path:
        """Where a trainer's progress page is."""
        return self._trainers / instance / "page"

    def output(self, instance: str, stream: str) -> Path:
        """Where what it prints goes; ``stream`` is stdout or stderr."""
        return self._trainers / instance / stream

    def error_file(self, instance: str) -> Path:
        """Where it may leave what it raised."""
        return self._trainers / instance / "error.json"

    def last_words(self, instance: str) -> str:
        """The last lines that a trainer has written to stderr: at most 20, 2,000 characters."""
        try:
            with self.output(instance, "stderr").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"its stderr can't be read: {error}"
        lines = text.strip().splitlines()[-_TAIL_LINES:]
        return "\n".join(lines)[-_TAIL_CHARACTERS:]

    def retire(self, instance: str) -> None:
        """A trainer is gone: its page goes, its output stays until 16 later ones have ended."""
        self.page(instance).unlink(missing_ok=True)
        self._ended.append(self._trainers / instance)
        while len(self._ended) > KEPT:
            shutil.rmtree(self._ended.popleft(), ignore_errors=True)

    def close(self) -> None:
        """Give the lock back."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
