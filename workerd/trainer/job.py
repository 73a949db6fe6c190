# SPDX-License-Identifier: Apache-2.0
"""The job as a training script sees it."""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from protos.trainer_pb2 import Hello, Welcome
from workerd.protocol import link as wire
from workerd.protocol import stacks
from workerd.protocol.page import ProgressPage
from workerd.shards.errors import UnsupportedState
from workerd.shards.snapshot import changes_by_update
from workerd.shards.state import TrackedState
from workerd.trainer.attempt import Attempt, Overhead
from workerd.trainer.buffers import SharedBuffers
from workerd.trainer.children import guard_children
from workerd.trainer.errors import LinkLost, MisuseError, Released
from workerd.trainer.group import Group
from workerd.trainer.inner import Inner
from workerd.trainer.replicate import Replicator
from workerd.trainer.session import Session
from workerd.trainer.streams import Streams, derive

_WELCOME_TIMEOUT = 30.0  # seconds

Self = TypeVar("Self", bound="Job")


@dataclass
class _Built:
    """What a script has told of itself."""

    objects: dict[str, Any]
    optimizers: list[Any]


class Job:
    """A training job, joined. Use it as a context manager; made by `join`.

    A clean exit keeps the final state until every rank has finished. An exception is reported to
    workerd and goes on.
    """

    def __init__(self, session: Session | None, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed = seed
        self.overhead = Overhead()
        self.streams = Streams(device)
        self.session = session
        self.buffers: SharedBuffers | None = None
        self.equalises = False  # whether a commit has more to agree on than gradients
        self.rehearsing = False
        self.alone_step = 0  # of a job without workerd
        self._built: _Built | None = None
        self._ready = False
        self._expecting = False
        self._attempt = Attempt(self)
        address = session.welcome.data_address if session is not None else "127.0.0.1"
        self._replicator = Replicator(address, self._group, self._attempt.may_reduce)
        positions = session.welcome.shard_positions if session is not None else 1
        self._inner = Inner(
            positions,
            device,
            session.position if session is not None else lambda: 0,
            self._group,
            self._attempt.may_communicate,
        )
        # All replicas build the same model: the streams do not depend on the rank yet.
        self.streams.seed(derive(seed, -1, -1))

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        session = self.session
        if session is None:
            self._inner.close()
            return False
        try:
            if isinstance(error, Released):
                return True
            ends = error is None or (
                isinstance(error, SystemExit)
                and error.code in (None, 0)
                and not self._attempt.active
            )
            if not ends:
                session.failed("".join(traceback.format_exception(kind, error, trace)))
                return False
            try:
                if self._wait_ready():
                    session.finish()
            except BaseException:
                session.failed(traceback.format_exc())
                raise
            return False
        finally:
            session.close()
            self._inner.close()

    @property
    def step(self) -> int:
        """The number of updates applied so far. Waits for a place in the job if it has none yet."""
        session = self.session
        if session is None:
            return self.alone_step
        if session.placed is None:
            try:
                self._place()
            except Released:
                return session.released_at() or 0
        return session.step

    @property
    def replica(self) -> int:
        """This replica's index among those that train now. Waits for a place."""
        return self._place().replica if self.session is not None else 0

    @property
    def replicas(self) -> int:
        """How many replicas train now. Waits for a place if it has none yet."""
        return self._place().replicas if self.session is not None else 1

    def share(self, total: int) -> range:
        """This replica's part of a batch of `total` samples, by their indices.

        The parts of all replicas that train now make up the batch; their sizes differ by one at
        most. Take it inside the attempt: when the job shrinks or grows, the parts change with the
        next attempt. Raises MisuseError for a batch of fewer samples than the job has replicas.
        """
        most = self.session.welcome.replicas if self.session is not None else 1
        if total < most:
            raise MisuseError(f"a batch of {total} samples has none for some of {most} replicas")
        replica, replicas = self.replica, self.replicas
        return range(total * replica // replicas, total * (replica + 1) // replicas)

    def weight(self, total: int) -> float:
        """What a loss that is the mean over `share(total)` is to be multiplied by.

        Then the mean of the replicas' gradients is the gradient of the mean over the whole batch,
        whatever number of replicas trains; 1 where the parts are equal. Raises as `share` does.
        """
        return len(self.share(total)) * self.replicas / total

    @property
    def rank(self) -> int:
        """This rank's number of all that the job has when it is whole. Waits for a place."""
        return self._place().rank if self.session is not None else 0

    @property
    def generator(self) -> torch.Generator:
        """A generator on `device` that starts anew from (seed, step, rank) at every attempt."""
        return self.streams.generator

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of this replica, of one dimension, "shard": a rank's place is its position.

        To torch.distributed the replica is the world: the mesh, its groups and whatever is built on
        them before the first step stay the same objects for the job's life, while the groups
        underneath change. Their collectives belong into `attempt`, before `commit`. Waits for a
        place in the job if this rank's position depends on it. Raises MisuseError where
        torch.distributed was initialized by somebody else.
        """
        if self._ready and not self._inner.used:
            raise MisuseError("job.mesh comes before the first use of step, replica or attempt()")
        return self._inner.mesh

    def replicate(self, module: nn.Module, **ddp: Any) -> nn.Module:
        """Makes a module's gradients the mean over the replicas, position by position.

        The module is on `device` already. One that `fully_shard` has been applied to (over `mesh`)
        comes back as it is. Any other is wrapped in DistributedDataParallel, which further
        arguments go to; what its broadcast_buffers does is done at every commit. Raises MisuseError
        for arguments that the job decides itself, or once steps have begun.
        """
        self._before_ready("replicate()")
        return self._replicator.replicate(module, **ddp)

    def track(self, **objects: Any) -> None:
        """Names what a replica serves and a spare receives, once for the whole job.

        Everything that a step changes belongs here: modules, optimizers, schedulers, and anything
        else with `state_dict` and `load_state_dict`. Raises MisuseError.
        """
        self._before_ready("track()")
        if self._built is not None:
            raise MisuseError("track() was called before: name all objects in one call")
        if not objects:
            raise MisuseError("track() takes what is to be kept, by name: track(model=model, ...)")
        try:
            self.tracked = TrackedState(objects)
        except UnsupportedState as error:
            raise MisuseError(f"track(): {error}") from error
        optimizers = [v for v in objects.values() if hasattr(v, "zero_grad") and _steps(v)]
        self._built = _Built(dict(objects), optimizers)

    def rehearse(self, fn: Callable[[], object]) -> None:
        """On a spare, runs one made-up step, so that kernels and memory are warm; else nothing.

        `fn` does what a step does, without a group: forward, backward, the optimizer's step (it
        may use `attempt` and `commit`). What it changes is thrown away: a spare pulls.
        """
        self._before_ready("rehearse()")
        built = self._tracked_once("rehearse()")
        if self.session is None or not self.session.welcome.spare:
            return
        self.session.rehearsed()
        self.rehearsing = True
        try:
            fn()
        finally:
            self.rehearsing = False
        self._replicator.reset()
        for optimizer in built.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def expect(self, seconds: float) -> Iterator[None]:
        """Inside it this rank may stand still for so long, without being taken for hung.

        For what takes much longer than a step: an evaluation, a checkpoint, a compilation that is
        not the first. Raises MisuseError for no positive number of seconds, or inside another one.
        """
        if not 0 < seconds < math.inf:
            raise MisuseError(f"expect(seconds={seconds}): must be a positive number of seconds")
        if self._expecting:
            raise MisuseError("an expect() inside an expect()")
        self._expecting = True
        if self.session is not None:
            self.session.excuse(time.monotonic_ns() + round(seconds * 1e9))
        try:
            yield
        finally:
            self._expecting = False
            if self.session is not None:
                self.session.excuse(0)

    def attempt(self) -> Attempt:
        """One step, as a context: repeated whole after a failure, never half applied.

        Inside it, `commit` is called once. After a failure the block ends without having changed
        anything and `step` is the same as before: the script's loop computes it again.
        """
        return self._attempt

    def commit(self, optimizer: Any, *others: Any) -> None:
        """Applies the update of all optimizers, once every rank of the job has its gradients.

        What follows in the attempt's block (a scheduler, an average of the weights) belongs to
        the update. Raises MisuseError outside an attempt, when called twice, or for an optimizer
        that is not tracked.
        """
        self._attempt.commit((optimizer, *others))

    @property
    def replicator(self) -> Replicator:
        """What `replicate` has wrapped."""
        return self._replicator

    @property
    def optimizers(self) -> list[Any]:
        """The tracked optimizers. Raises MisuseError before `track`."""
        return self._tracked_once("a step").optimizers

    def make_ready(self) -> None:
        """Tells workerd, once, that everything is built that needs no group. Raises MisuseError."""
        if self._ready:
            return
        built = self._tracked_once("the first step")
        modules = [value for value in built.objects.values() if isinstance(value, nn.Module)]
        held = {id(p) for module in modules for p in module.parameters()}
        for wrapped in self._replicator.wrapped:
            if any(id(p) not in held for p in wrapped.parameters()):
                raise MisuseError("a replicated module is not tracked: a spare would not get it")
        session = self.session
        self._inner.sealed = True
        if session is not None:
            positions = session.welcome.shard_positions
            if positions > 1 and not self._inner.used:
                raise MisuseError(
                    f"a replica of this job spans {positions} ranks: build the model over job.mesh"
                )
            if positions > 1:
                session.inner = self._inner.groups
                session.facts["groups inside the replica"] = repr(session.inner)
            if session.welcome.replicas > 1 and not self._replicator.wrapped:
                raise MisuseError("no module was replicated: the replicas would go apart")
            self.buffers = SharedBuffers(modules)
            self.equalises = self.buffers.any or self._replicator.partial
            session.reloaded = self._reloaded
            for number, layout in enumerate(self._replicator.layouts):
                session.facts[f"layout of replicated module {number}"] = layout
            session.ready(self.tracked)
        self._ready = True

    def _reloaded(self) -> None:
        assert self.session is not None
        assert self.buffers is not None
        self.buffers.rebase()
        # What is neither a module nor an optimizer is served like the rest: were it another on
        # every replica (a position in a replica's own part of the data), a spare would get the
        # source's. So it has to be equal, or derived from step, replica and replicas.
        for name, value in self._tracked_once("a step").objects.items():
            if not isinstance(value, nn.Module) and not changes_by_update(value):
                self.session.facts[f"the tracked {name}"] = TrackedState({name: value}).digest()

    def _place(self) -> Any:
        session = self.session
        assert session is not None
        self.make_ready()
        if session.placed is None:
            session.settle()
        assert session.placed is not None
        return session.placed

    def _wait_ready(self) -> bool:
        # A script that never asks for its step has nothing that others could wait for.
        if self._built is None:
            raise MisuseError("the script has ended without track(): nothing was trained")
        self.make_ready()
        return True

    def _group(self) -> Group | None:
        if self.rehearsing or self.session is None:
            return None
        return self.session.group

    def _before_ready(self, what: str) -> None:
        if self._ready:
            raise MisuseError(f"{what} comes before the first use of step, replica or attempt()")

    def _tracked_once(self, what: str) -> _Built:
        if self._built is None:
            raise MisuseError(f"{what} needs track(model=..., optimizer=...) before it")
        return self._built


def _steps(value: Any) -> bool:
    return callable(getattr(value, "step", None))


def join() -> Job:
    """Meets the local workerd, as the environment names it, and never waits for a place.

    Outside Hotspare (no HOTSPARE_SOCKET) it answers a job of this process alone, so that a script
    runs and is debugged as it is. Raises LinkLost if workerd is named but does not answer.
    """
    path = os.environ.get(wire.SOCKET_VARIABLE)
    if path is None:
        return Job(None, _device(0), seed=0)
    instance = os.environ[wire.INSTANCE_VARIABLE]
    page = ProgressPage.open(os.environ[wire.PAGE_VARIABLE])
    stacks.register(os.environ[wire.PAGE_VARIABLE])
    deadline = time.monotonic() + _WELCOME_TIMEOUT
    try:
        link = wire.connect(path, _WELCOME_TIMEOUT)
        link.send(Hello(instance=instance, pid=os.getpid()))
        welcome = link.receive(deadline - time.monotonic())
    except wire.LinkError as error:
        raise LinkLost(f"workerd does not answer: {error}") from error
    if not isinstance(welcome, Welcome):
        raise LinkLost(f"workerd answers Hello with a {type(welcome).__name__}")
    device = _device(welcome.local_rank)
    session = Session(link, page, welcome, instance, device)
    guard_children(session.forget_in_child)
    return Job(session, device, welcome.seed)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
