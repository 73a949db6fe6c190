# SPDX-License-Identifier: Apache-2.0
"""How streams, pulls and servers end, and what they leave behind."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from protos import shards_pb2, shards_pb2_grpc
from tests.integration.shards.support import (
    LARGE,
    MEDIUM,
    WAIT,
    Proxy,
    build,
    closing,
    eventually,
    identity,
    in_thread,
    receive,
    source,
)
from workerd.shards.errors import Ended, PullAborted, ReadersRemain, SourceRefused
from workerd.shards.manifest import Served
from workerd.shards.memory import host_view
from workerd.shards.server import ShardServer
from workerd.shards.stream import PATIENCE, Incoming, Listener, Outgoing


class _Blocking(Served):
    """Read for as long as a test wants."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.step, served.tensors, served.skeleton)
        self.entered = threading.Event()
        self.leave = threading.Event()

    def manifest(self, check: Callable[[], None] = lambda: None) -> shards_pb2.Manifest:
        self.entered.set()
        assert self.leave.wait(WAIT)
        return super().manifest(check)


class _Stalling(ShardServer):
    """A source that lives, but sends nothing after its first piece until it may."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.sent = 0
        self.stalled = threading.Event()
        self.go_on = threading.Event()

    def _pass(self, offer: Any, run: bytearray | memoryview, stream: Outgoing) -> int:
        if self.sent:
            self.stalled.set()
            assert self.go_on.wait(WAIT)
        self.sent += super()._pass(offer, run, stream)
        return 0

    def close(self) -> None:
        self.go_on.set()
        super().close()


def test_the_stop_event_ends_a_pull_whatever_the_source_does() -> None:
    there, here = build(0, *MEDIUM, 2), build(1, *MEDIUM)
    stalling, stop = _Stalling("127.0.0.1"), threading.Event()
    with closing(stalling):
        stalling.offer(identity(), there.serve(2))
        thread, answers = in_thread(lambda: receive(here, source(stalling.address), stop=stop))
        assert stalling.stalled.wait(WAIT)
        thread.join(0.5)  # now it waits for the next piece
        stop.set()
        thread.join(8)  # less than the patience with a stalled stream
        assert not thread.is_alive()
    assert isinstance(answers[0], PullAborted)


def test_the_stop_event_ends_the_wait_for_a_manifest_and_for_what_is_not_yet(
    server: ShardServer,
) -> None:
    here, served = build(1), _Blocking(build(0, steps=2).serve(2))
    server.offer(identity(), served)
    for generation in (1, 2):
        stop = threading.Event()
        thread, answers = in_thread(
            partial(receive, here, source(server.address), stop=stop, generation=generation)
        )
        assert generation == 2 or served.entered.wait(WAIT)
        stop.set()
        thread.join(WAIT / 2)
        assert isinstance(answers[0], PullAborted)
    served.leave.set()


def test_nothing_is_read_after_the_end(server: ShardServer) -> None:
    server.offer(identity(), build(0, *MEDIUM).serve(2))
    offer = server._offer
    assert offer is not None
    run = host_view(next(iter(offer.served.tensors.values())).view(-1).view(torch.uint8))
    with (
        Listener("127.0.0.1") as listener,
        closing(stream := Outgoing(listener.address, listener.token)),
    ):
        assert server._pass(offer, run[:100], stream) == 100
        server.end(1, WAIT)
        with pytest.raises(Ended):
            server._pass(offer, run[:100], stream)


def test_the_end_of_a_generation_ends_its_streams(
    monkeypatch: pytest.MonkeyPatch, server: ShardServer
) -> None:
    there, here = build(0, *LARGE, 2), build(1, *LARGE)
    server.offer(identity(), there.serve(2))
    proxy = Proxy(monkeypatch, hold_at=6_000_000)
    with closing(proxy):
        thread, answers = in_thread(lambda: receive(here, source(server.address)))
        assert proxy.held.wait(WAIT)
        server.end(1, WAIT)
        with torch.no_grad():
            for tensor in there.serve(2).tensors.values():
                tensor.zero_()
        proxy.release.set()
        thread.join(WAIT)
    # Not ChecksumError: nothing that was sent is of the time after the end.
    assert isinstance(answers[0], SourceRefused)


def test_the_end_waits_for_no_receiver_that_takes_nothing(server: ShardServer) -> None:
    """Nor does its call go on to hold one of the few places for others."""
    server.offer(identity(), build(0, *LARGE).serve(2))
    with Listener("127.0.0.1") as listener, grpc.insecure_channel(server.address) as channel:
        request = shards_pb2.PullRequest(
            shard=identity().request(), address=listener.address, token=listener.token
        )
        call = shards_pb2_grpc.ShardsStub(channel).Pull.future(request)
        incoming = listener.accept(lambda: None)
        with closing(incoming):
            _await_full(incoming)
            server.end(1, WAIT)
            with pytest.raises(grpc.RpcError):
                call.result(PATIENCE / 2)


def _await_full(incoming: Incoming) -> None:
    """Wait until no more comes: then the source waits for who takes it."""
    before, deadline = 0, time.monotonic() + WAIT
    while True:
        threading.Event().wait(0.5)
        (there,) = struct.unpack("i", fcntl.ioctl(incoming._socket, termios.FIONREAD, b"    "))
        if 0 < there == before:
            return
        assert time.monotonic() < deadline
        before = there


def test_the_end_waits_for_a_reader_in_the_memory(server: ShardServer) -> None:
    here, served = build(1), _Blocking(build(0, steps=2).serve(2))
    server.offer(identity(), served)
    thread, answers = in_thread(lambda: receive(here, source(server.address)))
    assert served.entered.wait(WAIT)
    with pytest.raises(ReadersRemain):
        server.end(1, 0.1)
    ending, _ = in_thread(lambda: server.end(1, WAIT))
    ending.join(0.2)
    assert ending.is_alive()
    served.leave.set()
    ending.join(WAIT)
    thread.join(WAIT)
    assert isinstance(answers[0], SourceRefused)


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_lives_of_servers_and_pulls_leave_nothing_behind() -> None:
    there, here = build(0, steps=2), build(1)

    def live(generation: int) -> None:
        server = ShardServer("127.0.0.1")
        server.offer(identity(generation), there.serve(2))
        receive(here, source(server.address), generation=generation)
        server.end(generation, WAIT)
        server.close()

    for generation in range(1, 6):
        live(generation)
    threads, descriptors = _held()
    for generation in range(6, 56):
        live(generation)
    # gRPC keeps a pool of threads, whose number sways by a few.
    eventually(lambda: _held()[0] <= threads + 4 and _held()[1] <= descriptors + 4)
