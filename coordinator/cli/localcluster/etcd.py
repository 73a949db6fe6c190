# SPDX-License-Identifier: Apache-2.0
"""An etcd of one's own, that can be killed and started again at the same address."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

from coordinator.cli.localcluster.processes import (
    ClusterError,
    Process,
    signals_deferred,
    tail,
)


def find_etcd() -> str:
    """The etcd program: from the PATH, else next to the interpreter.

    Raises :class:`ClusterError` when there is none.
    """
    beside = os.path.dirname(sys.executable)
    found = shutil.which("etcd") or shutil.which("etcd", path=beside)
    if found is None:
        raise ClusterError(
            f"no etcd on the PATH nor in {beside}: install it (Debian: etcd-server), "
            "or run 'make setup'"
        )
    return found


class Etcd:
    """One member with its data in ``folder``, on an address of this machine."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._program = find_etcd()
        # Bound here for as long as this object lives, without listening: Linux lets etcd bind the
        # same port, but gives it to nobody else, also while etcd is down.
        self._held = [_hold(host), _hold(host)]
        client, peer = (one.getsockname()[1] for one in self._held)
        self.address = f"{host}:{client}"
        self._peer = f"http://{host}:{peer}"
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        """The running etcd. Raises :class:`ClusterError` before :meth:`start`."""
        if self._process is None:
            raise ClusterError("etcd has not been started")
        return self._process

    def start(self, timeout: float = 20.0) -> None:
        """Start it, also again with the same data, and wait until it answers.

        Raises :class:`ClusterError` when it doesn't within ``timeout`` seconds.
        """
        client = f"http://{self.address}"
        with signals_deferred():
            self._process = Process(
                "etcd",
                [
                    self._program,
                    "--name=local",
                    f"--data-dir={self._folder / 'etcd'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={self._peer}",
                    f"--initial-advertise-peer-urls={self._peer}",
                    f"--initial-cluster=local={self._peer}",
                    # A single member needs no time to hear from others: it starts faster so.
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--log-level=warn",
                ],
                self._folder / "etcd.log",
                cwd=self._folder,
                environment={"ETCD_UNSUPPORTED_ARCH": os.uname().machine},
            )
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not self._healthy():
            if not self._process.alive or time.monotonic() >= deadline:
                raise ClusterError(
                    f"etcd doesn't come up; its log ends:\n{tail(self._process.log)}"
                )
            pause.wait(0.05)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL it; the data stay for the next :meth:`start`."""
        self.process.kill()

    def close(self) -> None:
        """End it and give its ports back."""
        if self._process is not None:
            self._process.kill()
        for one in self._held:
            one.close()


def _hold(host: str) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
