# SPDX-License-Identifier: Apache-2.0
"""The agreement between PREPARED and UPDATING: a barrier over sockets of its own.

A dissemination barrier (Hensgen, Finkel and Manber, 1988): in round k rank r tells rank r + 2**k,
and hears of rank r - 2**k; after ceil(log2(n)) rounds all have heard of all. Bits that are joined
by "or" travel along, since it does no harm to hear of one twice. The main thread itself sends and
receives: by way of Gloo's threads it took several times as long, at every step.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any, Final

_TOKEN: Final = 16
_HELLO: Final = struct.Struct(f"!{_TOKEN}sII")  # the listener's token, the caller's rank, the round


class Barrier:
    """One group's barrier. `meet` is one thread's; `end` may come from any other."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        address: str,
        *,
        build: timedelta,
        wait: timedelta,
    ) -> None:
        """Meets the other ranks by `store` within `build`; `wait` bounds every later `meet`.

        Raises OSError when a rank doesn't come, and what the store raises.
        """
        self._using = threading.Lock()
        self._rounds: list[tuple[socket.socket, socket.socket]] = []
        with contextlib.ExitStack() as opened:
            rounds = (size - 1).bit_length()
            told, heard = _connect(store, rank, size, rounds, address, opened, build)
            for one in told + heard:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.settimeout(wait.total_seconds())
            self._rounds = list(zip(told, heard, strict=True))
            opened.pop_all()

    def meet(self, bits: int = 0) -> int:
        """Returns, with the "or" of all ranks' `bits` (one byte), once every rank has come.

        Raises OSError when a rank has left, the wait was too long, or `end` was called.
        """
        with self._using:
            for out, into in self._rounds:
                out.sendall(bytes((bits,)))
                heard = into.recv(1)
                if not heard:
                    raise ConnectionResetError("a rank has left the agreement")
                bits |= heard[0]
        return bits

    def end(self) -> None:
        """Wakes whoever is in `meet`, which raises, here and at those that wait for this rank."""
        for pair in self._rounds:
            for one in pair:
                with contextlib.suppress(OSError):  # the peer may have gone first
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the sockets back, once nobody uses them. After `end`."""
        with self._using:
            for pair in self._rounds:
                for one in pair:
                    one.close()


def _connect(
    store: Any,
    rank: int,
    size: int,
    rounds: int,
    address: str,
    opened: contextlib.ExitStack,
    timeout: timedelta,
) -> tuple[list[socket.socket], list[socket.socket]]:
    """The sockets to tell by, round by round, and those to hear by."""
    deadline = time.monotonic() + timeout.total_seconds()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    token = secrets.token_bytes(_TOKEN)
    told: list[socket.socket] = []
    heard: dict[int, socket.socket] = {}
    with socket.create_server((address, 0), family=family, backlog=rounds + 8) as listener:
        port = listener.getsockname()[1]
        store.set(f"{rank}", token + f"{address} {port}".encode())
        for number in range(rounds):
            said = bytes(store.get(f"{(rank + (1 << number)) % size}"))
            host, peer_port = said[_TOKEN:].decode().split(" ")
            one = socket.create_connection((host, int(peer_port)), _left(deadline))
            told.append(opened.enter_context(one))
            one.sendall(_HELLO.pack(said[:_TOKEN], rank, number))
        while len(heard) < rounds:
            listener.settimeout(_left(deadline))
            one, _ = listener.accept()
            opened.enter_context(one)
            one.settimeout(_left(deadline))
            hello = one.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) < _HELLO.size:
                continue
            given, peer, number = _HELLO.unpack(hello)
            expected = number < rounds and peer == (rank - (1 << number)) % size
            # A stranger, or somebody who takes this port for another's, is not listened to.
            if secrets.compare_digest(given, token) and expected:
                heard[number] = one
    return told, [heard[number] for number in range(rounds)]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not every rank has come to the agreement in time")
    return left
