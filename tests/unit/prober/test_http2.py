# SPDX-License-Identifier: Apache-2.0
"""The prober's HTTP/2 against gRPC's, and against what isn't HTTP/2 at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.prober.http2 import CallFailed, Connection
from protos.node_pb2 import ProbeReply
from workerd.agent.probe import ProbeServer

SOON = 20.0
_PROBE = "/hotspare.v1.NodeService/Probe"


@pytest.fixture
def server() -> Iterator[str]:
    there = ProbeServer("127.0.0.1:0", ProbeReply(node="n0", incarnation="a", boot_id="b"))
    yield there.address
    there.close()


async def _open(address: str) -> Connection:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(address, lambda: None), host, int(port)
    )
    return connection


async def _until_answered(connection: Connection, number: int) -> None:
    deadline = time.monotonic() + SOON
    while connection.answered < number:
        assert not connection.ended
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_calls_and_pings(server: str) -> None:
    async def talk() -> None:
        connection = await _open(server)
        for _ in range(300):  # more than the first window of flow control has room for
            found = ProbeReply.FromString(await connection.call(_PROBE, b""))
            assert (found.node, found.incarnation, found.boot_id) == ("n0", "a", "b")
        for _ in range(300):
            number = connection.ping()
        await _until_answered(connection, number)
        connection.close()
        assert connection.ended

    asyncio.run(talk())


def test_a_call_that_the_server_doesn_t_know_fails_and_the_connection_stays(server: str) -> None:
    async def talk() -> None:
        connection = await _open(server)
        with pytest.raises(CallFailed):
            await asyncio.wait_for(connection.call("/hotspare.v1.NodeService/Other", b""), SOON)
        await connection.call(_PROBE, b"")
        connection.close()
        with pytest.raises(CallFailed):
            await connection.call(_PROBE, b"")

    asyncio.run(talk())


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_taken_without_an_error(chunks: list[bytes]) -> None:
    async def talk() -> None:
        connection = Connection("there", lambda: None)
        connection.connection_made(_Transport())
        waiting = connection.call(_PROBE, b"")
        for chunk in chunks:
            connection.data_received(chunk)
        connection.connection_lost(None)
        assert connection.ended
        assert waiting.done()

    asyncio.run(talk())


@given(st.data())
def test_an_answer_may_come_in_any_pieces(data: st.DataObject) -> None:
    message = data.draw(st.binary(max_size=40))
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    cut = data.draw(st.integers(0, len(body)))
    stream = (
        _frame(0x4, 0, 0, b"")
        + _frame(0x1, 0x4, 1, b"\x88")
        + _frame(0x0, 0, 1, body[:cut])
        + _frame(0x6, 0, 0, b"12345678")
        + _frame(0x0, 0, 1, body[cut:])
        + _frame(0x1, 0x5, 1, b"\x88")
    )

    async def talk() -> None:
        connection = Connection("there", lambda: None)
        connection.connection_made(_Transport())
        waiting = connection.call(_PROBE, b"")
        at = 0
        while at < len(stream):
            size = data.draw(st.integers(1, 30))
            connection.data_received(stream[at : at + size])
            at += size
        assert await waiting == message
        assert not connection.ended

    asyncio.run(talk())
