# SPDX-License-Identifier: Apache-2.0
"""Another process's TCP connections: seen, and broken without its help as a failing link does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_SYS_PIDFD_GETFD = 438  # the same on x86-64 and arm64
_ESTABLISHED = "01"
_TCP_INFO_BYTES = 256
_BYTES_RECEIVED_AT = 128  # in the kernel's struct tcp_info


def _established() -> set[str]:
    """The inodes of all established TCP sockets."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return {row[9] for row in rows if row[3] == _ESTABLISHED}


def _numbers(pid: int) -> list[int]:
    """The descriptors of a process's established TCP connections."""
    living = _established()
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:[") and target[8:-1] in living:
                    found.append(int(name))
    return found


def connections(pid: int) -> Iterator[socket.socket]:
    """Copies of a process's established TCP connections, each closed when the next one is asked.

    Raises PermissionError where the kernel doesn't let this process take another's descriptors.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for number in _numbers(pid):
            taken = libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
            error = ctypes.get_errno()
            if taken >= 0:
                with socket.socket(fileno=taken) as connection:
                    yield connection
            elif isinstance(OSError(error, ""), PermissionError):
                raise PermissionError(error, os.strerror(error))
    finally:
        os.close(process)


def shut_down_connections(pid: int) -> int:
    """Shut every established TCP connection of a process down; returns how many."""
    count = 0
    for connection in connections(pid):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def receives_from(pid: int, least: int) -> int | None:
    """The peer's port of a connection over which a process has received so many bytes."""
    for connection in connections(pid):
        with contextlib.suppress(OSError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)
            if received >= least:
                return int(connection.getpeername()[1])
    return None


def has_port(pid: int, port: int) -> bool:
    """Whether a port is the local one of a connection of a process."""
    for connection in connections(pid):
        with contextlib.suppress(OSError):
            if connection.getsockname()[1] == port:
                return True
    return False
