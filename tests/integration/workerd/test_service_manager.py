# SPDX-License-Identifier: Apache-2.0
"""What systemd is told, by a socket that stands for it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.etcd import Etcd
from tests.integration.workerd.support import Leader, Workerd, marked, pid_of, wait_for

WATCHDOG = 0.4


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """One of its own: it is killed."""
    with Etcd() as running:
        yield running


@pytest.fixture
def told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What has been told since the last look."""
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG * 1e6)))

        def look() -> list[str]:
            words: list[str] = []
            while True:
                try:
                    words += manager.recv(4096).decode().split("\n")
                except BlockingIOError:
                    return words

        yield look


def test_ready_is_registered_and_the_trainers_know_nothing_of_it(
    workerd: Callable[..., Workerd], leader: Callable[..., Leader], told: Callable[[], list[str]]
) -> None:
    one, lead = workerd("n0"), leader()
    wait_for(lambda: "READY=1" in told(), "it says that it is ready")
    assert lead.node("n0") is not None
    instance = lead.run("n0")["n0"].ranks[0].instance
    environment = Path(f"/proc/{pid_of(one, instance)}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment
    assert b"WATCHDOG" not in environment


def test_an_outage_of_etcd_longer_than_the_lease_does_not_starve_the_watchdog(
    workerd: Callable[..., Workerd],
    leader: Callable[..., Leader],
    told: Callable[[], list[str]],
    etcd: Etcd,
) -> None:
    one, lead = workerd("n0", ttl=2.0), leader()
    one.listening()
    instance = lead.run("n0")["n0"].ranks[0].instance
    etcd.kill()
    wait_for(lambda: "no renewal of the lease in time" in one.logged(), "its time is over")
    told()
    for _ in range(3):
        wait_for(lambda: "WATCHDOG=1" in told(), "it says that it lives")
    assert marked(f"HOTSPARE_INSTANCE={instance}")


def test_a_daemon_that_hangs_says_nothing(
    workerd: Callable[..., Workerd], told: Callable[[], list[str]]
) -> None:
    one = workerd("n0")
    one.listening()
    wait_for(lambda: "WATCHDOG=1" in told(), "it says that it lives")
    os.kill(one.process.pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, one.process.pid, os.WSTOPPED | os.WNOWAIT)
        told()
        with pytest.raises(AssertionError, match="it says nothing"):
            wait_for(told, "it says nothing", 3 * WATCHDOG)
    finally:
        os.kill(one.process.pid, signal.SIGCONT)
