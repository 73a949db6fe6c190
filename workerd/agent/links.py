# SPDX-License-Identifier: Apache-2.0
"""The Unix socket that trainers meet workerd on. Its threads only say what has come."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from protos.trainer_pb2 import Hello
from workerd.protocol.link import (
    LinkClosed,
    LinkTimeout,
    Listener,
    MalformedPacket,
    Upward,
    WorkerdEnd,
)

_log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long a connection may take to say who it is."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A process says that it is a trainer: to be believed only if ``peer`` is that trainer's."""

    number: int
    link: WorkerdEnd
    instance: str
    peer: int


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """A trainer has said something."""

    number: int
    message: Upward


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A link is closed."""

    number: int
    reason: str


LinkEvent: TypeAlias = LinkUp | LinkMessage | LinkDown


def belongs(peer: int, trainer: int) -> bool:
    """Whether a process is a trainer's, or in its session: started by it, that is."""
    try:
        return os.getsid(peer) == trainer and os.stat(f"/proc/{peer}").st_uid == os.getuid()
    except OSError:
        return False


class LinkServer:
    """Accepts trainers; ``sink`` is called on the threads of this class."""

    def __init__(self, listener: Listener, sink: Callable[[LinkEvent], None]) -> None:
        self._listener = listener
        self._sink = sink
        self._numbers = itertools.count(1)
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def close(self) -> None:
        """Take no more trainers."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                link = self._listener.accept()
            except LinkClosed:
                return
            number = next(self._numbers)
            threading.Thread(
                target=self._serve, args=(number, link), name=f"link-{number}", daemon=True
            ).start()

    def _serve(self, number: int, link: WorkerdEnd) -> None:
        try:
            peer = link.peer_pid()
            hello = link.receive(HELLO_SECONDS)
        except (LinkClosed, LinkTimeout, MalformedPacket, OSError) as error:
            _log.warning("a connection to the trainers' socket said no hello: %s", error)
            link.close()
            return
        if not isinstance(hello, Hello):
            _log.warning("process %s began with %s, not with hello", peer, type(hello).__name__)
            link.close()
            return
        self._sink(LinkUp(number, link, hello.instance, peer))
        while True:
            try:
                message = link.receive()
            except MalformedPacket as error:
                _log.warning("trainer %s: %s", hello.instance, error)
                continue
            except (LinkClosed, LinkTimeout) as error:
                self._sink(LinkDown(number, str(error)))
                return
            self._sink(LinkMessage(number, message))
