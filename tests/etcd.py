# SPDX-License-Identifier: Apache-2.0
"""A real etcd for tests: one or several members that can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from coordinator.cli.localcluster.processes import tied
from coordinator.store import Store, StoreAuthError, StoreError, Tls
from protos.etcd import rpc_pb2

_START = 30.0  # seconds until a member must answer
_TRIES = 5  # a port that was free may be taken before etcd binds it


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, all different. They may be taken any time."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class Ports:
    """Ports that stay ours while etcd is down between a kill and a start.

    They lie below the kernel's own range, so that no outgoing connection and nobody who binds to
    port 0 takes one meanwhile; a locked file for each keeps other test processes off. The kernel
    frees the locks, however the process ends.
    """

    _RANGE = range(15000, 32000)

    def __init__(self, count: int) -> None:
        self._locks: list[IO[bytes]] = []
        self.numbers: list[int] = []
        folder = Path(tempfile.gettempdir()) / "hotspare-test-ports"
        folder.mkdir(exist_ok=True)
        for number in random.SystemRandom().sample(self._RANGE, 1000):
            if len(self.numbers) == count:
                return
            lock = (folder / str(number)).open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", number))
            except OSError:
                lock.close()
                continue
            self._locks.append(lock)
            self.numbers.append(number)
        raise RuntimeError("no free ports")

    def close(self) -> None:
        """Let others have them."""
        for lock in self._locks:
            lock.close()


class Member:
    """One member. Its data and ports stay the same over :meth:`kill` and :meth:`start`."""

    def __init__(self, name: str, folder: Path, client: int, peer: int) -> None:
        self.name = name
        self.endpoint = f"127.0.0.1:{client}"
        self.peer_url = f"http://127.0.0.1:{peer}"
        self.folder = folder
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._frozen = False

    def start(self, cluster: Sequence[Member], flags: Sequence[str]) -> None:
        """Start the process; :meth:`Etcd.await_ready` waits for it."""
        scheme = "https" if any(flag.startswith("--cert-file") for flag in flags) else "http"
        url = f"{scheme}://{self.endpoint}"
        command = [
            "etcd",
            f"--name={self.name}",
            f"--data-dir={self.folder / self.name}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            "--initial-cluster=" + ",".join(f"{m.name}={m.peer_url}" for m in cluster),
            "--initial-cluster-token=" + self.folder.name,
            "--grpc-keepalive-min-time=500ms",
            # Tests only: nothing here has to survive a power failure.
            "--unsafe-no-fsync",
            "--logger=zap",
            "--log-level=warn",
            *flags,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                tied(command),  # so that nothing stays behind when the test's process is killed
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._frozen = False

    @property
    def running(self) -> bool:
        """Whether the process lives (frozen ones do)."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send the member's process a signal."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def freeze(self) -> None:
        """SIGSTOP: its kernel still accepts connections, it answers nothing."""
        self.signal(signal.SIGSTOP)
        self._frozen = True
        deadline = time.monotonic() + 10
        while not self._stopped():  # a moment: the signal reaches each thread by itself
            if time.monotonic() > deadline:
                raise RuntimeError(f"etcd {self.name} does not stop")

    def _stopped(self) -> bool:
        if self.process is None or not self.running:
            return True
        states = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that just ended
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return set(states) <= {"T", "t"}

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)
        self._frozen = False

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)

    def terminate(self) -> None:
        """SIGTERM, and wait for its end."""
        if self.process is not None:
            self.thaw()
            self.process.terminate()
            self.process.wait(timeout=10)


class Etcd:
    """A cluster of etcd members on ports of 127.0.0.1, in a folder of its own.

    ``with Etcd() as etcd: Store(etcd.endpoints, prefix="/test")``. For one member there are the
    short forms :meth:`kill`, :meth:`start`, :meth:`freeze` and :meth:`thaw`. ``tls``: files of the
    authority, and of the certificate and key that etcd and its clients both use.
    """

    def __init__(
        self,
        members: int = 1,
        flags: Sequence[str] = (),
        tls: tuple[Path, Path, Path] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hotspare-etcd-"))
        self.flags = list(flags)
        self._ports = Ports(0)
        self.tls: Tls | None = None
        if tls is not None:
            ca, cert, key = tls
            self.tls = Tls(ca, cert, key)
            self.flags += [f"--trusted-ca-file={ca}", f"--cert-file={cert}", f"--key-file={key}"]
            self.flags.append("--client-cert-auth")
        self.members: list[Member] = []
        try:
            for attempt in range(1, _TRIES + 1):
                self._ports.close()
                self._ports = Ports(2 * members)
                ports = self._ports.numbers
                self.members = [
                    Member(f"m{i}", self.folder / str(attempt), ports[2 * i], ports[2 * i + 1])
                    for i in range(members)
                ]
                (self.folder / str(attempt)).mkdir()
                self.start()
                if self._ready(_START):
                    return
                taken = "address already in use" in self.logs()
                self.kill()
                if not taken:
                    break
            raise RuntimeError(f"etcd did not start:\n{self.logs()[-4000:]}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Etcd:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoints(self) -> list[str]:
        """``host:port`` of every member."""
        return [member.endpoint for member in self.members]

    def logs(self) -> str:
        """Everything that the members wrote."""
        return "\n".join(m.log.read_text(errors="replace") for m in self.members if m.log.exists())

    def start(self) -> None:
        """Start every member that does not run."""
        for member in self.members:
            if not member.running:
                member.start(self.members, self.flags)

    def restart(self) -> None:
        """SIGKILL everything, start it again on the same data and wait until it answers."""
        self.kill()
        self.start()
        self.await_ready()

    def kill(self) -> None:
        """SIGKILL every member."""
        for member in self.members:
            member.kill()

    def freeze(self) -> None:
        """SIGSTOP every member."""
        for member in self.members:
            member.freeze()

    def thaw(self) -> None:
        """SIGCONT every member."""
        for member in self.members:
            member.thaw()

    def close(self) -> None:
        """End everything and remove the data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._ports.close()

    def await_ready(self, timeout: float = _START) -> None:
        """Wait until every running member answers a read that needs the quorum."""
        if not self._ready(timeout):
            raise RuntimeError(f"etcd is not ready:\n{self.logs()[-4000:]}")

    def _ready(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        for member in self.members:
            if member.process is None or member._frozen:
                continue
            with Store(
                [member.endpoint], prefix="/ready", timeout=1.0, credentials=self.tls
            ) as store:
                while member.running:
                    try:
                        store.get("x")
                        break
                    except StoreAuthError:  # it answers
                        break
                    except StoreError:
                        if time.monotonic() > deadline:
                            return False
                else:
                    return False
        return True

    def leader(self) -> Member:
        """Return the member that leads."""
        for member in self.members:
            if not member.running:
                continue
            with Store([member.endpoint], prefix="/status", timeout=2.0) as store:
                status = store.calls.status()
                if status.leader == status.header.member_id:
                    return member
        raise RuntimeError("no member of etcd leads")

    def compact(self, revision: int) -> None:
        """Forget the history before ``revision``."""
        with Store(self.endpoints, prefix="/compact") as store:
            request = rpc_pb2.CompactionRequest(revision=revision, physical=True)
            store.calls.retried("compact", "", lambda: store.calls.kv.Compact, request)


def ctl(etcd: Etcd, *arguments: str) -> str:
    """Run etcdctl against ``etcd`` and return what it prints."""
    done = subprocess.run(
        ["etcdctl", "--endpoints", ",".join(etcd.endpoints), *arguments],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout
