# SPDX-License-Identifier: Apache-2.0
"""One emulated node: the agent's production decisions, its etcd traffic, and trainers of air.

What to write, and when, comes from ``workerd.agent.decide``; the keys read and watched and the
guards are those of ``workerd.agent``. Trainers answer at once: they are ready when started, stop,
pull and join without doing anything. They join when their own progress says that they have
restored (a real group is a barrier: they would join after the last one). All of them make a step
at the same ticks of one clock, and none from a node's death until RUNNING, as the agreement before
an update has it; nobody reports a broken group, as where a machine loses its power.

Left out against workerd: a node whose place changes watches what is new, where workerd begins the
whole watch again with a listing of each key; and a node's reads and writes go one after the other,
where workerd's may overlap.
"""

from __future__ import annotations

import asyncio
import functools
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc

from benchmarks.scale.clock import STEP, Clock, Marks
from benchmarks.scale.wires import Wire
from coordinator.controller import records
from coordinator.model import (
    Assignment,
    Device,
    DeviceKind,
    Node,
    NodeFlags,
    Pull,
    Rendezvous,
    SpareAssignment,
    StepPhase,
)
from coordinator.store import (
    Absent,
    Created,
    Delete,
    Guard,
    GuardFailed,
    KeyValue,
    Put,
    Unchanged,
    Write,
    keys,
)
from coordinator.store.txn import build
from protos.etcd import rpc_pb2
from workerd.agent import actions as do
from workerd.agent.decide import decide
from workerd.agent.orders import order_keys, watched_keys
from workerd.agent.reports import node_record, progress_interval
from workerd.agent.standing import Owner, standing
from workerd.agent.state import JobOrders, Limits, Local, Orders, Stopped, TrainerFacts, Written

_LIMITS = Limits()
_AGAIN = 0.25  # seconds until what etcd could not take is tried again
_DEVICES = (Device(DeviceKind.CPU, 0),)
_PULLED = Pull(source="a-source", bytes=1 << 30, seconds=1.0)
_CHANCE = random.Random(1)  # noqa: S311 - jitter


class EmulatedNode:
    """Lives from :meth:`start` to :meth:`kill`."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        full: Callable[[str], bytes],
        ttl: int,
        clock: Clock,
        marks: Marks,
        probe: str,
    ) -> None:
        self.name = name
        self.lease = 0
        self._wire = wire
        self._full = full
        self._ttl = ttl
        self._clock = clock
        self._marks = marks
        self._template = Node(
            node=name,
            incarnation=secrets.token_hex(6),
            boot_id=secrets.token_hex(16),
            version="emulated",
            control_address=probe,
            data_address="127.0.0.1",
            devices=_DEVICES,
        )
        self._created = 0
        self._orders: Orders | None = None
        self._named: frozenset[str] = frozenset()
        self._place: tuple[str, int] | None = None
        self._watched: dict[str, int] = {}
        self._ack_revisions: dict[str, int] = {}
        self._requests: dict[tuple[str, ...], rpc_pb2.TxnRequest] = {}
        self._node_written: Node | None = None
        self._written: Written | None = None
        self._acked: tuple[str, int] | None = None
        self._trainers: dict[str, TrainerFacts] = {}
        self._stale = True
        self._wake = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register, and follow orders from then on. Raises grpc.RpcError."""
        node, flags = keys.node(self.name), keys.flags(self.name)
        await self._read([node, flags])
        self.lease = (await self._wire.grant(self._ttl)).ID
        record = node_record(self._local(), standing(None, self._local()), _LIMITS)
        self._created = await self._commit(
            [Absent(flags), Absent(node)], [Put(node, records.dump(record), self.lease)]
        )
        self._node_written = record
        self._renew()
        self._task = asyncio.ensure_future(self._run())

    def kill(self) -> None:
        """As SIGKILL: nothing is renewed, watched or written any more."""
        if self._task is not None:
            self._task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._wire.abandon(self.lease)
        self._wire.unwatch(list(self._watched.values()))

    def failed(self) -> BaseException | None:
        """What ended it, if anything but :meth:`kill` did."""
        if self.lease in self._wire.lost:
            return LookupError(f"etcd gave up the lease of {self.name}")
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def _later(self, what: str, seconds: float, then: Callable[[], object]) -> None:
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = asyncio.get_running_loop().call_later(max(0.0, seconds), then)

    def _renew(self) -> None:
        if self._node_written is not None and self._timers:
            self._wire.renew(self.lease)
        self._later("renew", self._ttl / 3 * (1 - 0.2 * _CHANCE.random()), self._renew)

    # ---- etcd

    async def _read(self, wanted: Sequence[str]) -> dict[str, KeyValue]:
        request = self._requests.get(tuple(wanted))
        if request is None:
            ranges = [rpc_pb2.RangeRequest(key=self._full(one)) for one in wanted]
            ops = [rpc_pb2.RequestOp(request_range=one) for one in ranges]
            request = rpc_pb2.TxnRequest(success=ops)
            self._requests = {tuple(wanted): request}  # mostly the same is read again
        while True:
            try:
                answer = await self._wire.txn(request)
                break
            except grpc.RpcError:
                self._marks.failures += 1
                await asyncio.sleep(_AGAIN)
        found = {}
        for key, part in zip(wanted, answer.responses, strict=True):
            for kv in part.response_range.kvs:
                found[key] = KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)
        return found

    async def _commit(self, guards: Sequence[Guard], writes: Sequence[Write]) -> int:
        request, _ = build(self._full, guards, writes)
        answer = await self._wire.txn(request)
        if not answer.succeeded:
            raise GuardFailed(
                f"{self.name}: {writes[0].key}", failed=guards, current={}, revision=0
            )
        return int(answer.header.revision)

    async def _read_orders(self) -> None:
        while True:
            wanted = self._named | {one.job for one in self._trainers.values()}
            place = self._place
            items = await self._read(order_keys(self.name, wanted, place))
            orders = self._parse(items, wanted, place)
            held, spare = orders.assignment, orders.spare
            self._place = (held.job, held.slot) if held is not None else None
            self._named = frozenset(one.job for one in (held, spare) if one is not None)
            if self._named <= wanted and self._place == place:
                break
        self._orders = orders
        self._ack_revisions = {
            job: items[key].mod_revision
            for job in wanted
            if (key := keys.ack(job, self.name)) in items
        }
        ranges = watched_keys(self.name, wanted, self._place)
        if set(ranges) != self._watched.keys():
            gone = [self._watched.pop(one) for one in self._watched.keys() - set(ranges)]
            self._wire.unwatch(gone)
            fresh = [one for one in ranges if one not in self._watched]
            full = [self._full(one) for one in fresh]
            made = await self._wire.watch(full, self._changed)
            self._watched.update(zip(fresh, made, strict=True))
            self._stale = True

    def _parse(
        self, items: dict[str, KeyValue], jobs: frozenset[str], place: tuple[str, int] | None
    ) -> Orders:
        def value(key: str) -> Any:
            found = items.get(key)
            return None if found is None else _load(keys.parse(key).kind, found.value)

        held: Assignment | None = value(keys.assignment(self.name))
        spare: SpareAssignment | None = value(keys.spare(self.name))
        return Orders(
            flags=value(keys.flags(self.name)) or NodeFlags(),
            assignment=held,
            spare=spare,
            jobs={
                job: JobOrders(
                    job=value(keys.job_spec(job)),
                    generation=value(keys.generation(job)),
                    slot=value(keys.slot(*place))
                    if place is not None and place[0] == job
                    else None,
                    ack=value(keys.ack(job, self.name)),
                )
                for job in jobs
            },
        )

    # ---- the loop

    def _changed(self) -> None:
        self._stale = True
        self._wake.set()

    async def _run(self) -> None:
        while True:
            while await self._turn():
                pass
            await self._wake.wait()
            self._wake.clear()

    async def _turn(self) -> bool:
        """Decide once and carry it out; whether there was anything to do."""
        if self._stale:
            self._stale = False
            await self._read_orders()
        actions = decide(self._orders, self._local(), _LIMITS)
        for action in actions:
            if not self._of_trainer(action):
                try:
                    await self._of_etcd(action)
                except (grpc.RpcError, GuardFailed):
                    # As workerd: read, and decide again. It may have been carried out after all.
                    self._marks.failures += 1
                    await asyncio.sleep(_AGAIN)
                    self._stale = True
        if not actions and not self._stale:
            self._await_step()
        return bool(actions) or self._stale

    def _await_step(self) -> None:
        running = [one for one in self._trainers.values() if _steps(one)]
        if self._written is not None and running:
            first = any(one.committed < one.joined for one in running)
            state = standing(self._orders, self._local())
            if not isinstance(state, Owner):
                return
            due = self._written.at + progress_interval(state, _LIMITS) - time.monotonic()
            wait = self._clock.until(0.0 if first else max(0.0, due))
            if wait is not None:
                self._later("step", wait, self._wake.set)

    def _local(self) -> Local:
        step = self._clock.step()
        for instance, one in self._trainers.items():
            if _steps(one) and step > one.step:
                if one.committed < one.joined:
                    self._marks.set(one.joined, "committed")
                self._trainers[instance] = replace(one, committed=one.joined, step=step)
        return Local(
            now=time.monotonic(),
            template=self._template,
            trainers=tuple(self._trainers.values()),
            registered=self._created > 0,
            node_written=self._node_written,
            written=self._written,
            acked=self._acked,
            ack_held=self._acked is not None,
            steps_per_second=1 / STEP,
        )

    async def _of_etcd(self, action: do.Action) -> None:
        guards: list[Guard] = [Created(keys.node(self.name), self._created)]
        match action:
            case do.WriteNode(record):
                await self._put(guards, keys.node(self.name), record)
                self._node_written = record
            case do.WriteAck(job, ack):
                key = keys.ack(job, self.name)
                seen = self._ack_revisions.get(job)
                guards.append(Absent(key) if seen is None else Unchanged(key, seen))
                self._ack_revisions[job] = await self._put(guards, key, ack)
                self._acked = (job, ack.generation)
                self._marks.set(ack.generation, "acked")
            case do.WriteProgress(job, progress, marks):
                await self._put(guards, keys.progress(job, self.name), progress)
                self._written = Written(job, progress, marks, time.monotonic())
                self._progressed()
            case do.ClearPlace(job):
                gone = [keys.ack(job, self.name), keys.progress(job, self.name)]
                await self._commit(guards, [Delete(one) for one in gone])
                self._written = self._acked = None
                self._ack_revisions.pop(job, None)
            case _:
                raise NotImplementedError(f"{self.name}: {action}")

    async def _put(self, guards: Sequence[Guard], key: str, record: Any) -> int:
        return await self._commit(guards, [Put(key, records.dump(record), self.lease)])

    # ---- trainers

    def _progressed(self) -> None:
        """The progress is written: who has restored joins."""
        for instance, one in self._trainers.items():
            if one.lives and one.restored > one.joined:
                self._trainers[instance] = replace(one, joined=one.restored)
                self._marks.set(one.restored, "joined")

    def _of_trainer(self, action: do.Action) -> bool:
        match action:
            case do.StartTrainer():
                instance = secrets.token_hex(6)
                self._trainers[instance] = TrainerFacts(
                    instance=instance,
                    local_rank=action.local_rank,
                    job=action.job,
                    spec_revision=action.spec_revision,
                    started_at=time.monotonic(),
                    attempt=action.attempt,
                    placement=action.placement,
                    connected=True,
                )
            case do.SendWelcome():
                self._set(action.instance, welcomed=True, ready=True)
            case do.PlaceTrainer():
                self._set(action.instance, placement=action.placement)
            case do.SendStop():
                self._stop(action)
            case do.SendRestore():
                self._restore(action)
            case do.SendRunning():
                self._set(action.instance, running_sent=action.generation)
                self._clock.go(action.generation)
            case do.SendRelease():
                self._set(action.instance, released_at=time.monotonic())
            case do.EndTrainer() | do.KillTrainer():
                self._set(
                    action.instance, ending=action.reason, ended_at=time.monotonic(), cleared=True
                )
            case do.ForgetTrainer():
                del self._trainers[action.instance]
            case _:
                return False
        return True

    def _set(self, instance: str, **changes: Any) -> None:
        self._trainers[instance] = replace(self._trainers[instance], **changes)

    def _stop(self, action: do.SendStop) -> None:
        self._marks.set(action.generation, "stopped")
        trainer = self._trainers[action.instance]
        empty = trainer.step < 0
        offer = (
            Rendezvous("127.0.0.1:1", secrets.token_hex(16)) if action.offer_rendezvous else None
        )
        stopped = Stopped(
            generation=action.generation,
            phase=StepPhase.EMPTY if empty else StepPhase.COMPUTING,
            step=-1 if empty else max(trainer.step, self._clock.step()),
            initial_digest="0" * 64 if empty else "",
            shard_address="127.0.0.1:65535",
            offer=offer,
        )
        self._set(action.instance, stop_sent=action.generation, stopped=stopped)

    def _restore(self, action: do.SendRestore) -> None:
        self._marks.set(action.generation, "restored")
        empty = self._trainers[action.instance].step < 0
        self._set(
            action.instance,
            restore_sent=action.generation,
            restored=action.generation,
            pull=_PULLED if empty and not action.initial else None,
            step=action.resume_step,
            phase=StepPhase.COMPUTING,
        )


@functools.cache
def _load(kind: keys.KeyKind, value: bytes) -> Any:
    """Nodes of one process read the same records: they are parsed once, as on a node of its own."""
    return records.load(kind, KeyValue("", value, 0, 0, 0))


def _steps(trainer: TrainerFacts) -> bool:
    """Whether it has joined, and has not stopped again."""
    return trainer.lives and 0 < trainer.joined >= trainer.stop_sent
