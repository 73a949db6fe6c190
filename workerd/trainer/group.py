# SPDX-License-Identifier: Apache-2.0
"""The process group of one generation: reduced buckets, the agreement, and its end.

A group never blocks longer than its owner wants: every collective in flight ends when its work ends
or when the group is abandoned, whichever comes first. (Gloo's own `abort` does not unblock a
collective that waits for a live but silent peer.) So nothing that a collective may still write
to later is memory that anybody reads: Gloo works on staging buffers that go with the group.

All ranks of the job end together: those of one shard position, which hold the same state, reduce
gradients; those of one replica carry what the script tells them; all of them agree.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed

from workerd.trainer.barrier import Barrier
from workerd.trainer.errors import GroupBroken, MisuseError

dist: Any = torch.distributed  # its stubs leave most of this out

_T = TypeVar("_T")

# The backends of a DP group, by what they work on.
DATA: Final = "data"  # the job's device
HOST: Final = "host"


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
    inner: Mapping[str, tuple[int, ...]]  # groups in the replica: the positions in each, by name
    facts: Mapping[str, str]  # what must be equal to replica 0's, by name


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
        backends: Mapping[str, Any],
        barrier: Barrier,
        on_broken: Callable[[int, str], None],
    ) -> None:
        self.generation = plan.generation
        self.rank = plan.replica
        self.size = plan.replicas
        self.error: str | None = None
        self._device = plan.device
        self._backends = dict(backends)
        self._barrier = barrier
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._pending: set[_Pending] = set()
        self._launching = 0
        self._none_launching = threading.Condition(self._lock)
        self._abandoned = False
        self.told: Callable[[int], None] = _nobody
        """Hears how many collectives are in flight, whenever that changes."""
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

        self._start(_Pending(end), lambda: self._reduced(staging).get_future())
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
            work = self._reduced(buffer)
        except (RuntimeError, LookupError) as error:
            self.broken(error.with_traceback(None))
            done = torch.futures.Future(devices=[self._device])
            done.set_result(buffer)
            return done
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

    def _reduced(self, buffer: torch.Tensor) -> Any:
        return self._launch(DATA, lambda backend: backend.allreduce([buffer]))

    def carry(
        self,
        inner: str,
        launch: Callable[[Any], list[Any]],
        end: Callable[[BaseException | None], None],
        on_device: bool,
        between: bool,
    ) -> None:
        """Starts a collective of a group inside the replica; `end` is called once, when it ends.

        `between` two ranks only: Gloo has no future of these. Raises MisuseError for one that is
        refused as it stands.
        """
        key = inner_key(inner, on_device and self._device.type == "cuda")

        def start() -> torch.futures.Future[Any]:
            try:
                works = self._launch(key, launch)
            except RuntimeError as error:
                if between or on_device:
                    raise
                # Gloo has only looked at the arguments by now.
                raise MisuseError(f"a collective inside the replica: {error}") from None
            if between and not on_device:
                return _watched(works[0])
            return _together(works)

        self._start(_Pending(end), start)

    def agree(self, bits: int = 0) -> int:
        """The barrier between PREPARED and UPDATING: nobody leaves it before every rank has come.

        One barrier over all ranks of the job, and so along every replica and along every DP group.
        `bits` (one byte) of all ranks come back joined by "or"; planned changes ask by one for a
        stop after this step (`core.STOP_AFTER`). Raises GroupBroken.
        """
        if self._closed():
            raise GroupBroken(self.error or "the group was abandoned")
        try:
            return self._barrier.meet(bits)
        except OSError as error:
            self.broken(error.with_traceback(None))
            raise GroupBroken(str(error)) from None

    def maximum(self, tensor: torch.Tensor) -> None:
        """The elementwise maximum over the DP group, in place, on the CPU. Raises GroupBroken."""
        self._blocking(HOST, lambda backend: backend.allreduce([tensor], dist.ReduceOp.MAX))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replica 0's `tensor` everywhere, in place, on this job's device. Raises GroupBroken."""
        self._blocking(DATA, lambda backend: backend.broadcast([tensor], _from_first()))

    def _launch(self, name: str, launch: Callable[[Any], _T]) -> _T:
        # Whoever lets go of a backend last waits for collectives that may never end, and that must
        # be the thread of `drop`: it outwaits every launch, and no exception that leaves here holds
        # a frame that names a backend.
        with self._lock:
            backend = self._backends[name]
            self._launching += 1
        try:
            return launch(backend)
        except BaseException as error:  # noqa: BLE001 - raised again
            raise error.with_traceback(None) from None
        finally:
            del backend
            with self._lock:
                self._launching -= 1
                self._none_launching.notify_all()

    def _launched(self) -> None:
        with self._lock:
            self._none_launching.wait_for(lambda: not self._launching)

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
            backends, self._backends = list(set(self._backends.values())), {}
            self.told(0)
        self._barrier.end()
        for one in pending:
            one.finish(GroupBroken("the group was abandoned"))
        self._staging = {}
        return drop(backends, self._barrier, self._launched)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """The main thread waits for the device, and so for the peers' part of collectives on it."""
        with self._lock:
            if not self._abandoned:
                self.told(len(self._pending) + 1)
        try:
            yield
        finally:
            with self._lock:
                if not self._abandoned:
                    self.told(len(self._pending))

    def _closed(self) -> bool:
        return self._abandoned or self.error is not None

    def broken(self, error: BaseException) -> None:
        """A collective has failed: so has the group."""
        with self._lock:
            if self._closed():
                return
            self.error = str(error).partition("\n")[0] or type(error).__name__
        self._on_broken(self.generation, self.error)

    def _start(self, pending: _Pending, launch: Callable[[], torch.futures.Future[Any]]) -> None:
        with self._lock:
            if not self._closed():
                self._pending.add(pending)
                self.told(len(self._pending))
        if pending not in self._pending:
            pending.finish(GroupBroken(self.error or "the group was abandoned"))
            return
        try:
            future = launch()
        except (RuntimeError, LookupError) as error:  # no backend: abandoned
            self._ended(pending, error.with_traceback(None))
            return
        except BaseException:
            self._gone(pending)
            raise

        def landed(done: torch.futures.Future[Any]) -> None:
            try:
                done.value()
            except Exception as error:  # noqa: BLE001 - whatever ends a collective breaks the group
                self._ended(pending, error)
            else:
                self._ended(pending, None)

        future.add_done_callback(landed)

    def _gone(self, pending: _Pending) -> None:
        with self._lock:
            self._pending.discard(pending)
            if not self._abandoned:
                self.told(len(self._pending))

    def _ended(self, pending: _Pending, error: BaseException | None) -> None:
        self._gone(pending)
        if pending.finish(error) and error is not None:
            self.broken(error)

    def _blocking(self, name: str, launch: Callable[[Any], Any]) -> None:
        landed = threading.Event()
        pending = _Pending(lambda error: landed.set())
        self._start(pending, lambda: self._launch(name, launch).get_future())
        landed.wait()
        if pending.error is not None:
            raise GroupBroken(str(pending.error)) from pending.error


def drop(
    backends: list[Any],
    barrier: Barrier | None = None,
    launched: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Aborts and frees what a group holds on a thread of its own: that may block on a silent peer.

    The barrier has ended before. `launched` returns when nobody else has a backend in hand.
    """

    def free() -> None:
        if barrier is not None:
            barrier.close()
        for backend in backends:
            backend.abort()
        launched()
        backends.clear()

    thread = threading.Thread(target=free, name="hotspare-drop-group", daemon=True)
    thread.start()
    return thread


def _nobody(waiting: int) -> None:
    pass


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def inner_key(name: str, on_device: bool) -> str:
    """The name of a backend of a group inside the replica."""
    return f"replica/{name}/{'nccl' if on_device else 'gloo'}"


def _together(works: list[Any]) -> torch.futures.Future[Any]:
    every = torch.futures.collect_all([work.get_future() for work in works])
    return every.then(lambda done: [one.value() for one in done.value()])


def _watched(work: Any) -> torch.futures.Future[Any]:
    """A future of a work that has none. Its thread goes with the connection, at the latest."""
    future: torch.futures.Future[Any] = torch.futures.Future()

    def watch() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(None)

    threading.Thread(target=watch, name="hotspare-between", daemon=True).start()
    return future
