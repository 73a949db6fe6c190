# SPDX-License-Identifier: Apache-2.0
"""The agreement's barrier, between threads over real sockets."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from workerd.trainer.barrier import Barrier

dist: Any = torch.distributed
BUILD = timedelta(seconds=30)
LEFT = "has left|Broken pipe|reset"


def build(size: int, wait: float = 30.0) -> list[Barrier]:
    store = dist.HashStore()

    def one(rank: int) -> Barrier:
        return Barrier(store, rank, size, "127.0.0.1", build=BUILD, wait=timedelta(seconds=wait))

    return everywhere(one, range(size))


def everywhere(do: Callable[[Any], Any], each: Any) -> list[Any]:
    each = list(each)
    with ThreadPoolExecutor(len(each)) as pool:
        return [one.result(60) for one in [pool.submit(do, item) for item in each]]


def shut(barriers: list[Barrier]) -> None:
    for barrier in barriers:
        barrier.end()
    for barrier in barriers:
        barrier.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_rank_gets_everybodys_bits_every_time(size: int) -> None:
    barriers = build(size)
    for number in range(20):
        bits = [1 << (number + rank) % 8 if rank == number % size else 0 for rank in range(size)]
        met = everywhere(lambda pair: pair[0].meet(pair[1]), zip(barriers, bits, strict=True))
        assert met == [sum(bits)] * size
    shut(barriers)


def test_nobody_passes_before_the_last_has_come() -> None:
    barriers = build(3)
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[int]] = [pool.submit(one.meet) for one in barriers[:2]]
        assert not any(threading.Event().wait(0.1) or one.done() for one in waiting)
        barriers[2].meet()
        assert [one.result(30) for one in waiting] == [0, 0]
    shut(barriers)


def test_an_end_wakes_who_waits_here_and_there() -> None:
    barriers = build(4)
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.submit(barriers[0].meet), pool.submit(barriers[2].meet)
        assert not any(threading.Event().wait(0.1) or one.done() for one in (here, there))
        barriers[0].end()
        with pytest.raises(OSError, match=LEFT):
            here.result(30)
        barriers[1].end()  # whom barriers[2] waits for
        with pytest.raises(OSError, match=LEFT):
            there.result(30)
    for one in barriers[:2]:
        with pytest.raises(OSError, match=LEFT):
            one.meet()
    shut(barriers)


def test_a_silent_rank_is_not_waited_for_for_ever() -> None:
    barriers = build(2, wait=0.1)
    with pytest.raises(TimeoutError):
        barriers[0].meet()
    shut(barriers)


def test_a_rank_that_does_not_come_is_no_endless_wait() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises((OSError, RuntimeError)):
        Barrier(store, 0, 2, "127.0.0.1", build=timedelta(seconds=0.2), wait=BUILD)


def test_a_stranger_is_not_listened_to() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:

        def one(rank: int) -> Barrier:
            return Barrier(store, rank, 2, "127.0.0.1", build=BUILD, wait=BUILD)

        first = pool.submit(one, 0)
        port = int(bytes(store.get("0"))[16:].decode().split()[1])
        with socket.create_connection(("127.0.0.1", port), 30) as stranger:
            stranger.sendall(b"\0" * 24)
            barriers = [pool.submit(one, 1).result(60), first.result(60)]
    assert everywhere(lambda barrier: barrier.meet(), barriers) == [0, 0]
    shut(barriers)


def test_it_gives_its_sockets_back() -> None:
    shut(build(5))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        shut(build(5))
    assert len(os.listdir("/proc/self/fd")) == before
