# SPDX-License-Identifier: Apache-2.0
"""The connection that carries the bytes of a pull, beside the gRPC call that asks for them.

A message of gRPC's Python layer is copied twice on either side: so a pull came to 0.45 of what a
plain TCP connection moves. Here the kernel reads from one tensor's memory and writes into the
other's. The receiver listens, and says in its call where, with a token that only the source learns.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

TOKEN_BYTES: Final = 16
GLANCE: Final = 0.02
"""Seconds between two looks at whether to go on, while nothing comes."""
PATIENCE: Final = 10.0
"""Seconds without a byte after which a connection is given up."""
_CONNECT: Final = 5.0
_HELLO: Final = 1.0
"""Seconds that somebody who has connected has for the token."""


class StreamEnded(OSError):
    """The peer has closed the connection, or nothing moved for the patience."""


class Outgoing:
    """The source's end. `shut` may be called from any thread and at any time, all else from one."""

    def __init__(self, address: str, token: bytes) -> None:
        """Connects to `address`, host:port, and says the token there.

        Raises OSError, and ValueError for an address that is none.
        """
        self._ending = threading.Lock()
        self._socket = socket.create_connection(_host_port(address), _CONNECT)
        try:
            self._socket.sendall(token)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._writable = select.poll()
        self._writable.register(self._socket, select.POLLOUT)

    def offer(self, memory: memoryview) -> int:
        """Sends what the kernel takes at once; returns the bytes, 0 for none. Raises OSError."""
        try:
            return self._socket.send(memory)
        except BlockingIOError:
            return 0

    def wait(self) -> None:
        """Waits until the kernel takes more. Raises StreamEnded when it doesn't."""
        if not self._writable.poll(PATIENCE * 1000):
            raise StreamEnded(f"the receiver has taken nothing for {PATIENCE:g} s")

    def shut(self) -> None:
        """Ends it: what is in `wait` returns, and what is offered afterwards raises."""
        with self._ending, contextlib.suppress(OSError):  # the peer, or `close`, may come first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptor back."""
        with self._ending:  # else what is shut may be somebody else's by then
            self._socket.close()


class Listener:
    """Where one source is to connect to, and what it has to say."""

    def __init__(self, host: str) -> None:
        """Raises OSError when no port of `host` can be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        """host:port"""
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def accept(self, glance: Callable[[], None]) -> Incoming:
        """The source's connection; anybody else's is closed.

        `glance` is called while nobody comes; what it raises ends the wait. Raises StreamEnded.
        """
        coming = select.poll()
        coming.register(self._socket, select.POLLIN)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not coming.poll(GLANCE * 1000):
                glance()
                continue
            try:
                one = Incoming(self._socket.accept()[0])
            except OSError:  # it was gone again
                continue
            if self._welcome(one, glance):
                return one
        raise StreamEnded("the source has not connected")

    def _welcome(self, one: Incoming, glance: Callable[[], None]) -> bool:
        said = bytearray(TOKEN_BYTES)
        try:
            one.fill(memoryview(said), glance, _HELLO)
            welcome = secrets.compare_digest(said, self.token)
        except OSError:
            welcome = False
        except BaseException:
            one.close()
            raise
        if not welcome:
            one.close()
        return welcome


class Incoming:
    """The receiver's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    def read(
        self, memory: memoryview, glance: Callable[[], None], patience: float = PATIENCE
    ) -> int:
        """Writes what has come into `memory`, at least one byte; returns how many.

        `glance` is called while nothing comes; what it raises ends the wait. Raises OSError,
        StreamEnded at the end and after `patience` seconds.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                size = self._socket.recv_into(memory)
            except BlockingIOError:
                if not self._readable.poll(GLANCE * 1000):
                    glance()
                    if time.monotonic() > deadline:
                        raise StreamEnded("the stream stalled") from None
                continue
            if not size:
                raise StreamEnded("the stream ended early")
            return size

    def fill(self, memory: memoryview, glance: Callable[[], None], patience: float) -> None:
        """As `read`, until `memory` is full."""
        while memory:
            memory = memory[self.read(memory, glance, patience) :]

    def close(self) -> None:
        """Gives the descriptor back."""
        self._socket.close()


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"not host:port: {address!r}")
    return host.strip("[]"), int(port)
