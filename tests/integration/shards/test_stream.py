# SPDX-License-Identifier: Apache-2.0
"""The connection that carries a pull's bytes, and who is let onto it."""

from __future__ import annotations

import socket
from contextlib import closing, suppress

import grpc
import pytest

from protos import shards_pb2, shards_pb2_grpc
from tests.integration.shards.support import WAIT, build, identity, in_thread
from workerd.shards import stream
from workerd.shards.server import ShardServer
from workerd.shards.stream import TOKEN_BYTES, Listener, Outgoing, StreamEnded


def _go_on() -> None:
    """Nothing ends this wait."""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_bytes_arrive_and_then_the_end(host: str) -> None:
    try:
        opened = Listener(host)
    except OSError as error:
        if host == "127.0.0.1":
            raise
        pytest.skip(f"no IPv6 here: {error}")
    with opened as listener:
        outgoing = Outgoing(listener.address, listener.token)
        with closing(listener.accept(_go_on)) as incoming:
            assert outgoing.offer(memoryview(b"state")) == 5
            outgoing.close()
            memory = bytearray(8)
            incoming.fill(memoryview(memory)[:5], _go_on, WAIT)
            assert bytes(memory[:5]) == b"state"
            with pytest.raises(StreamEnded, match="ended early"):
                incoming.read(memoryview(memory), _go_on)


def test_only_who_knows_the_token_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_HELLO", 0.1)
    with Listener("127.0.0.1") as listener:
        address = ("127.0.0.1", int(listener.address.rpartition(":")[2]))
        with (
            socket.create_connection(address, WAIT) as silent,
            socket.create_connection(address, WAIT) as wrong,
            closing(Outgoing(listener.address, listener.token)) as right,
        ):
            wrong.sendall(b"x" * TOKEN_BYTES + b"forged")
            with closing(listener.accept(_go_on)) as incoming:
                right.offer(memoryview(b"right"))
                memory = bytearray(5)
                incoming.fill(memoryview(memory), _go_on, WAIT)
                assert bytes(memory) == b"right"
            assert _closed(silent)
            assert _closed(wrong)


def _closed(connection: socket.socket) -> bool:
    connection.settimeout(WAIT)
    with suppress(ConnectionResetError):  # so it is where something was left unread
        return not connection.recv(1)
    return True


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PATIENCE", 0.1)
    with Listener("127.0.0.1") as listener:
        with pytest.raises(StreamEnded, match="has not connected"):
            listener.accept(_go_on)
        with (
            closing(Outgoing(listener.address, listener.token)) as outgoing,
            closing(listener.accept(_go_on)) as incoming,
        ):
            with pytest.raises(StreamEnded, match="stalled"):
                incoming.read(memoryview(bytearray(1)), _go_on, 0.1)
            while outgoing.offer(memoryview(bytes(1 << 20))):
                pass
            with pytest.raises(StreamEnded, match="has taken nothing"):
                outgoing.wait()


def test_a_stream_that_was_shut_wakes_who_waits() -> None:
    with (
        Listener("127.0.0.1") as listener,
        closing(Outgoing(listener.address, listener.token)) as outgoing,
    ):
        while outgoing.offer(memoryview(bytes(1 << 20))):
            pass
        waiting, _ = in_thread(outgoing.wait)
        outgoing.shut()
        waiting.join(stream.PATIENCE / 2)
        assert not waiting.is_alive()
        with pytest.raises(BrokenPipeError):
            outgoing.offer(memoryview(b"more"))


@pytest.mark.parametrize(
    ("address", "token", "says"),
    [
        ("127.0.0.1", bytes(TOKEN_BYTES), "not host:port: '127.0.0.1'"),
        ("127.0.0.1:x", bytes(TOKEN_BYTES), "not host:port"),
        ("127.0.0.1:1", b"short", "not 16 bytes of token"),
    ],
)
def test_a_call_that_does_not_say_where_to(
    server: ShardServer, address: str, token: bytes, says: str
) -> None:
    server.offer(identity(), build(0, steps=2).serve(2))
    with pytest.raises(grpc.RpcError, match=says) as caught:
        _call(server, address, token)
    assert "INVALID_ARGUMENT" in str(caught.value)


def test_a_receiver_that_is_gone(server: ShardServer) -> None:
    server.offer(identity(), build(0, steps=2).serve(2))
    with Listener("127.0.0.1") as gone:
        address, token = gone.address, gone.token
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        _call(server, address, token)


def _call(server: ShardServer, address: str, token: bytes) -> shards_pb2.PullResponse:
    request = shards_pb2.PullRequest(shard=identity().request(), address=address, token=token)
    with grpc.insecure_channel(server.address) as channel:
        return shards_pb2_grpc.ShardsStub(channel).Pull(request, timeout=WAIT)
