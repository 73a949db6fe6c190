# SPDX-License-Identifier: Apache-2.0
"""As much of HTTP/2 (RFC 9113) as a prober needs of a gRPC server: pings, and small calls.

gRPC's own channels don't say why a connection ended: to them a refused, a reset and a silent
one are all UNAVAILABLE, and here that is the whole question. One object a connection, no task.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
_ACK, _END_STREAM, _END_HEADERS = 0x1, 0x1, 0x4
_HEAD = 9
_MAX_FRAME = 16_384
"""What a peer may send in one frame unless it is told otherwise, which it isn't."""
_MAX_ANSWER = 65_536


class CallFailed(Exception):
    """The server has ended a call without an answer, or the connection is gone."""


class Connection(asyncio.Protocol):
    """One connection to a gRPC server. Owned by the loop's thread.

    ``over`` is called, once, when the connection has ended.
    """

    def __init__(self, authority: str, over: Callable[[], None]) -> None:
        self._authority = authority
        self._over = over
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._calls: dict[int, tuple[bytearray, asyncio.Future[bytes]]] = {}
        self._stream = 1
        self._pings = 0
        self.answered = 0
        """The number of the latest ping that has come back."""
        self.ended = ""
        """Why the connection has ended; empty while it stands."""

    def ping(self) -> int:
        """Send one; returns its number, which :attr:`answered` reaches when it comes back."""
        self._pings += 1
        self._send(_PING, 0, 0, struct.pack(">Q", self._pings))
        return self._pings

    def call(self, path: str, message: bytes) -> asyncio.Future[bytes]:
        """Make a unary call; the future has its answer, or raises :class:`CallFailed`."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.ended:
            future.set_exception(CallFailed(self.ended))
            return future
        stream, self._stream = self._stream, self._stream + 2
        self._calls[stream] = (bytearray(), future)
        headers = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
        self._send(_HEADERS, _END_HEADERS, stream, b"".join(_literal(*one) for one in headers))
        self._send(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, len(message)) + message)
        return future

    def close(self) -> None:
        """End the connection at once; what is under way has failed."""
        self._end("it was closed here")
        if self._transport is not None:
            self._transport.abort()

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The kernel over there has accepted it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_PREFACE)
        self._send(_SETTINGS, 0, 0, b"")

    def data_received(self, data: bytes) -> None:
        """Take the frames that are whole."""
        self._buffer += data
        while len(self._buffer) >= _HEAD and not self.ended:
            size = int.from_bytes(self._buffer[:3], "big")
            if size > _MAX_FRAME:
                self._end("who answers there does not speak HTTP/2")
                self.close()
                return
            if len(self._buffer) < _HEAD + size:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:_HEAD], "big") & 0x7FFF_FFFF
            payload = bytes(self._buffer[_HEAD : _HEAD + size])
            del self._buffer[: _HEAD + size]
            self._take(kind, flags, stream, payload)

    def connection_lost(self, error: Exception | None) -> None:
        """It has ended."""
        self._end(f"the connection was broken: {error}" if error else "the connection was closed")

    # ---- frames

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _PING and flags & _ACK and len(payload) == 8:
            self.answered = max(self.answered, struct.unpack(">Q", payload)[0])
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, _ACK, 0, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._send(_SETTINGS, _ACK, 0, b"")
        elif kind == _DATA:
            self._data(flags, stream, payload)
        elif (kind == _HEADERS and flags & _END_STREAM) or kind == _RESET:
            self._answer(stream)
        elif kind == _GOAWAY:
            self._end("the server says goodbye")
            self.close()

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        if payload:  # else the window of the whole connection would be used up in the end
            self._send(_WINDOW, 0, 0, struct.pack(">I", len(payload)))
        if stream in self._calls:
            self._calls[stream][0].extend(payload)
            if len(self._calls[stream][0]) > _MAX_ANSWER:
                self._end("an answer is too long")
                self.close()
                return
        if flags & _END_STREAM:
            self._answer(stream)

    def _answer(self, stream: int) -> None:
        """A call has ended. Its status needs no reading: with an error comes no message."""
        if stream not in self._calls:
            return
        data, future = self._calls.pop(stream)
        if future.done():
            return
        if len(data) < 5 or data[0] or len(data) != 5 + int.from_bytes(data[1:5], "big"):
            future.set_exception(CallFailed("the call was refused"))
        else:
            future.set_result(bytes(data[5:]))

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            head = (
                len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
            )
            self._transport.write(head + payload)

    def _end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = why
        calls, self._calls = self._calls, {}
        for _, future in calls.values():
            if not future.done():
                future.set_exception(CallFailed(why))
                future.exception()  # whoever waits gets it; nobody may be waiting any more
        self._over()


def _literal(name: str, value: str) -> bytes:
    """A header in HPACK (RFC 7541, 6.2.2): literal, not indexed, not compressed."""
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
