# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how a daemon stands: the protocol of sd_notify(3), a datagram for each word."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, MutableMapping

_log = logging.getLogger(__name__)

_SECONDS = 1.0
"""How long a datagram may wait for room in the manager's queue."""
_PER_INTERVAL = 4
"""Signs of life sent in one interval of the watchdog."""


class Notifier:
    """Speaks to the service manager; does nothing where none has asked for it.

    Takes the manager's variables out of ``environment``, so that no child is taken for the daemon.
    ``clock`` gives monotonic seconds. Nothing here raises: a manager that can't be told ends what
    it doesn't hear from, and says so.
    """

    def __init__(
        self,
        environment: MutableMapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._clock = clock
        self._every = math.inf
        if interval.isdecimal() and watched in ("", str(os.getpid())):
            self._every = int(interval) / 1e6 / _PER_INTERVAL
        self._alive_at = -math.inf
        self._status = ""

    def ready(self) -> None:
        """The daemon serves: ``systemctl start`` returns, and the watchdog begins."""
        self._alive_at = self._clock()
        self._send("READY=1")

    def alive(self, status: str = "") -> None:
        """The daemon has got on with its work; call it as often as that is so.

        ``status``: a line for ``systemctl status``, sent when it is another one.
        """
        words = []
        if status and status != self._status:
            self._status = status
            words.append(f"STATUS={status}")
        now = self._clock()
        if now >= self._alive_at + self._every:
            self._alive_at = now
            words.append("WATCHDOG=1")
        if words:
            self._send("\n".join(words))

    def _send(self, words: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.settimeout(_SECONDS)
                manager.sendto(words.encode(), self._address)
        except OSError as error:
            _log.warning("the service manager was not told %r: %s", words, error)
