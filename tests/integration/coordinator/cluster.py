# SPDX-License-Identifier: Apache-2.0
"""Real coordinators on a real etcd; the nodes are played by writing the contract's records."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from coordinator.admin.reads import LeaderAddress, leader
from coordinator.controller import records
from coordinator.model import (
    Ack,
    Assignment,
    Device,
    DeviceKind,
    Generation,
    JobSpec,
    JobStatus,
    Node,
    Phase,
    Progress,
    RankAck,
    RankProgress,
    Rendezvous,
    Slot,
    SpareAssignment,
    StepPhase,
    Trainer,
    TrainerExit,
    TrainerState,
    Warm,
    to_record,
)
from coordinator.store import Absent, Created, Lease, Put, Store, StoreError, keys
from protos import admin_pb2, admin_pb2_grpc, job_pb2, node_pb2, node_pb2_grpc
from tests.etcd import Etcd

SOON = 60.0
"""A generous deadline for what should happen within a second or a lease."""
_PAUSE = threading.Event()  # never set: between looks
TTL = 2
"""Of leases here: the least that etcd grants by default."""


class Coordinator:
    """A coordinator process."""

    def __init__(self, etcd: Etcd, prefix: str, name: str, log: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "coordinator"),
                    *("--etcd", ",".join(etcd.endpoints), "--prefix", prefix, "--id", name),
                    *("--listen", "127.0.0.1:0", "--lease-ttl", str(TTL), "--log-level", "debug"),
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=out,
                stdin=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
        self.address = ""

    def ready(self) -> Coordinator:
        """Wait until it says where it listens."""
        assert self.process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        stdout = self.process.stdout
        reader = threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True)
        reader.start()
        line = lines.get(timeout=SOON)
        assert line.startswith("listening on "), self.log.read_text()
        self.address = line.removeprefix("listening on ").strip()
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(SOON)

    @contextlib.contextmanager
    def stub(self) -> Iterator[admin_pb2_grpc.AdminStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield admin_pb2_grpc.AdminStub(channel)


class _Probed(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    def Probe(
        self, request: node_pb2.ProbeRequest, context: grpc.ServicerContext
    ) -> node_pb2.ProbeReply:
        return node_pb2.ProbeReply(node=self._node.name, incarnation=self._node.incarnation)


_INCARNATIONS = itertools.count(1)


@dataclass
class FakeNode:
    """What a workerd with trainers writes, as far as the leader can see."""

    store: Store
    name: str
    devices: int = 1
    incarnation: str = ""
    lease: Lease | None = None
    guard: Created | None = None
    record: Node = Node()
    state: dict[str, int] = field(default_factory=dict)
    """The step of each trainer instance that holds a state."""
    stuck: bool = False
    """It acknowledges nothing."""
    server: grpc.Server | None = None

    def start(self) -> FakeNode:
        """Serve probes and register, as a new incarnation."""
        self.incarnation = f"i{next(_INCARNATIONS)}"
        self.state = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        node_pb2_grpc.add_NodeServiceServicer_to_server(_Probed(self), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.record = Node(
            node=self.name,
            incarnation=self.incarnation,
            version="test",
            control_address=f"127.0.0.1:{port}",
            data_address="127.0.0.1",
            devices=tuple(Device(DeviceKind.CPU, one) for one in range(self.devices)),
        )
        self.register()
        return self

    def register(self) -> None:
        """Under a new lease, with the same incarnation (rule 13)."""
        self.lease = Lease(self.store, TTL, lambda event: None)
        key = keys.node(self.name)
        put = Put(key, records.dump(self.record), self.lease.id)
        deadline = time.monotonic() + SOON
        while True:
            try:
                self.guard = Created(key, self.store.commit([Absent(key)], [put]))
                return
            except StoreError:
                if time.monotonic() > deadline:
                    raise
                _PAUSE.wait(0.1)

    def lose_lease(self) -> None:
        """The lease ends; the process lives and answers probes."""
        assert self.lease is not None
        self.lease.close(revoke=True)
        self.lease = self.guard = None

    def kill(self) -> None:
        """As SIGKILL: the port refuses at once, the lease ends by itself."""
        if self.server is not None:
            self.server.stop(None).wait()
            self.server = None
        if self.lease is not None:
            self.lease.close(revoke=False)
            self.lease = self.guard = None
        self.state = {}

    @property
    def alive(self) -> bool:
        return self.guard is not None

    def write(self, key: str, value: Any) -> None:
        """On the node's lease, guarded by its own key; nothing when the lease has just gone."""
        if self.guard is None or self.lease is None:
            return
        with contextlib.suppress(StoreError):
            self.store.commit([self.guard], [Put(key, records.dump(value), self.lease.id)])

    def update(self, record: Node) -> None:
        if record != self.record:
            self.record = record
            self.write(keys.node(self.name), record)

    def end_trainer(self, instance: str, job: str, since: int) -> None:
        """A trainer's process has ended with code 3."""
        over = Trainer(
            instance=instance,
            state=TrainerState.ENDED,
            job=job,
            since=since,
            exit=TrainerExit(code=3, message="Traceback\nboom"),
        )
        self.state.pop(instance, None)
        kept = tuple(one for one in self.record.trainers if one.instance != instance)
        self.update(replace(self.record, trainers=(*kept, over)))


class Cluster:
    """One cluster under a prefix of its own."""

    def __init__(self, etcd: Etcd, prefix: str, folder: Path) -> None:
        self.etcd = etcd
        self.prefix = prefix
        self.folder = folder
        self.store = Store(etcd.endpoints, prefix=prefix)
        self.coordinators: dict[str, Coordinator] = {}
        self.nodes: dict[str, FakeNode] = {}
        self.answered: Container[tuple[int, Phase]] | None = None
        """The nodes act on these generations and phases alone; None: on all."""

    def close(self) -> None:
        for one in self.coordinators.values():
            one.signal(signal.SIGCONT)
            one.kill()
        for node in self.nodes.values():
            node.kill()
        self.store.close()

    # ---- processes

    def launch(self, *names: str, flags: Sequence[str] = ()) -> list[Coordinator]:
        """Start coordinators and wait until they serve."""
        for name in names:
            log = self.folder / f"{name}.log"
            self.coordinators[name] = Coordinator(self.etcd, self.prefix, name, log, flags)
        return [self.coordinators[name].ready() for name in names]

    def add_nodes(self, *names: str, devices: int = 1) -> None:
        for name in names:
            self.nodes[name] = FakeNode(self.store, name, devices).start()

    def leader(self, besides: str = "") -> Coordinator:
        """Wait until somebody leads, somebody else than ``besides``."""

        def known() -> LeaderAddress | None:
            with contextlib.suppress(StoreError):
                return leader(self.store)
            return None

        found = self.wait(
            lambda: (one := known()) is not None and one.id != besides and one, "somebody leads"
        )
        return self.coordinators[found.id]

    # ---- what stands in etcd

    def load(self, key: str) -> Any:
        value = self.store.get(key)
        return None if value is None else records.load(keys.parse(key).kind, value)

    def generation(self, job: str = "demo") -> Generation:
        return self.load(keys.generation(job)) or Generation()

    def status(self, job: str = "demo") -> JobStatus:
        return self.load(keys.job_status(job)) or JobStatus()

    def slot(self, number: int, job: str = "demo") -> Slot:
        found = self.load(keys.slot(job, number))
        assert isinstance(found, Slot)
        return found

    def incidents(self, job: str = "demo") -> list[Any]:
        items = self.store.list(keys.INCIDENTS).items
        found = [records.load(keys.parse(key).kind, value) for key, value in items.items()]
        return [one for one in found if one.job == job]

    # ---- the operator

    def submit(self, spec: JobSpec, at: Coordinator, request_id: str = "") -> int:
        request = admin_pb2.SubmitJobRequest(
            spec=to_record(spec, job_pb2.JobSpec()), request_id=request_id
        )
        with at.stub() as stub:
            return int(stub.SubmitJob(request, timeout=SOON).revision)

    # ---- the nodes' part

    def play(self) -> None:
        """Let every living node do what its records ask of it, once."""
        for node in self.nodes.values():
            if node.alive:
                self._play(node)

    def _play(self, node: FakeNode) -> None:
        place: Assignment | None = self.load(keys.assignment(node.name))
        if place is None:
            spare: SpareAssignment | None = self.load(keys.spare(node.name))
            warm = Warm(spare.job, spare.spec_revision) if spare is not None else None
            node.update(replace(node.record, warm=warm))
            return
        if place.incarnation != node.incarnation:
            return
        spec = self.load(keys.job_spec(place.job)).spec
        generation = self.generation(place.job)
        slot: Slot | None = self.load(keys.slot(place.job, place.slot))
        if slot is None or slot.node != node.name or slot.generation > generation.generation:
            return
        now = (generation.generation, generation.phase)
        if self.answered is not None and now not in self.answered:
            return
        instances = [
            rank.instance or f"{node.incarnation}-{rank.since}-{local}"
            for local, rank in enumerate(slot.ranks)
        ]
        if generation.phase.ended:
            node.update(replace(node.record, trainers=()))
        elif generation.phase is Phase.PAUSE:
            self._acknowledge(node, spec, generation, slot, instances)
        else:
            self._run(node, spec, generation, slot, instances)

    def _acknowledge(
        self,
        node: FakeNode,
        spec: JobSpec,
        generation: Generation,
        slot: Slot,
        instances: Sequence[str],
    ) -> None:
        given: Ack | None = self.load(keys.ack(spec.name, node.name))
        if node.stuck or (given is not None and given.generation == generation.generation):
            return
        offer = None
        if slot.slot in generation.rendezvous_slots:
            offer = Rendezvous("127.0.0.1:1", f"{node.name}.{generation.generation}")
        fresh = "" if generation.last_running_generation else "digest"
        ranks = []
        for local, instance in enumerate(instances):
            held = node.state.get(instance)
            ranks.append(
                RankAck(
                    rank=spec.rank(slot.slot, local),
                    instance=instance,
                    phase=StepPhase.EMPTY if held is None else StepPhase.COMPUTING,
                    step=-1 if held is None else held,
                    initial_digest=fresh if held is None else "",
                    shard_address="127.0.0.1:2",
                    offer=offer if local == 0 else None,
                )
            )
        trainers = tuple(
            Trainer(instance, local, TrainerState.PLACED, spec.name, 1, slot.ranks[local].since)
            for local, instance in enumerate(instances)
        )
        node.update(replace(node.record, trainers=trainers, warm=None))
        ack = Ack(generation.generation, node.incarnation, tuple(ranks))
        node.write(keys.ack(spec.name, node.name), ack)

    def _run(
        self,
        node: FakeNode,
        spec: JobSpec,
        generation: Generation,
        slot: Slot,
        instances: Sequence[str],
    ) -> None:
        over = {one.instance for one in node.record.trainers if one.state is TrainerState.ENDED}
        if over & set(instances):
            return
        ranks = []
        for local, instance in enumerate(instances):
            if generation.phase is Phase.RESTORE:
                node.state[instance] = generation.resume_step
            else:
                node.state[instance] += 1
            ranks.append(
                RankProgress(
                    rank=spec.rank(slot.slot, local),
                    instance=instance,
                    generation=generation.generation,
                    phase=StepPhase.COMPUTING,
                    step=node.state[instance],
                    restored=generation.generation,
                )
            )
        progress = Progress(node.incarnation, tuple(ranks), 10.0)
        node.write(keys.progress(spec.name, node.name), progress)

    def finish(self, job: str = "demo") -> None:
        """Every rank is done with its script, all at the same step."""
        generation = self.generation(job)
        last = max(step for node in self.nodes.values() for step in node.state.values())
        for node in self.nodes.values():
            progress: Progress | None = self.load(keys.progress(job, node.name))
            if node.alive and progress is not None:
                done = tuple(
                    replace(
                        one,
                        phase=StepPhase.DONE,
                        step=last,
                        digest="final",
                        generation=generation.generation,
                    )
                    for one in progress.ranks
                )
                node.write(keys.progress(job, node.name), replace(progress, ranks=done))

    # ---- waiting

    def wait(
        self, holds: Callable[[], Any], what: str, *, play: bool = False, timeout: float = SOON
    ) -> Any:
        """Wait until it holds, playing the nodes meanwhile if asked to; returns what it gave."""
        deadline = time.monotonic() + timeout
        while True:
            if play:
                with contextlib.suppress(StoreError):
                    self.play()
            result = holds()
            if result:
                return result
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout:g} s: {what}\n{self.evidence()}")
            _PAUSE.wait(0.02)

    def runs(self, job: str = "demo", after: int = 0) -> Generation:
        """Play until the job is RUNNING in a later generation than ``after``."""

        def running() -> Generation | None:
            with contextlib.suppress(StoreError):
                now = self.generation(job)
                if now.phase is Phase.RUNNING and now.generation > after:
                    return now
            return None

        found = self.wait(running, f"{job} runs in a generation after {after}", play=True)
        assert isinstance(found, Generation)
        return found

    def evidence(self) -> str:
        """For a failed test: what stands in etcd, and the ends of the coordinators' logs."""
        parts = []
        with contextlib.suppress(StoreError):
            items = self.store.list("").items
            parts = [f"{key} {value.value.decode()}" for key, value in items.items()]
        for one in self.coordinators.values():
            parts.append(f"--- {one.name}: {one.log.read_text()[-3000:]}")
        return "\n".join(parts)
