# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.membership_pb2 import PREPARED, Source
from protos.trainer_pb2 import (
    Broken,
    Done,
    Failed,
    Hello,
    Ready,
    Release,
    Restore,
    Stop,
    Stopped,
    Welcome,
)
from workerd.protocol import link


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[link.TrainerEnd, link.WorkerdEnd]]:
    listener = link.Listener(tmp_path / "s")
    trainer = link.connect(tmp_path / "s")
    workerd = listener.accept(5)
    yield trainer, workerd
    for closing in (trainer, workerd, listener):
        closing.close()


def test_messages_pass_both_ways(ends: tuple[link.TrainerEnd, link.WorkerdEnd]) -> None:
    trainer, workerd = ends
    upward: list[link.Upward] = [
        Hello(instance="i", pid=7),
        Ready(),
        Stopped(generation=2, phase=PREPARED, step=9),
        Broken(generation=2, step=9, error="reset"),
        Done(step=10, digest="d"),
        Failed(step=3, traceback="t"),
    ]
    for message in upward:
        trainer.send(message)
    assert [workerd.receive(5) for _ in upward] == upward
    downward: list[link.Downward] = [
        Welcome(job="j", spare=True),
        Stop(generation=2),
        Restore(generation=2, resume_step=4, sources=[Source(rank=1)]),
        Release(step=4),
    ]
    for order in downward:
        workerd.send(order)
    assert [trainer.receive(5) for _ in downward] == downward
    assert workerd.peer_pid() == os.getpid()


def test_nothing_in_time_is_a_timeout(ends: tuple[link.TrainerEnd, link.WorkerdEnd]) -> None:
    trainer, workerd = ends
    with pytest.raises(link.LinkTimeout):
        trainer.receive(0)
    with pytest.raises(link.LinkTimeout):
        trainer.receive(0.02)
    workerd.send(Stop(generation=1))
    assert trainer.receive(0) == Stop(generation=1)


def test_the_end_of_the_other_side_is_seen(
    ends: tuple[link.TrainerEnd, link.WorkerdEnd],
) -> None:
    trainer, workerd = ends
    trainer.send(Ready())
    trainer.close()
    assert workerd.receive(5) == Ready()
    with pytest.raises(link.LinkClosed):
        workerd.receive(5)
    with pytest.raises(link.LinkClosed):
        workerd.send(Stop(generation=1))


def test_closing_wakes_the_thread_that_waits(
    ends: tuple[link.TrainerEnd, link.WorkerdEnd], tmp_path: Path
) -> None:
    trainer, _ = ends
    listener = link.Listener(tmp_path / "other")
    raised: list[type] = []

    def wait(call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except link.LinkError as error:
            raised.append(type(error))

    waiting = [
        threading.Thread(target=wait, args=(lambda: trainer.receive(30),)),
        threading.Thread(target=wait, args=(lambda: listener.accept(30),)),
    ]
    for thread in waiting:
        thread.start()
    trainer.close()
    listener.close()
    for thread in waiting:
        thread.join(10)
    assert raised == [link.LinkClosed, link.LinkClosed]
    assert not (tmp_path / "other").exists()


def test_sizes_are_checked_on_both_sides(
    ends: tuple[link.TrainerEnd, link.WorkerdEnd], tmp_path: Path
) -> None:
    trainer, _ = ends
    with pytest.raises(link.MalformedPacket, match="are allowed"):
        trainer.send(Failed(traceback="x" * (link.MAX_PACKET_BYTES + 1)))
    raw, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    workerd = link.workerd_end(other)
    raw.send(bytes(link.MAX_PACKET_BYTES + 2))
    with pytest.raises(link.MalformedPacket, match="more than"):
        workerd.receive(5)
    raw.send(b"\xff\xff\xff")
    with pytest.raises(link.MalformedPacket, match="no message"):
        workerd.receive(5)
    raw.send(b"\xfa\x7f\x00")  # a field that no version here knows
    with pytest.raises(link.MalformedPacket, match="not known"):
        workerd.receive(5)
    raw.close()
    workerd.close()


def test_a_full_link_is_a_timeout_and_loses_nothing(
    ends: tuple[link.TrainerEnd, link.WorkerdEnd],
) -> None:
    trainer, workerd = ends
    sent = 0

    def fill() -> None:
        nonlocal sent
        while True:
            trainer.send(Broken(generation=sent, error="x" * 10_000), timeout=0.05)
            sent += 1

    with pytest.raises(link.LinkTimeout):
        fill()
    received = [workerd.receive(5) for _ in range(sent)]
    assert [m.generation for m in received if isinstance(m, Broken)] == list(range(sent))


def test_the_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    listener = link.Listener(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    with pytest.raises(link.LinkTimeout):
        listener.accept(0.01)
    listener.close()
    with pytest.raises(link.LinkClosed, match="cannot reach workerd"):
        link.connect(tmp_path / "s")
