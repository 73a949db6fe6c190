# SPDX-License-Identifier: Apache-2.0
"""The process group of one generation: reduced buckets, the agreement, and its end.

A group never blocks longer than its owner wants: every collective in flight ends when its work ends
or when the group is abandoned, whichever comes first. (Gloo's own `abort` does not unblock a
collective that waits for a live but silent peer.) So nothing that a collective may still write
to later is memory that anybody reads: Gloo works on staging buffers that go with the group.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from workerd.trainer.barrier import Barrier
from workerd.trainer.errors import GroupBroken, ReplicasDiffer

dist: Any = torch.distributed  # its stubs leave most of this out

BUILD_TIMEOUT: Final = timedelta(seconds=60)
# A peer may rightly be slow (it writes a file, compiles): who is stuck is judged elsewhere.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


@dataclass(frozen=True)
class GroupPlan:
    """What every rank of a generation has to know to meet the others."""

    job: str
    generation: int
    store_host: str
    store_port: int
    nonce: str
    replica: int  # rank in the DP group
    replicas: int  # its size
    position: int  # rank along the replica
    positions: int
    data_address: str  # what this process binds
    device: torch.device
    facts: Mapping[str, str]  # what must be equal to rank 0's, by name


class _Pending:
    """A collective in flight. It ends once: with its work, or with the group."""

    __slots__ = ("_end", "_lock", "ended", "error")

    def __init__(self, end: Callable[[BaseException | None], None]) -> None:
        self._lock = threading.Lock()
        self._end = end
        self.ended = False
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> bool:
        with self._lock:
            if self.ended:
                return False
            self.ended = True
            self.error = error
        self._end(error)
        return True


class Group:
    """One generation's group as this rank has joined it.

    `on_broken` is called once, from whatever thread, with the first error of a collective.
    """

    def __init__(
        self,
        plan: GroupPlan,
        data: Any,
        agreements: list[Any],
        barriers: list[Barrier],
        on_broken: Callable[[int, str], None],
    ) -> None:
        self.generation = plan.generation
        self.rank = plan.replica
        self.size = plan.replicas
        self.error: str | None = None
        self._device = plan.device
        self._data = data
        self._agreements = agreements  # along the replica first, then along the DP group
        self._barriers = barriers  # the same
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._pending: set[_Pending] = set()
        self._abandoned = False
        self._staging: dict[tuple[int, int], torch.Tensor] = {}

    def mean(self, module: int, index: int, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        """The mean of `buffer` over the replicas, as the future that a DDP hook returns.

        Never an error: a group that breaks or ends gives the local buffer, which is finite where
        the local gradient is, and keeps the error for `check`.
        """
        if self._device.type == "cuda":
            return self._mean_on_device(buffer)
        result: torch.futures.Future[Any] = torch.futures.Future()
        staging = self._staging.get((module, index))
        if staging is None or staging.shape != buffer.shape or staging.dtype != buffer.dtype:
            staging = self._staging[module, index] = torch.empty_like(buffer)
        torch.mul(buffer, 1.0 / self.size, out=staging)

        def end(error: BaseException | None) -> None:
            result.set_result(buffer if error is not None else staging)

        self._start(_Pending(end), lambda: self._data.allreduce([staging]))
        return result

    def _mean_on_device(self, buffer: torch.Tensor) -> torch.futures.Future[Any]:
        # Aborting kills the kernels, so the bucket itself may be reduced. The work's future is
        # done at once on the host and orders the streams.
        if self._closed():
            done: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            done.set_result(buffer)
            return done
        buffer.mul_(1.0 / self.size)
        try:
            work = self._data.allreduce([buffer])
        except RuntimeError as error:
            self._broken(error)
            done = torch.futures.Future(devices=[self._device])
            done.set_result(buffer)
            return done
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

    def agree(self, bits: int = 0) -> int:
        """The barrier between PREPARED and UPDATING over the whole job.

        `bits` (one byte) of all ranks come back joined by "or"; planned changes will ask for "stop
        after this step" by one. Raises GroupBroken.
        """
        if self._closed():
            raise GroupBroken(self.error or "the group was abandoned")
        try:
            for barrier in self._barriers:
                bits = barrier.meet(bits)
        except OSError as error:
            self._broken(error.with_traceback(None))
            raise GroupBroken(str(error)) from None
        return bits

    def maximum(self, tensor: torch.Tensor) -> None:
        """The elementwise maximum over the DP group, in place, on the CPU. Raises GroupBroken."""
        self._blocking(lambda: self._agreed(-1, tensor))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replica 0's `tensor` everywhere, in place, on this job's device. Raises GroupBroken."""
        self._blocking(lambda: self._data.broadcast([tensor], _from_first()))

    def _agreed(self, index: int, tensor: torch.Tensor) -> Any:
        # No frame that an exception may hold on to names a backend: whoever lets go of it last
        # waits for collectives that may never end, and that must be the thread of `drop`.
        return self._agreements[index].allreduce([tensor], dist.ReduceOp.MAX)

    def check(self) -> None:
        """Raises GroupBroken if a collective has failed, or the group was abandoned."""
        if self.error is not None or self._abandoned:
            raise GroupBroken(self.error or "the group was abandoned")

    def abandon(self) -> threading.Thread | None:
        """Ends everything in flight now; gives back what the group holds as soon as it can.

        Answers the thread that does so, or None when it was done before.
        """
        with self._lock:
            if self._abandoned:
                return None
            self._abandoned = True
            pending, self._pending = self._pending, set()
            backends = [*self._agreements, self._data]
            self._agreements, self._data = [], None
        for barrier in self._barriers:
            barrier.end()
        for one in pending:
            one.finish(GroupBroken("the group was abandoned"))
        self._staging = {}
        return drop(backends, self._barriers)

    def _closed(self) -> bool:
        return self._abandoned or self.error is not None

    def _broken(self, error: BaseException) -> None:
        with self._lock:
            if self._closed():
                return
            self.error = str(error).partition("\n")[0] or type(error).__name__
        self._on_broken(self.generation, self.error)

    def _start(self, pending: _Pending, launch: Callable[[], Any]) -> None:
        with self._lock:
            if not self._closed():
                self._pending.add(pending)
        if pending not in self._pending:
            pending.finish(GroupBroken(self.error or "the group was abandoned"))
            return
        try:
            future = launch().get_future()
        except (RuntimeError, AttributeError, IndexError) as error:  # no backend: abandoned
            self._ended(pending, error.with_traceback(None))
            return

        def landed(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - whatever ends a collective breaks the group
                self._ended(pending, error)
            else:
                self._ended(pending, None)

        future.add_done_callback(landed)

    def _ended(self, pending: _Pending, error: BaseException | None) -> None:
        with self._lock:
            self._pending.discard(pending)
        if pending.finish(error) and error is not None:
            self._broken(error)

    def _blocking(self, launch: Callable[[], Any]) -> None:
        landed = threading.Event()
        pending = _Pending(lambda error: landed.set())
        self._start(pending, launch)
        landed.wait()
        if pending.error is not None:
            raise GroupBroken(str(pending.error)) from pending.error


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def drop(backends: list[Any], barriers: Sequence[Barrier] = ()) -> threading.Thread:
    """Aborts and frees what a group holds on a thread of its own: that may block on a silent peer.

    The barriers have ended before.
    """

    def free() -> None:
        for barrier in barriers:
            barrier.close()
        for backend in backends:
            backend.abort()
        backends.clear()

    thread = threading.Thread(target=free, name="hotspare-drop-group", daemon=True)
    thread.start()
    return thread


def _gloo(store: Any, rank: int, size: int, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # An explicit device: the default one is found by the host's name.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = BUILD_TIMEOUT
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(COLLECTIVE_TIMEOUT)
    return backend


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    # torch's watchdog must not end the process for an error that a regroup repairs.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    if torch.cuda.nccl.version() >= (2, 18):
        options.config.blocking = 0  # with it an abort does not wait for the peers
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def build(plan: GroupPlan, on_broken: Callable[[int, str], None]) -> Group:
    """Meets the other ranks; returns when all have come, which is the generation's barrier.

    Blocks up to BUILD_TIMEOUT when a peer does not come: call it from a thread that may be left
    alone. Raises ReplicasDiffer, and RuntimeError (or torch's subclasses) when it fails.
    """
    store = dist.PrefixStore(
        f"{plan.job}/{plan.generation}/{plan.nonce}/",
        dist.TCPStore(
            plan.store_host,
            plan.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=BUILD_TIMEOUT,
        ),
    )
    place = f"position{plan.position}"
    store.set(f"{place}/facts/{plan.replica}", json.dumps(dict(plan.facts)))
    built: list[Any] = []
    barriers: list[Barrier] = []

    def meet(prefix: str, rank: int, size: int) -> None:
        at = dist.PrefixStore(prefix, store)
        address = plan.data_address
        built.append(_gloo(dist.PrefixStore("gloo/", at), rank, size, address))
        agreeing = dist.PrefixStore("agreement/", at)
        limits = {"build": BUILD_TIMEOUT, "wait": COLLECTIVE_TIMEOUT}
        barriers.append(Barrier(agreeing, rank, size, address, **limits))

    try:
        if plan.positions > 1:
            meet(f"replica{plan.replica}/", plan.position, plan.positions)
        meet(f"{place}/", plan.replica, plan.replicas)
        data = built[-1]
        if plan.device.type == "cuda":
            reducing = dist.PrefixStore(f"{place}/nccl/", store)
            data = _nccl(reducing, plan.replica, plan.replicas, plan.device)
        first = json.loads(store.get(f"{place}/facts/0"))
        for name, value in plan.facts.items():
            if first.get(name) != value:
                raise ReplicasDiffer(
                    f"{name} of replica {plan.replica} is not that of replica 0 "
                    f"({value} here, {first.get(name)} there)"
                )
    except BaseException:
        drop(built, barriers)
        raise
    return Group(plan, data, built, barriers, on_broken)
