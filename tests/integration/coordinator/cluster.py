# SPDX-License-Identifier: Apache-2.0
"""Real coordinators on a real etcd; the nodes are played by writing the contract's records."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from coordinator.admin.reads import LeaderAddress, leader
from coordinator.controller import records
from coordinator.model import (
    Ack,
    Assignment,
    Generation,
    JobSpec,
    JobStatus,
    Phase,
    Progress,
    RankAck,
    RankProgress,
    Rendezvous,
    Slot,
    SpareAssignment,
    StepPhase,
    Trainer,
    TrainerState,
    Warm,
    to_record,
)
from coordinator.store import Store, StoreError, keys
from protos import admin_pb2, job_pb2
from tests.etcd import Etcd
from tests.integration.coordinator.nodes import FakeNode
from tests.integration.coordinator.processes import SOON, Coordinator

_PAUSE = threading.Event()  # never set: between looks


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
        self._done: set[str] = set()
        """Jobs whose scripts are through."""

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
        """Also while nobody leads yet."""
        request = admin_pb2.SubmitJobRequest(
            spec=to_record(spec, job_pb2.JobSpec()), request_id=request_id or uuid.uuid4().hex
        )

        def submitted() -> int:
            with at.stub() as stub:
                try:
                    return int(stub.SubmitJob(request, timeout=SOON).revision)
                except grpc.RpcError as error:
                    raised: object = error
                    assert isinstance(raised, grpc.Call)
                    if raised.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    return 0

        return int(self.wait(submitted, f"{spec.name} is submitted"))

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
            node.update(replace(node.record, warm=warm, trainers=()))
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
        stands = any(one.held == generation.generation - 1 for one in self.nodes.values())
        for local, instance in enumerate(instances):
            if stands and instance in node.state:
                self._come_to_boundary(node, instance)
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
                    held=held is not None and stands,
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
        if over & set(instances) or spec.name in self._done:
            return
        ranks = []
        if generation.hold:
            node.held = generation.generation
        for local, instance in enumerate(instances):
            if generation.phase is Phase.RESTORE:
                node.state[instance] = generation.resume_step
            elif generation.hold:
                self._come_to_boundary(node, instance)
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
                    held=generation.generation if generation.hold else 0,
                )
            )
        progress = Progress(node.incarnation, tuple(ranks), 10.0)
        node.write(keys.progress(spec.name, node.name), progress)

    def _come_to_boundary(self, node: FakeNode, instance: str) -> None:
        """Nodes step one after the other here: who is behind has been PREPARED as well."""
        steps = [step for one in self.nodes.values() if one.alive for step in one.state.values()]
        node.state[instance] = max(steps)

    def finish(self, job: str = "demo") -> None:
        """Every rank is done with its script, all at the same step, and stays so."""
        self._done.add(job)
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
