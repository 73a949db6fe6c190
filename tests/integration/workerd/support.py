# SPDX-License-Identifier: Apache-2.0
"""A real workerd, and a test that plays the leader by writing the records of the contract."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import Message

from coordinator.model import (
    Ack,
    Assignment,
    DeadIncarnation,
    Generation,
    Job,
    JobSpec,
    Node,
    NodeFlags,
    Phase,
    Progress,
    Rendezvous,
    Slot,
    SlotRank,
    Source,
    SpareAssignment,
    Trainer,
    TrainerState,
    from_record,
    to_record,
)
from coordinator.store import Delete, Put, Store, Write, decode, encode, keys
from protos import job_pb2, membership_pb2, node_pb2

T = TypeVar("T")
V = TypeVar("V")
SECONDS = 30.0
ROOT = Path(__file__).resolve().parents[3]
FAKE_TRAINER = str(Path(__file__).with_name("fake_trainer.py"))


def wait_for(what: Callable[[], T | None], why: str, seconds: float = SECONDS) -> T:
    """The first result of ``what`` that is true."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        if found := what():
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds:g} s: {why}")
        pause.wait(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def marked(text: str) -> list[int]:
    """The living processes that have ``text`` in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        if text.encode() in environ and alive(int(name)):
            found.append(int(name))
    return found


class Workerd:
    """One workerd process."""

    def __init__(
        self, etcd: str, prefix: str, node: str, folder: Path, *options: str, ttl: float = 5.0
    ) -> None:
        self.node = node
        self.folder = folder
        self.log = folder.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "workerd",
                    *("--etcd", etcd, "--prefix", prefix, "--node", node),
                    *("--runtime-dir", str(folder), "--lease-ttl", str(ttl)),
                    *options,
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def listening(self) -> str:
        """The control address, once it is registered."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        assert ready, self.logged()
        line = self.process.stdout.readline().strip()
        assert line.startswith("listening on "), (line, self.logged())
        return line.removeprefix("listening on ")

    def logged(self) -> str:
        """What it has written to stderr."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()


class Leader:
    """Writes what a leader would, and reads what workerd says."""

    def __init__(self, store: Store, job: str, folder: Path, **spec: object) -> None:
        self.store = store
        self.job = job
        environment = {"FAKE_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        environment.update(spec.pop("environment", {}))  # type: ignore[call-overload]
        self.spec = replace(
            JobSpec(
                name=job,
                command=(sys.executable, FAKE_TRAINER),
                environment=tuple(sorted(environment.items())),
            ),
            **spec,  # type: ignore[arg-type]
        )
        self.generation = Generation(job=job, spec_revision=1)
        self.put(keys.job_spec(job), Job(spec=self.spec, spec_revision=1), job_pb2.Job())

    # ---- reading

    def _get(self, key: str, cls: type[V], record: type[Message]) -> V | None:
        kv = self.store.get(key)
        return None if kv is None else from_record(cls, decode(record, kv))

    def node(self, node: str) -> Node | None:
        return self._get(keys.node(node), Node, node_pb2.Node)

    def ack(self, node: str) -> Ack | None:
        return self._get(keys.ack(self.job, node), Ack, membership_pb2.Ack)

    def progress(self, node: str) -> Progress | None:
        return self._get(keys.progress(self.job, node), Progress, membership_pb2.Progress)

    def trainers(self, node: str, *states: TrainerState) -> list[Trainer]:
        """The trainers of a node in one of these states."""
        record = self.node(node)
        return [one for one in record.trainers if one.state in states] if record else []

    # ---- writing

    def put(self, key: str, value: object, record: Message) -> Put:
        """Write one record."""
        put = Put(key, encode(to_record(value, record)))
        self.store.commit([], [put])
        return put

    def keep_warm(self, node: str) -> None:
        self.put(keys.spare(node), SpareAssignment(node, self.job, 1), node_pb2.SpareAssignment())

    def pause(self, *placed: str, since: int | None = None, reset: tuple[str, ...] = ()) -> None:
        """The next generation: ``placed`` own the slots in order; those in ``reset`` begin anew."""
        number = self.generation.generation + 1
        writes: list[Write] = []
        for slot, node in enumerate(placed):
            record = self.node(node)
            assert record is not None, f"{node} is not registered"
            before = self._get(keys.slot(self.job, slot), Slot, membership_pb2.Slot)
            if (
                before is not None
                and (before.node, before.incarnation) == (node, record.incarnation)
                and node not in reset
            ):
                continue
            value = Slot(
                slot=slot,
                node=node,
                incarnation=record.incarnation,
                ranks=(SlotRank(since=since or number),) * self.spec.ranks_per_node,
                generation=number,
            )
            writes.append(
                Put(keys.slot(self.job, slot), encode(to_record(value, membership_pb2.Slot())))
            )
            if before is not None and before.node != node:
                writes.append(Delete(keys.assignment(before.node)))
            place = Assignment(node, record.incarnation, self.job, slot, number)
            writes.append(
                Put(keys.assignment(node), encode(to_record(place, node_pb2.Assignment())))
            )
        self.generation = replace(
            self.generation,
            generation=number,
            phase=Phase.PAUSE,
            resume_step=-1,
            initial=False,
            sources=(),
            rendezvous=None,
            rendezvous_slots=(0,),
        )
        self._commit(writes)

    def restore(self, *placed: str) -> dict[str, Ack]:
        """RESTORE once all have acknowledged, as the planner would write it."""
        number = self.generation.generation
        acks: dict[str, Ack] = {}
        for node in placed:

            def found(node: str = node) -> Ack | None:
                ack = self.ack(node)
                return ack if ack is not None and ack.generation == number else None

            acks[node] = wait_for(found, f"{node} acknowledges {number}")
        ranks = [rank for ack in acks.values() for rank in ack.ranks]
        step = max(rank.step for rank in ranks)
        holder = next(node for node, ack in acks.items() if ack.ranks[0].step == step)
        self.generation = replace(
            self.generation,
            phase=Phase.RESTORE,
            resume_step=max(step, 0),
            initial=step < 0,
            sources=(
                Source(
                    node=holder,
                    instance=acks[holder].ranks[0].instance,
                    address=acks[holder].ranks[0].shard_address,
                ),
            ),
            rendezvous=Rendezvous("127.0.0.1:1", "nonce"),
        )
        writes: list[Write] = []
        for slot, node in enumerate(placed):
            before = self._get(keys.slot(self.job, slot), Slot, membership_pb2.Slot)
            assert before is not None
            named = tuple(
                replace(rank, instance=ack.instance)
                for rank, ack in zip(before.ranks, acks[node].ranks, strict=True)
            )
            record = to_record(replace(before, ranks=named), membership_pb2.Slot())
            writes.append(Put(keys.slot(self.job, slot), encode(record)))
        self._commit(writes)
        return acks

    def joined(self, *placed: str) -> None:
        """RUNNING once all have joined."""
        number = self.generation.generation
        for node in placed:

            def found(node: str = node) -> bool:
                progress = self.progress(node)
                return (
                    progress is not None
                    and len(progress.ranks) == self.spec.ranks_per_node
                    and all(one.generation == number for one in progress.ranks)
                )

            wait_for(found, f"{node} has joined {number}")
        self.phase(Phase.RUNNING)

    def run(self, *placed: str, reset: tuple[str, ...] = ()) -> dict[str, Ack]:
        """A whole generation, up to RUNNING; the acks."""
        self.pause(*placed, reset=reset)
        acks = self.restore(*placed)
        self.joined(*placed)
        return acks

    def phase(self, phase: Phase) -> None:
        """Another phase of the same generation."""
        self.store.commit([], [self.record_of(phase)])

    def record_of(self, phase: Phase) -> Put:
        """The write of another phase."""
        self.generation = replace(self.generation, phase=phase)
        record = to_record(self.generation, membership_pb2.Generation())
        return Put(keys.generation(self.job), encode(record))

    def declare_dead(self, node: str, incarnation: str) -> None:
        flags = NodeFlags(dead=(DeadIncarnation(incarnation, "the test says so"),))
        self.put(keys.flags(node), flags, node_pb2.NodeFlags())

    def _commit(self, writes: list[Write]) -> None:
        self.store.commit([], [*writes, self.record_of(self.generation.phase)])

    def steps_on(self, node: str) -> int:
        """Wait until a node's progress moves; the step it has then."""
        before = self.progress(node)
        start = before.ranks[0].step if before else -1

        def moved() -> int | None:
            now = self.progress(node)
            return now.ranks[0].step if now and now.ranks and now.ranks[0].step > start else None

        return wait_for(moved, f"{node} makes steps")


def pid_of(workerd: Workerd, instance: str) -> int:
    """The process of a trainer."""
    mark = f"HOTSPARE_INSTANCE={instance}"
    for pid in marked(mark):
        if os.getsid(pid) == pid and str(workerd.folder) in _environ(pid):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            if int(stat.rpartition(")")[2].split()[1]) == workerd.process.pid:
                return pid
    raise AssertionError(f"trainer {instance} does not run")


def _environ(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace")
