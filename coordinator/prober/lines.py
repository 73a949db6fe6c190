# SPDX-License-Identifier: Apache-2.0
"""Reaching a node, and what became of a try. Raises nothing but cancellation."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from coordinator.model import Answer, Line, Statement
from coordinator.prober.http2 import CallFailed, Connection
from protos import node_pb2

_PROBE = "/hotspare.v1.NodeService/Probe"
_REACH = "/hotspare.v1.NodeService/Reach"
_SYNS = 2
"""Tries within one's time: the kernel repeats a lost packet only after a second."""
# Nobody there answers. Everything else that a kernel says before a connection stands is its own
# trouble, or a router's: no evidence against a node.
_NOBODY = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN})


@dataclass(frozen=True, slots=True)
class Failed:
    """A try that led to nobody, or to somebody else."""

    line: Line
    detail: str


async def reach(
    node: str, incarnation: str, address: str, patience: float, over: Callable[[], None]
) -> Connection | Failed:
    """Connect to a workerd and ask who it is.

    ``patience``: seconds for the connection, and again for the answer. ``over`` is called when the
    connection that is returned ends.
    """
    connection = await _connect(address, patience, over)
    if isinstance(connection, Failed):
        return connection
    try:
        asked = connection.call(_PROBE, node_pb2.ProbeRequest().SerializeToString())
        reply = node_pb2.ProbeReply.FromString(await asyncio.wait_for(asked, patience))
    except asyncio.TimeoutError:
        connection.close()
        return Failed(
            Line.FROZEN,
            f"the kernel at {address} accepts connections, workerd does not answer "
            f"in {patience:g} s",
        )
    except (CallFailed, DecodeError) as error:
        connection.close()
        return Failed(Line.LOST, f"{address}: {error}")
    except asyncio.CancelledError:
        connection.close()
        raise
    if (reply.node, reply.incarnation) != (node, incarnation):
        connection.close()
        return Failed(
            Line.REPLACED,
            f"{address} answers as node {reply.node}, incarnation {reply.incarnation}",
        )
    return connection


async def _connect(address: str, patience: float, over: Callable[[], None]) -> Connection | Failed:
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return Failed(Line.UNKNOWN, f"{address!r} is no address")
    for _ in range(_SYNS):
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(
                    lambda: Connection(address, over), host.strip("[]"), int(port)
                ),
                patience / _SYNS,
            )
        except asyncio.TimeoutError:
            continue
        except ConnectionRefusedError:
            return Failed(Line.REFUSED, f"{address}: connection refused")
        except (ConnectionResetError, ConnectionAbortedError) as error:
            return Failed(Line.LOST, f"{address}: {error}")
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno in _NOBODY:
                return Failed(Line.SILENT, f"{address}: {error.strerror}")
            return Failed(Line.UNKNOWN, f"{address}: {error}")
        return connection
    return Failed(Line.SILENT, f"nothing at {address} answers in {patience:g} s")


async def witness(
    name: str, connection: Connection | None, addresses: tuple[str, ...], patience: float
) -> Statement:
    """Ask a node whether it reaches another one; it has twice ``patience`` seconds to say."""
    if connection is None:
        return Statement(name, Answer.NONE, "it can't be asked")
    request = node_pb2.ReachRequest(addresses=addresses, timeout_ms=round(1000 * patience))
    try:
        asked = connection.call(_REACH, request.SerializeToString())
        reply = node_pb2.ReachReply.FromString(await asyncio.wait_for(asked, 2 * patience))
    except asyncio.TimeoutError:
        return Statement(name, Answer.NONE, f"it has not answered in {2 * patience:g} s")
    except (CallFailed, DecodeError) as error:
        return Statement(name, Answer.NONE, str(error))
    known = {one.value for one in Answer}
    return Statement(
        name, Answer(reply.answer) if reply.answer in known else Answer.NONE, reply.detail
    )
