# SPDX-License-Identifier: Apache-2.0
"""What a probe makes of every kind of answer, and of none."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from coordinator.model import Verdict
from coordinator.prober import Probed, Prober
from protos import node_pb2, node_pb2_grpc

SOON = 20.0


class Workerd(node_pb2_grpc.NodeServiceServicer):
    def Probe(
        self, request: node_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> node_pb2.ProbeReply:
        return node_pb2.ProbeReply(node="n0", incarnation="a", boot_id="b")

    def Reach(
        self, request: node_pb2.ReachRequest, context: grpc.ServicerContext
    ) -> node_pb2.ReachReply:
        raise NotImplementedError


@pytest.fixture
def verdicts() -> queue.Queue[Any]:
    return queue.Queue()


@pytest.fixture
def prober(verdicts: queue.Queue[Any]) -> Iterator[Prober]:
    prober = Prober(verdicts.put)
    yield prober
    prober.close()
    assert not any(one.name == "prober" for one in threading.enumerate())


@pytest.fixture
def workerd() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    node_pb2_grpc.add_NodeServiceServicer_to_server(Workerd(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_the_same_incarnation_answers(
    prober: Prober, verdicts: queue.Queue[Any], workerd: str
) -> None:
    prober.probe("n0", "a", workerd, SOON)
    assert verdicts.get(timeout=SOON) == Probed("n0", "a", Verdict.ALIVE, f"{workerd} answers")


@pytest.mark.parametrize(("node", "incarnation"), [("n0", "old"), ("n1", "a")])
def test_somebody_else_answers(
    prober: Prober, verdicts: queue.Queue[Any], workerd: str, node: str, incarnation: str
) -> None:
    prober.probe(node, incarnation, workerd, SOON)
    said = verdicts.get(timeout=SOON)
    assert (said.node, said.incarnation, said.verdict) == (node, incarnation, Verdict.DEAD)
    assert "answers as node n0, incarnation a" in said.detail


def test_a_refused_connection_is_a_death_long_before_the_deadline(
    prober: Prober, verdicts: queue.Queue[Any]
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        prober.probe("n0", "a", address, 300.0)
        said = verdicts.get(timeout=SOON)
    assert said.verdict is Verdict.DEAD
    assert "refused" in said.detail.lower()


def test_a_reset_connection_is_a_death_long_before_the_deadline(
    prober: Prober, verdicts: queue.Queue[Any]
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def reset() -> None:
            connection, _ = listening.accept()
            connection.recv(1)
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()

        peer = threading.Thread(target=reset)
        peer.start()
        prober.probe("n0", "a", f"127.0.0.1:{listening.getsockname()[1]}", 300.0)
        said = verdicts.get(timeout=SOON)
        peer.join()
    assert said.verdict is Verdict.DEAD


def test_silence_past_the_deadline_is_a_death(prober: Prober, verdicts: queue.Queue[Any]) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        prober.probe("n0", "a", f"127.0.0.1:{listening.getsockname()[1]}", 0.3)
        said = verdicts.get(timeout=SOON)
    assert said.verdict is Verdict.DEAD


@pytest.mark.parametrize("address", ["", "nowhere"])
def test_no_way_to_ask(prober: Prober, verdicts: queue.Queue[Any], address: str) -> None:
    prober.probe("n0", "a", address, 2.0)
    assert verdicts.get(timeout=SOON).verdict is Verdict.SILENT


def test_many_at_once_don_t_wait_for_one_another(
    prober: Prober, verdicts: queue.Queue[Any], workerd: str
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for number in range(20):
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            prober.probe(f"silent{number}", "a", address, 300.0)
        prober.probe("n0", "a", workerd, SOON)
        assert verdicts.get(timeout=SOON).node == "n0"


def test_closing_ends_probes_without_a_verdict(verdicts: queue.Queue[Any]) -> None:
    prober = Prober(verdicts.put)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        prober.probe("n0", "a", f"127.0.0.1:{silent.getsockname()[1]}", 300.0)
        prober.close()
    assert verdicts.empty()
