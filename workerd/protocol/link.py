# SPDX-License-Identifier: Apache-2.0
"""The link between workerd and one trainer: one protobuf message a packet over SOCK_SEQPACKET."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from typing import Final, Generic, TypeVar, cast

from google.protobuf.message import DecodeError

from protos.trainer_pb2 import (
    Broken,
    Committed,
    Done,
    Failed,
    FromTrainer,
    Held,
    Hello,
    Hold,
    Joined,
    Ready,
    Release,
    Restore,
    Restored,
    Running,
    Stop,
    Stopped,
    ToTrainer,
    Welcome,
)

# What workerd puts into a trainer's environment.
SOCKET_VARIABLE: Final = "HOTSPARE_SOCKET"  # path of workerd's Unix socket
INSTANCE_VARIABLE: Final = "HOTSPARE_INSTANCE"  # this life of this trainer
PAGE_VARIABLE: Final = "HOTSPARE_PAGE"  # path of this instance's progress page

MAX_PACKET_BYTES: Final = 128 * 1024  # fits into the kernel's default socket buffer
MAX_TEXT: Final = 32 * 1024  # characters of a traceback or an error in a message

Downward = Welcome | Stop | Restore | Running | Hold | Release
Upward = Hello | Ready | Stopped | Restored | Joined | Committed | Held | Broken | Done | Failed

Out = TypeVar("Out")
In = TypeVar("In")

_DOWNWARD: Final[dict[type, str]] = {
    Welcome: "welcome",
    Stop: "stop",
    Restore: "restore",
    Running: "running",
    Hold: "hold",
    Release: "release",
}
_UPWARD: Final[dict[type, str]] = {
    Hello: "hello",
    Ready: "ready",
    Stopped: "stopped",
    Restored: "restored",
    Joined: "joined",
    Committed: "committed",
    Held: "held",
    Broken: "broken",
    Done: "done",
    Failed: "failed",
}


class LinkError(Exception):
    """Something is wrong with the link."""


class LinkClosed(LinkError):
    """The other end is gone, or this end has been closed."""


class LinkTimeout(LinkError):
    """The time given to a call has passed; the link is as it was before the call."""


class MalformedPacket(LinkError):
    """A packet is too large, or it holds no message that this side takes."""


class Link(Generic[Out, In]):
    """One end of a connected link. Any thread may send; one thread at a time may receive."""

    def __init__(
        self,
        connection: socket.socket,
        envelope: type[ToTrainer] | type[FromTrainer],
        incoming: type[ToTrainer] | type[FromTrainer],
        fields: dict[type, str],
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._envelope = envelope
        self._incoming = incoming
        self._fields = fields
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The descriptor, to wait on for input; -1 once closed."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """The process that has made the other end, as the kernel tells it."""
        size = struct.calcsize("3i")
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[0])

    def send(self, message: Out, timeout: float = 10.0) -> None:
        """Sends one message within `timeout` seconds.

        Raises MalformedPacket if it is larger than MAX_PACKET_BYTES, LinkTimeout if the other
        end takes nothing, LinkClosed if it is gone.
        """
        packet = self._envelope(**{self._fields[type(message)]: message}).SerializeToString()  # type: ignore[arg-type]
        if len(packet) > MAX_PACKET_BYTES:
            raise MalformedPacket(
                f"a {type(message).__name__} of {len(packet)} bytes; {MAX_PACKET_BYTES} are allowed"
            )
        deadline = time.monotonic() + timeout
        with self._sending:
            while True:
                try:
                    self._socket.send(packet)
                    return
                except BlockingIOError:
                    _wait(self._socket, select.POLLOUT, deadline)
                except OSError as error:
                    raise LinkClosed(f"cannot send: {error}") from error

    def receive(self, timeout: float | None = None) -> In:
        """The next message, within `timeout` seconds (None: however long it takes).

        Raises LinkTimeout when none came, LinkClosed when the other end is gone, MalformedPacket
        for a packet that is no message for this side; it is taken off the link.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES + 1)
                break
            except BlockingIOError:
                _wait(self._socket, select.POLLIN, deadline)
            except OSError as error:
                raise LinkClosed(f"cannot receive: {error}") from error
        if not packet:
            raise LinkClosed("the other end has closed the link")
        if len(packet) > MAX_PACKET_BYTES:
            raise MalformedPacket(f"a packet of more than {MAX_PACKET_BYTES} bytes")
        try:
            envelope = self._incoming.FromString(packet)
        except DecodeError as error:
            raise MalformedPacket(f"a packet of {len(packet)} bytes is no message") from error
        field = envelope.WhichOneof("message")
        if field is None:
            raise MalformedPacket("a message of a kind that is not known here")
        return cast(In, getattr(envelope, field))

    def close(self) -> None:
        """Closes this end. A call that waits in another thread ends with LinkClosed."""
        with contextlib.suppress(OSError):  # the other end may have gone first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_inherited(self) -> None:
        """Closes the descriptor that a fork has copied; the parent's link goes on."""
        self._socket.close()


def _wait(waited: socket.socket, events: int, deadline: float | None) -> None:
    descriptor = waited.fileno()
    if descriptor < 0:
        raise LinkClosed("this end has been closed")
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise LinkTimeout("the time to wait has passed")
    poll = select.poll()
    poll.register(descriptor, events)
    poll.poll(None if left is None else left * 1000)


TrainerEnd = Link[Upward, Downward]
WorkerdEnd = Link[Downward, Upward]


def trainer_end(connection: socket.socket) -> TrainerEnd:
    """The trainer's end over a connected SOCK_SEQPACKET socket."""
    return Link(connection, FromTrainer, ToTrainer, _UPWARD)


def workerd_end(connection: socket.socket) -> WorkerdEnd:
    """workerd's end over a connected SOCK_SEQPACKET socket."""
    return Link(connection, ToTrainer, FromTrainer, _DOWNWARD)


def connect(path: str | os.PathLike[str], timeout: float = 10.0) -> TrainerEnd:
    """Connects a trainer to workerd's socket. Raises LinkClosed if workerd is not there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout)
    try:
        connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise LinkClosed(f"cannot reach workerd at {os.fspath(path)}: {error}") from error
    return trainer_end(connection)


class Listener:
    """workerd's socket, for its own user alone."""

    def __init__(self, path: str | os.PathLike[str], backlog: int = 64) -> None:
        """Binds `path`. Raises OSError if it is taken or too long for a Unix socket."""
        self._path = os.fspath(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(self._path)
            os.chmod(self._path, 0o600)
            self._socket.listen(backlog)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, to wait on for trainers; -1 once closed."""
        return self._socket.fileno()

    def accept(self, timeout: float | None = None) -> WorkerdEnd:
        """The next trainer that connects, within `timeout` seconds.

        Raises LinkTimeout when none came, LinkClosed once the listener is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                connection, _ = self._socket.accept()
                return workerd_end(connection)
            except BlockingIOError:
                _wait(self._socket, select.POLLIN, deadline)
            except OSError as error:
                raise LinkClosed(f"the listener is closed: {error}") from error

    def close(self) -> None:
        """Stops listening and removes the path."""
        with contextlib.suppress(OSError):  # closing alone does not wake a waiting accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
