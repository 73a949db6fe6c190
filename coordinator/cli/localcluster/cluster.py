# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on this machine: etcd, coordinators and nodes, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from coordinator import store
from coordinator.cli.localcluster.admin import Admin
from coordinator.cli.localcluster.etcd import Etcd
from coordinator.cli.localcluster.processes import (
    ClusterError,
    Process,
    children,
    environment,
    kill_all,
    reap,
    running_with,
    signals_deferred,
    subreaper,
    tail,
    tree,
    wait_ended,
)
from protos import admin_pb2

PREFIX = "/hotspare/local"
INSTANCE_VARIABLE = "HOTSPARE_INSTANCE"  # what workerd starts a trainer with


class LocalCluster:
    """A context: the cluster runs inside of it, and nothing of it is left afterwards.

    ``lease_ttl``: of nodes and leaders, in seconds. Use it from one thread, which must live as
    long as the cluster does: the kernel ends the processes with it.
    """

    def __init__(
        self,
        *,
        nodes: int = 4,
        coordinators: int = 2,
        devices: int = 1,
        lease_ttl: float = 5.0,
        coordinator_arguments: Sequence[str] = (),
    ) -> None:
        self._names = [f"n{number}" for number in range(nodes)]
        self._count = coordinators
        self._devices = devices
        self._ttl = lease_ttl
        self._extra = list(coordinator_arguments)
        self._stack = contextlib.ExitStack()
        self._addresses: dict[str, str] = {}
        self._store: store.Store | None = None
        self.coordinators: dict[str, Process] = {}
        self.nodes: dict[str, Process] = {}
        self.admin = Admin(lambda: list(self._addresses.values()))

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _start(self) -> None:
        stack = self._stack
        stack.enter_context(subreaper())
        with signals_deferred():
            self.folder = Path(tempfile.mkdtemp(prefix="hotspare-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            (self.folder / "tmp").mkdir()
        self.etcd = Etcd(self.folder, self._place("etcd")[1])
        stack.callback(self._end_processes)
        stack.callback(self.admin.close)
        self.etcd.start()
        self._store = stack.enter_context(store.Store([self.etcd.address], prefix=PREFIX))
        for number in range(self._count):
            self._launch_coordinator(f"c{number}")
        for name in self._names:
            self.start_node(name)
        for name in list(self.coordinators):
            self._await_coordinator(name)
        self.admin.start()
        self.wait_alive(self._names)

    def _place(self, name: str) -> tuple[Sequence[str], str]:
        """What stands before a process' command, and the address that it listens on."""
        return (), "127.0.0.1"

    def _close(self) -> None:
        with signals_deferred():
            self._stack.close()

    # ---- coordinators

    def _launch_coordinator(self, name: str) -> None:
        before, host = self._place(name)
        with signals_deferred():
            self.coordinators[name] = Process(
                name,
                [
                    *before,
                    *(sys.executable, "-m", "coordinator"),
                    *("--etcd", self.etcd.address, "--prefix", PREFIX, "--id", name),
                    *("--listen", f"{host}:0", "--lease-ttl", f"{self._ttl:g}"),
                    *self._extra,
                ],
                self.folder / f"{name}.log",
                cwd=self.folder,
                environment=self._mark(),
            )

    def _await_coordinator(self, name: str) -> None:
        line = self.coordinators[name].wait_line("listening on ", 30.0)
        self._addresses[name] = line.rpartition("listening on ")[2].strip()

    def start_coordinator(self, name: str) -> None:
        """Start a coordinator, or start one again that has ended."""
        self._launch_coordinator(name)
        self._await_coordinator(name)

    def leader(self) -> str:
        """The coordinator that leads now. Raises :class:`ClusterError` when none does."""
        if self._store is None:
            raise ClusterError("the cluster does not run")
        candidates = self._store.list(store.keys.ELECTION).items.values()
        first = min(candidates, key=lambda one: one.create_revision, default=None)
        if first is None:
            raise ClusterError("no coordinator leads")
        return str(json.loads(first.value)["id"])

    def kill_leader(self) -> str:
        """SIGKILL the coordinator that leads; returns which one it was."""
        name = self.leader()
        self._addresses.pop(name, None)
        self.coordinators[name].kill()
        return name

    # ---- etcd

    def restart_etcd(self) -> None:
        """SIGKILL etcd and start it again with its data, at the same address."""
        self.etcd.kill()
        self.etcd.start()

    # ---- nodes

    def start_node(self, name: str, devices: int | None = None) -> None:
        """Start a node's workerd, or start it again; see :meth:`wait_alive`."""
        before, host = self._place(name)
        with signals_deferred():
            self.nodes[name] = Process(
                name,
                [
                    *before,
                    *(sys.executable, "-m", "workerd"),
                    *("--etcd", self.etcd.address, "--prefix", PREFIX, "--node", name),
                    *("--listen", f"{host}:0", "--data-address", host),
                    *("--devices", f"cpu:{devices or self._devices}"),
                    *("--lease-ttl", f"{self._ttl:g}"),
                    *("--runtime-dir", str(self.runtime(name))),
                ],
                self.folder / f"{name}.log",
                cwd=self.folder,
                environment=self._mark(),
            )

    def runtime(self, name: str) -> Path:
        """A node's runtime folder: its socket, its trainers' pages and logs."""
        return self.folder / name

    def trainer_logs(self, stream: str = "stdout") -> list[Path]:
        """What the trainers of all nodes have written, one file each."""
        return sorted(
            log for name in self.nodes for log in self.runtime(name).glob(f"trainers/*/{stream}")
        )

    def wait_alive(self, names: Sequence[str], timeout: float = 30.0) -> None:
        """Wait until nodes have registered.

        Raises :class:`ClusterError` when one of them ends, or after ``timeout`` seconds.
        """

        def registered(seen: Mapping[str, admin_pb2.NodeDescription]) -> bool:
            for name in names:
                if not self.nodes[name].alive:
                    raise ClusterError(f"{name} ended:\n{tail(self.nodes[name].log)}")
            return all(name in seen and seen[name].alive for name in names)

        self.admin.wait_nodes(registered, timeout, f"nodes {', '.join(names)} live")

    def trainers(self, name: str) -> dict[str, int]:
        """The process ids of a node's running trainers, by their instance."""
        found = {}
        for pid in children(self.nodes[name].pid):
            instance = environment(pid).get(INSTANCE_VARIABLE)
            if instance:
                found[instance] = pid
        return found

    def trainer(self, job: str, rank: int) -> int:
        """The process id of the trainer that has a rank of a job.

        Raises :class:`ClusterError` when no running process has it.
        """
        seen = self.admin.describe(job)
        each = seen.job.spec.ranks_per_node
        for slot in seen.slots:
            if slot.slot == rank // each and slot.node in self.nodes:
                pid = self.trainers(slot.node).get(slot.ranks[rank % each].instance)
                if pid is not None:
                    return pid
        raise ClusterError(f"no trainer has rank {rank} of {job} now: {seen}")

    def kill_node(self, *names: str) -> None:
        """SIGKILL nodes, each with its workerd and all of its trainers, all of them at once."""
        pids = [pid for name in names for pid in tree(self.nodes[name].pid)]
        kill_all(pids)
        for name in names:
            self.nodes[name].wait(10.0)
        reap(pids)

    def kill_workerd(self, name: str) -> None:
        """SIGKILL a node's workerd alone; waits until what it had started has ended with it."""
        others = tree(self.nodes[name].pid)[1:]
        kill_all([self.nodes[name].pid])
        self.nodes[name].wait(10.0)
        wait_ended(others)
        reap(others)

    def kill_trainer(self, job: str, rank: int) -> None:
        """SIGKILL the trainer that has a rank of a job, and what it has started."""
        kill_all(tree(self.trainer(job, rank)))

    # ---- the end

    def _mark(self) -> dict[str, str]:
        """Tells this cluster's processes, and what they start, from others."""
        # torch leaves a folder for its compiler where temporary files go
        return {"HOTSPARE_LOCAL_CLUSTER": str(self.folder), "TMPDIR": str(self.folder / "tmp")}

    def running(self) -> list[int]:
        """The processes of this cluster that run now, whoever their parent is."""
        return running_with(str(self.folder))

    def _end_processes(self) -> None:
        """End the daemons the way an operator does, then whatever is left the hard way."""
        daemons = [*self.nodes.values(), *self.coordinators.values()]
        for one in daemons:
            one.signal(signal.SIGTERM)
        for one in self.nodes.values():
            one.wait(5.0)
        for one in self.coordinators.values():
            one.wait(2.0)
        self.etcd.close()
        left = self.running()
        kill_all(left)
        for one in daemons:
            one.wait(5.0)
        reap(left)
