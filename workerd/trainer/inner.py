# SPDX-License-Identifier: Apache-2.0
"""The groups inside a replica, as torch.distributed sees them: made once, swapped underneath.

To torch.distributed the replica is the world, and the shard position is the rank in it. A script's
DeviceMesh, and whatever FSDP or tensor parallelism builds on it, hold these very objects; what
carries their collectives is the group of the moment, asked for at every call.

A collective that breaks raises nothing, since a module's hooks and autograd would be left in the
middle: it gives what this rank itself has put in, and the commit finds the group broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from workerd.trainer.errors import GroupBroken, MisuseError
from workerd.trainer.group import Group

dist: Any = torch.distributed  # its stubs leave most of this out

BACKEND: Final = "hotspare"
DIMENSION: Final = "shard"

_Tensors = list[torch.Tensor]
# Starts a collective over a backend, from what is read into what is written; answers its works.
_Launch = Callable[[Any, _Tensors, _Tensors], list[Any]]


class Inner:
    """The groups inside one job's replica. `position` is asked once, at the first use of `mesh`."""

    def __init__(
        self,
        positions: int,
        device: torch.device,
        position: Callable[[], int],
        current: Callable[[], Group | None],
        may_communicate: Callable[[], None],
    ) -> None:
        """`current` answers the job's group of the moment, or None; `may_communicate` raises
        where a collective is not allowed."""
        self._positions = positions
        self._device = device
        self._position = position
        self.current = current
        self.may_communicate = may_communicate
        self._mesh: DeviceMesh | None = None
        self.sealed = False
        self.groups: dict[str, tuple[int, ...]] = {}
        """The positions in every group that this rank is in, by the group's name."""

    @property
    def used(self) -> bool:
        """Whether the script has asked for its mesh."""
        return self._mesh is not None

    @property
    def mesh(self) -> DeviceMesh:
        """See Job.mesh."""
        if self._mesh is None:
            if dist.is_initialized():
                raise MisuseError("job.mesh: torch.distributed has been initialized before it")
            register = dist.Backend.register_backend
            register(BACKEND, self._make, extended_api=True, devices=["cpu", "cuda"])
            # The store is never asked: these groups are met for by way of the job's generations.
            dist.init_process_group(
                BACKEND,
                store=dist.HashStore(),
                rank=self._position(),
                world_size=self._positions,
            )
            self._mesh = DeviceMesh.from_group(
                dist.group.WORLD, self._device.type, mesh_dim_names=(DIMENSION,)
            )
        return self._mesh

    def _make(self, options: Any, _more: object = None) -> InnerGroup:
        # What torch calls for each group that this rank is in; of the world it lists no ranks.
        if self.sealed:
            raise MisuseError("a group comes before the first use of step, replica or attempt()")
        name, size = str(options.group_id), int(options.group_size)
        self.groups[name] = tuple(options.global_ranks_in_group or range(size))
        return InnerGroup(self, name, options.group_rank, size)

    def close(self) -> None:
        """Torch forgets these groups. The job is over."""
        if self._mesh is not None and dist.is_initialized():
            dist.destroy_process_group()


class _Work(dist.Work):  # type: ignore[misc]
    """A collective that is under way, or that has been refused.

    Live memory is written by whoever waits and by nobody else: a collective that outlives its group
    writes to memory that nobody reads.
    """

    def __init__(self, written: _Tensors, land: Callable[[bool], None]) -> None:
        super().__init__()
        self._written = written
        self._land = land
        self._over = threading.Event()
        self._landing = threading.Lock()
        self._landed = False
        self._failed = False
        self.sender = -1

    def end(self, error: BaseException | None) -> None:
        self._failed = error is not None
        self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._over.wait()
        with self._landing:
            if not self._landed:
                self._landed = True
                with torch.no_grad():
                    self._land(self._failed)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set() and self.wait()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> _Tensors:
        self.wait()
        return self._written

    def get_future(self) -> torch.futures.Future[_Tensors]:
        self.wait()
        done: torch.futures.Future[_Tensors] = torch.futures.Future()
        done.set_result(self._written)
        return done

    def _source_rank(self) -> int:
        return self.sender


class InnerGroup(dist.ProcessGroup):  # type: ignore[misc]
    """One group inside the replica. All that torch calls of it runs over the group of the moment.

    Of each collective: what it writes, what it reads, how it is started, and what it gives where
    there is no peer to be heard; with one position that is what it is meant to give.
    """

    def __init__(self, inner: Inner, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner = inner
        self._key = name
        self._name = name
        self._own = rank
        self._size = size

    # What torch calls by these names

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return "inside the replica"

    def setGroupDesc(self, text: str) -> None:
        pass

    # In place

    def allreduce(self, tensors: _Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda b, t, _: [b.allreduce(t, opts)])

    def allreduce_coalesced(self, tensors: _Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda b, t, _: [b.allreduce_coalesced(t, opts)])

    def broadcast(self, tensors: _Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda b, t, _: [b.broadcast(t, opts)])

    def reduce(self, tensors: _Tensors, opts: Any) -> Any:
        return self._in_place(tensors, lambda b, t, _: [b.reduce(t, opts)])

    # All to one, one to all, all to all

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: _Tensors, tensors: _Tensors, opts: Any) -> Any:
        def launch(backend: Any, into: _Tensors, given: _Tensors) -> list[Any]:
            pairs = zip(into, given, strict=True)
            # Flat, since Gloo knows no stack of what is given.
            return [backend._allgather_base(one.view(-1), own.view(-1), opts) for one, own in pairs]

        def alone() -> None:
            for output, own in zip(outputs, tensors, strict=True):
                # A copy, since what is given may lie in its place in the output.
                output.view(self._size, own.numel()).copy_(own.reshape(1, -1).clone())

        return self._carry(outputs, tensors, launch, alone)

    def allgather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any) -> Any:
        def alone() -> None:
            for output in outputs[0]:
                output.copy_(tensors[0])

        return self._carry(
            outputs[0], tensors, lambda b, into, own: [b.allgather([into], own, opts)], alone
        )

    def gather(self, outputs: list[_Tensors], tensors: _Tensors, opts: Any) -> Any:
        def alone() -> None:
            for output in outputs[0] if outputs else []:
                output.copy_(tensors[0])

        def launch(backend: Any, into: _Tensors, given: _Tensors) -> list[Any]:
            return [backend.gather([into] if outputs else [], given, opts)]

        return self._carry(outputs[0] if outputs else [], tensors, launch, alone)

    def scatter(self, outputs: _Tensors, tensors: list[_Tensors], opts: Any) -> Any:
        def alone() -> None:
            if tensors:
                outputs[0].copy_(tensors[0][self._own])

        def launch(backend: Any, into: _Tensors, given: _Tensors) -> list[Any]:
            return [backend.scatter(into, [given] if tensors else [], opts)]

        return self._carry(outputs, tensors[0] if tensors else [], launch, alone)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, tensors: _Tensors, opts: Any
    ) -> Any:
        def launch(backend: Any, into: _Tensors, own: _Tensors) -> list[Any]:
            if into is not outputs:
                return _reduced(backend, own, opts)
            pairs = zip(into, own, strict=True)
            return [backend._reduce_scatter_base(one, given, opts) for one, given in pairs]

        def mine(own: _Tensors) -> _Tensors:
            pairs = zip(outputs, own, strict=True)
            return [one.view(self._size, *output.shape)[self._own] for output, one in pairs]

        return self._carry(
            outputs,
            tensors,
            launch,
            lambda: _copy_all(outputs, mine([one.contiguous() for one in tensors])),
            mine,
        )

    def reduce_scatter(self, outputs: _Tensors, tensors: list[_Tensors], opts: Any) -> Any:
        def launch(backend: Any, into: _Tensors, own: _Tensors) -> list[Any]:
            if into is not outputs:
                return _reduced(backend, own, opts)
            return [backend.reduce_scatter(into, [own], opts)]

        def mine(own: _Tensors) -> _Tensors:
            return [own[self._own]]

        return self._carry(
            outputs, tensors[0], launch, lambda: _copy_all(outputs, mine(tensors[0])), mine
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        into_sizes: list[int],
        from_sizes: list[int],
        opts: Any,
    ) -> Any:
        return self._carry(
            [output],
            [tensor],
            lambda b, into, own: [b.alltoall_base(into[0], own[0], into_sizes, from_sizes, opts)],
            lambda: _copy_all([output], [tensor]),
        )

    def alltoall(self, outputs: _Tensors, tensors: _Tensors, opts: Any) -> Any:
        return self._carry(
            outputs,
            tensors,
            lambda b, into, own: [b.alltoall(into, own, opts)],
            lambda: _copy_all(outputs, tensors),
        )

    def barrier(self, opts: Any) -> Any:
        return self._carry([], [], lambda b, _, __: [b.barrier(opts)], lambda: None)

    # One to one

    def send(self, tensors: _Tensors, to: int, tag: int) -> Any:
        return self._between([], tensors, lambda b, _, own: [b.send(own, to, tag)])

    def recv(self, tensors: _Tensors, sender: int, tag: int) -> Any:
        work = self._between(tensors, [], lambda b, into, _: [b.recv(into, sender, tag)])
        work.sender = sender
        return work

    # Names of torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # How they run

    def _in_place(self, tensors: _Tensors, launch: _Launch) -> Any:
        return self._carry(tensors, tensors, launch, lambda: None)

    def _between(self, written: _Tensors, read: _Tensors, launch: _Launch) -> _Work:
        return self._carry(written, read, launch, lambda: None, between=True)

    def _carry(
        self,
        written: _Tensors,
        read: _Tensors,
        launch: _Launch,
        alone: Callable[[], None],
        arrived: Callable[[_Tensors], _Tensors] | None = None,
        *,
        between: bool = False,
    ) -> _Work:
        group = None
        if self._size > 1:
            self._inner.may_communicate()
            group = self._inner.current()
        on_device = any(one.is_cuda for one in (*written, *read))
        # Aborting ends the kernels on a device, so that they may write where they are told to.
        into, own = (written, read) if on_device else _staged(written, read)
        works: list[Any] = []

        def land(failed: bool) -> None:
            if failed:
                alone()
            elif on_device:
                assert group is not None
                _order(works, group)
            else:
                _copy_all(written, into if arrived is None else arrived(own))

        def start(backend: Any) -> list[Any]:
            started = launch(backend, into, own)
            if on_device:
                works.extend(started)
            return started

        work = _Work(written, land)
        if group is None:
            work.end(GroupBroken("there is no group"))
        else:
            group.carry(self._key, start, work.end, on_device, between)
        return work


def _order(works: list[Any], group: Group) -> None:
    """Makes the current stream wait for what runs on the device."""
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            group.broken(error.with_traceback(None))


def _staged(written: _Tensors, read: _Tensors) -> tuple[_Tensors, _Tensors]:
    own = [one.detach().clone(memory_format=torch.contiguous_format) for one in read]
    if written is read:
        return own, own
    return [torch.empty(one.shape, dtype=one.dtype) for one in written], own


def _reduced(backend: Any, own: _Tensors, opts: Any) -> list[Any]:
    # Gloo does no less for a reduce-scatter, and gives a work that has no future.
    options = dist.AllreduceOptions()
    options.reduceOp = opts.reduceOp
    return [backend.allreduce([one], options) for one in own]


def _copy_all(written: _Tensors, arrived: _Tensors) -> None:
    for output, own in zip(written, arrived, strict=True):
        # Of unequal parts this rank has nothing that would fit.
        if output.numel() == own.numel():
            output.copy_(own.reshape(output.shape))
