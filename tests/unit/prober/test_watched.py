# SPDX-License-Identifier: Apache-2.0
"""What the prober sees of nodes that it holds on to: real sockets, a real NodeService."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from coordinator.model import Answer, Line
from coordinator.prober import Contacted, Probed, Prober, Witnessed
from protos.node_pb2 import ProbeReply
from workerd.agent.probe import ProbeServer

SOON = 30.0
PATIENCE = 0.2

_Said = Probed | Contacted | Witnessed

_SERVE = """
import sys, threading
from protos.node_pb2 import ProbeReply
from workerd.agent.probe import ProbeServer
print(ProbeServer("127.0.0.1:0", ProbeReply(node="n0", incarnation="a")).address, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def said() -> queue.Queue[_Said]:
    return queue.Queue()


@pytest.fixture
def prober(said: queue.Queue[_Said]) -> Iterator[Prober]:
    prober = Prober(said.put)
    yield prober
    prober.close()
    assert not any(one.name == "prober" for one in threading.enumerate())


class Workerd:
    """A NodeService in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def workerd() -> Iterator[Workerd]:
    one = Workerd()
    yield one
    one.close()


def until(said: queue.Queue[_Said], line: Line) -> Contacted:
    """What comes until a line stands so. A process on a loaded machine may be late meanwhile."""
    while True:
        one = said.get(timeout=SOON)
        assert isinstance(one, Contacted)
        if one.line is line:
            return one


def test_a_killed_process_is_refused(
    prober: Prober, said: queue.Queue[_Said], workerd: Workerd
) -> None:
    prober.watch({("n0", "a"): workerd.address}, PATIENCE)
    assert until(said, Line.ANSWERS) == Contacted(
        "n0", "a", Line.ANSWERS, f"{workerd.address} answers"
    )
    workerd.process.kill()
    assert "refused" in until(said, Line.REFUSED).detail


def test_a_stopped_process_is_frozen_until_it_goes_on(
    prober: Prober, said: queue.Queue[_Said], workerd: Workerd
) -> None:
    prober.watch({("n0", "a"): workerd.address}, PATIENCE)
    until(said, Line.ANSWERS)
    os.kill(workerd.process.pid, signal.SIGSTOP)
    until(said, Line.LOST)
    until(said, Line.FROZEN)
    os.kill(workerd.process.pid, signal.SIGCONT)
    until(said, Line.ANSWERS)


def test_somebody_else_at_the_address(prober: Prober, said: queue.Queue[_Said]) -> None:
    server = ProbeServer("127.0.0.1:0", ProbeReply(node="n0", incarnation="a"))
    prober.watch({("n0", "a"): server.address}, PATIENCE)
    until(said, Line.ANSWERS)
    server.close()
    again = ProbeServer(server.address, ProbeReply(node="n0", incarnation="b"))
    assert "incarnation b" in until(said, Line.REPLACED).detail
    again.close()


def test_nothing_is_said_of_who_has_never_answered(
    prober: Prober, said: queue.Queue[_Said], workerd: Workerd
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{bound.getsockname()[1]}"
        prober.watch({("n1", "b"): nobody, ("n2", "c"): "nowhere"}, PATIENCE)
        threading.Event().wait(5 * PATIENCE)
        prober.watch({("n0", "a"): workerd.address, ("n1", "b"): nobody}, PATIENCE)
        until(said, Line.ANSWERS)
    assert said.empty()


def test_who_is_watched_no_more_is_spoken_of_no_more(
    prober: Prober, said: queue.Queue[_Said], workerd: Workerd
) -> None:
    prober.watch({("n0", "a"): workerd.address}, PATIENCE)
    until(said, Line.ANSWERS)
    prober.watch({}, PATIENCE)
    workerd.process.kill()
    threading.Event().wait(5 * PATIENCE)
    assert all(
        isinstance(one, Contacted) and one.line is not Line.REFUSED for one in list(said.queue)
    )


def test_witnesses(prober: Prober, said: queue.Queue[_Said], workerd: Workerd) -> None:
    server = ProbeServer("127.0.0.1:0", ProbeReply(node="n1", incarnation="b"))
    witnesses = (("n1", "b"), ("n2", "never watched"))
    prober.watch({("n1", "b"): server.address}, PATIENCE)
    until(said, Line.ANSWERS)

    def asked(address: str) -> dict[str, Answer]:
        prober.witness(("n0", "a"), 7.0, (address,), witnesses, SOON)
        found = {}
        for _ in witnesses:
            one = said.get(timeout=SOON)
            assert isinstance(one, Witnessed)
            assert (one.node, one.incarnation, one.tried) == ("n0", "a", 7.0)
            found[one.statement.witness] = one.statement.answer
        return found

    assert asked(workerd.address) == {"n1": Answer.ACCEPTED, "n2": Answer.NONE}
    workerd.close()
    assert asked(workerd.address) == {"n1": Answer.REFUSED, "n2": Answer.NONE}
    server.close()
