# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.host.notify import Notifier


class Manager:
    """The service manager's end: what it was told, in order."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def told(self) -> list[str]:
        words = []
        while True:
            try:
                words.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return words

    def close(self) -> None:
        self._socket.close()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[tuple[Manager, str]]:
    address = str(tmp_path / "notify")
    made = Manager(address)
    yield made, address
    made.close()


def test_the_watchdog_is_fed_no_oftener_than_it_has_to_be(manager: tuple[Manager, str]) -> None:
    told, clock = manager[0].told, Clock()
    notifier = Notifier({"NOTIFY_SOCKET": manager[1], "WATCHDOG_USEC": "4000000"}, clock=clock)
    notifier.ready()
    assert told() == ["READY=1"]
    notifier.alive()
    assert told() == []
    clock.now += 1.0
    notifier.alive()
    notifier.alive()
    assert told() == ["WATCHDOG=1"]


def test_a_status_is_told_when_it_changes(manager: tuple[Manager, str]) -> None:
    told = manager[0].told
    notifier = Notifier({"NOTIFY_SOCKET": manager[1]})
    for status in ("stands by", "stands by", "leads"):
        notifier.alive(status)
    assert told() == ["STATUS=stands by", "STATUS=leads"]


def test_a_watchdog_that_watches_another_process_is_not_fed(manager: tuple[Manager, str]) -> None:
    own = {"NOTIFY_SOCKET": manager[1], "WATCHDOG_USEC": "1", "WATCHDOG_PID": str(os.getpid())}
    Notifier({**own, "WATCHDOG_PID": str(os.getppid())}).alive()
    assert manager[0].told() == []
    Notifier(own).alive()
    assert manager[0].told() == ["WATCHDOG=1"]


def test_no_child_gets_the_manager_s_variables(manager: tuple[Manager, str]) -> None:
    environment = {
        "NOTIFY_SOCKET": manager[1],
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "PATH": "/bin",
    }
    Notifier(environment)
    assert environment == {"PATH": "/bin"}


def test_an_abstract_address() -> None:
    name = f"hotspare-test-{os.getpid()}"
    manager = Manager(f"\0{name}")
    try:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert manager.told() == ["READY=1"]
    finally:
        manager.close()


def test_a_manager_that_is_gone_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()
    assert "the service manager was not told 'READY=1'" in caplog.text


def test_without_a_manager_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({})
    notifier.ready()
    notifier.alive("leads")
    assert caplog.text == ""
