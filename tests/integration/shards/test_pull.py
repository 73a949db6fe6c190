# SPDX-License-Identifier: Apache-2.0
"""Pulls over real sockets, from real processes, with what can go wrong between them."""

from __future__ import annotations

import dataclasses
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from protos import shards_pb2
from tests.integration.shards.support import (
    LARGE,
    MEDIUM,
    WAIT,
    Process,
    Proxy,
    build,
    closing,
    identity,
    in_thread,
    memory,
    receive,
    reset_peak,
    source,
)
from workerd.shards.errors import (
    ChecksumError,
    Mismatch,
    NoSource,
    PullTimeout,
    SourceRefused,
)
from workerd.shards.server import ShardServer
from workerd.shards.stream import Outgoing
from workerd.shards.wire import ShardIdentity


def test_a_state_arrives_from_another_process(processes: Callable[..., Process]) -> None:
    there, here = processes(0, *MEDIUM, 2), build(1, *MEDIUM)
    there.ask("offer")
    result = receive(here, source(there.address))
    assert here.digest() == there.ask("digest") == result.digest
    assert result.source == "node"
    assert result.bytes == sum(entry.bytes for entry in here.manifest(0).tensors)
    assert there.ask("end", 1) < 64 << 20


def test_the_snapshot_is_served_for_what_a_forward_pass_changed(server: ShardServer) -> None:
    there, here = build(0, steps=2), build(1)
    before, snapshot = there.digest(), there.snapshot()
    there.objects["model"](torch.randn(4, 64))
    assert there.digest() != before
    server.offer(identity(), there.serve(2, snapshot))
    receive(here, source(server.address))
    assert here.digest() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"job": "other"},
        {"generation": 1},
        {"step": 3},
        {"shard_position": 1},
        {"nonce": "other"},
        {"nonce": ""},
        {"instance": "other"},
    ],
    ids=str,
)
def test_whoever_asks_for_anything_else_is_refused(
    server: ShardServer, changes: dict[str, Any]
) -> None:
    there, here = build(0, steps=2), build(1)
    server.offer(identity(2), there.serve(2))
    before = here.digest()
    instance = changes.pop("instance", "source")
    with pytest.raises(SourceRefused, match="FAILED_PRECONDITION: not this rank's"):
        receive(here, source(server.address, instance=instance), **{"generation": 2, **changes})
    assert here.digest() == before


def test_an_ended_generation_is_refused_and_a_later_one_is_not_yet(server: ShardServer) -> None:
    here = build(1)
    server.end(4, 1)
    with pytest.raises(SourceRefused):
        receive(here, source(server.address), generation=4)
    with pytest.raises(PullTimeout, match=r"127\.0\.0\.1:\d+: UNAVAILABLE: not yet"):
        receive(here, source(server.address), generation=5, timeout=0.3)
    with pytest.raises(ValueError, match="has ended"):
        server.offer(identity(4), here.serve(2))
    server.offer(identity(5), here.serve(2))
    with pytest.raises(ValueError, match="still offered"):
        server.offer(identity(6), here.serve(2))


def test_not_yet_is_asked_again_until_it_is_served(server: ShardServer) -> None:
    there, here = build(0, steps=2), build(1)
    server.offer(identity(6), there.serve(2))
    thread, answers = in_thread(lambda: receive(here, source(server.address), generation=7))
    thread.join(0.3)
    assert thread.is_alive()
    server.end(6, 1)
    server.offer(identity(7), there.serve(2))
    thread.join(WAIT)
    assert answers[0].digest == there.digest() == here.digest()


def test_no_source_and_one_that_is_not_there(server: ShardServer) -> None:
    here, there = build(1), build(0, steps=2)
    with pytest.raises(NoSource):
        receive(here)
    gone = ShardServer("127.0.0.1")
    gone.close()
    with pytest.raises(PullTimeout, match="UNAVAILABLE"):
        receive(here, source(gone.address), timeout=0.5)
    server.offer(identity(), there.serve(2))
    result = receive(here, source(gone.address, "gone"), source(server.address, "there"))
    assert result.source == "there"


def test_another_model_is_refused_by_name(server: ShardServer) -> None:
    server.offer(identity(), build(0, width=32).serve(2))
    with pytest.raises(Mismatch, match=r"model/0\.weight: the source has float32 \[32, 32\]"):
        receive(build(1), source(server.address))


def test_a_source_with_another_digest_than_all_began_with_is_not_taken(
    server: ShardServer,
) -> None:
    there, here = build(0, steps=2), build(1)
    server.offer(identity(), there.serve(2))
    with pytest.raises(ChecksumError, match="its digest is not 0000"):
        receive(here, source(server.address, initial_digest="0000"))
    receive(here, source(server.address, initial_digest=there.digest()))


def test_a_byte_that_changed_on_the_way_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, server: ShardServer
) -> None:
    there, here = build(0, *MEDIUM, 2), build(1, *MEDIUM)
    server.offer(identity(), there.serve(2))
    proxy = Proxy(monkeypatch, flip_at=5_000_000)
    with closing(proxy):
        result = receive(here, source(server.address))
    size = sum(entry.bytes for entry in here.manifest(0).tensors)
    assert proxy.connections == 2
    assert here.digest() == there.digest()
    # Only what was wrong comes twice.
    assert size < result.bytes < size + (1 << 20)


class _Wrong(ShardServer):
    """A source whose memory lies: one bit of what it sends is not what it has summed."""

    def _pass(self, offer: Any, run: bytearray | memoryview, stream: Outgoing) -> int:
        changed = bytearray(run)
        changed[-1] ^= 1
        return super()._pass(offer, changed, stream)


def test_wrong_bytes_are_never_loaded_and_another_source_is_asked() -> None:
    there, here = build(0, *MEDIUM, 2), build(1, *MEDIUM)
    wrong, right = _Wrong("127.0.0.1"), ShardServer("127.0.0.1")
    with closing(wrong, right):
        for each in (wrong, right):
            each.offer(identity(), there.serve(2))
        with pytest.raises(ChecksumError, match="wrong checksum"):
            receive(here, source(wrong.address))
        result = receive(here, source(wrong.address, "wrong"), source(right.address, "right"))
    assert result.source == "right"
    assert here.digest() == there.digest()


def test_sources_that_differ_are_told_and_never_mixed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, server: ShardServer
) -> None:
    one, two, here = build(0, *MEDIUM, 2), build(3, *MEDIUM, 2), build(1, *MEDIUM)
    first = ShardServer("127.0.0.1")
    first.offer(identity(), one.serve(2))
    server.offer(identity(), two.serve(2))
    proxy = Proxy(monkeypatch, cut_at=9_500_000)
    with closing(first, proxy), caplog.at_level(logging.WARNING):
        receive(here, source(first.address), source(server.address))
    assert "another state" in caplog.text
    assert here.digest() == two.digest()


def test_a_cut_stream_goes_on_where_it_was_cut(
    monkeypatch: pytest.MonkeyPatch, server: ShardServer
) -> None:
    there, here = build(0, *MEDIUM, 2), build(1, *MEDIUM)
    server.offer(identity(), there.serve(2))
    proxy = Proxy(monkeypatch, cut_at=8_000_000)
    with closing(proxy):
        result = receive(here, source(server.address))
    size = sum(entry.bytes for entry in here.manifest(0).tensors)
    assert proxy.connections == 2
    assert here.digest() == there.digest()
    assert size <= result.bytes < size + 4_000_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_source_that_dies_in_the_middle_is_replaced_by_another(
    monkeypatch: pytest.MonkeyPatch, processes: Callable[..., Process], number: signal.Signals
) -> None:
    first, second = processes(0, *LARGE, 2), processes(0, *LARGE, 2)
    here = build(1, *LARGE)
    for each in (first, second):
        each.ask("offer")
    proxy = Proxy(monkeypatch, hold_at=6_000_000)
    with closing(proxy):
        thread, answers = in_thread(
            lambda: receive(here, source(first.address, "first"), source(second.address, "second"))
        )
        assert proxy.held.wait(WAIT)
        first.signal(number)
        proxy.release.set()
        thread.join(WAIT)
    assert answers[0].source == "second"
    assert here.digest() == second.ask("digest")


def test_several_ranks_pull_from_one_source_at_once(server: ShardServer) -> None:
    there = build(0, *MEDIUM, 2)
    server.offer(identity(), there.serve(2))
    states = [build(seed, *MEDIUM) for seed in range(1, 13)]
    pulls = [in_thread(partial(receive, state, source(server.address))) for state in states]
    for thread, _ in pulls:
        thread.join(WAIT)
    assert {state.digest() for state in states} == {there.digest()}


def test_the_memory_that_a_pull_takes_is_bounded_on_both_sides(
    processes: Callable[..., Process],
) -> None:
    # 2048 x 2048 x 4 bytes x 3 x 6 layers: 302 MB, of which the optimizer's 201 MB are new here.
    shape = (2048, 6)
    there = processes(0, *shape, 1)
    here = build(1, *shape)
    there.ask("offer", 1)
    receive(here, source(there.address))
    there.ask("end", 1)
    there.ask("offer", 2)
    before = reset_peak()
    result = receive(here, source(there.address), generation=2)
    assert result.bytes > 300_000_000
    assert memory("VmHWM") - before < 32 << 20
    assert there.ask("end", 2) < 32 << 20


def test_no_request_field_is_left_out_of_what_is_compared() -> None:
    fields = {field.name for field in shards_pb2.ShardRequest.DESCRIPTOR.fields}
    assert fields == {field.name for field in dataclasses.fields(ShardIdentity)}


def test_the_state_is_tracked_without_grpc() -> None:
    script = "import sys, workerd.shards.state; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
