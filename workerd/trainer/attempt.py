# SPDX-License-Identifier: Apache-2.0
"""One step: COMPUTING, PREPARED, the agreement, UPDATING, and COMPUTING the next one."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workerd.trainer.errors import GroupBroken, MisuseError, RepeatStep
from workerd.trainer.streams import derive

if TYPE_CHECKING:
    from workerd.trainer.job import Job
    from workerd.trainer.session import Session


@dataclass
class Overhead:
    """Hotspare's own time in this trainer so far, in nanoseconds of wall time."""

    steps: int = 0
    bookkeeping_ns: int = 0  # phases, page, copies of forward-changed state
    streams_ns: int = 0  # seeding the random streams
    buffers_ns: int = 0  # equalising buffers that a forward pass has changed, waiting included
    agreement_ns: int = 0  # the barrier before the update, waiting for the slowest rank included


class Attempt:
    """The context of one step; a job has one and uses it again and again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.active = False
        self._committed = False
        self._excused = -1  # the step in which an exception was taken for a broken group's

    def __enter__(self) -> None:
        job = self._job
        if self.active:
            raise MisuseError("an attempt inside an attempt")
        if job.rehearsing:
            self.active = True
            return
        session = job.session
        start = perf_counter_ns()
        if session is None:
            job.make_ready()
            step, rank = job.alone_step, 0
        else:
            if session.placed is None:
                job.make_ready()
            step, rank = session.begin()
        middle = perf_counter_ns()
        for optimizer in job.optimizers:
            optimizer.zero_grad(set_to_none=True)
        seeding = perf_counter_ns()
        job.streams.seed(derive(job.seed, step, rank))
        end = perf_counter_ns()
        job.overhead.streams_ns += end - seeding
        job.overhead.bookkeeping_ns += middle - start
        self._committed = False
        self.active = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.active = False
        job = self._job
        if job.rehearsing:
            self._committed = False
            return False
        session = job.session
        if error is not None:
            return session is not None and self._swallow(session, error)
        if not self._committed:
            raise MisuseError("an attempt has ended without commit()")
        if session is None:
            job.alone_step += 1
            job.overhead.steps += 1
            return False
        try:
            _device_done(job.device)
        except BaseException:
            session.tear()
            raise
        start = perf_counter_ns()
        session.end_update()
        if job.equalises:
            assert job.buffers is not None
            job.buffers.rebase()
        job.overhead.bookkeeping_ns += perf_counter_ns() - start
        job.overhead.steps += 1
        if session.group is None:  # a stop has come
            session.settle()
        return False

    def commit(self, optimizers: tuple[Any, ...]) -> None:
        """See Job.commit."""
        job = self._job
        if not self.active:
            raise MisuseError("commit() outside an attempt")
        if self._committed:
            raise MisuseError("commit() was called twice in one attempt: pass it all optimizers")
        for optimizer in optimizers:
            if all(optimizer is not tracked for tracked in job.optimizers):
                raise MisuseError("commit() of an optimizer that is not tracked")
        session = job.session
        if job.rehearsing or session is None:
            self._committed = True
            for optimizer in optimizers:
                optimizer.step()
            return
        self._agree(session)
        self._committed = True
        try:
            if job.equalises:
                assert job.buffers is not None
                job.buffers.apply()
            for optimizer in optimizers:
                optimizer.step()
        except BaseException:
            session.tear()
            raise

    def may_reduce(self) -> None:
        """Raises MisuseError after a commit: the other ranks may be in their next step already."""
        if self._committed and self.active:
            raise MisuseError("a replicated module's backward pass after commit()")

    def may_communicate(self) -> None:
        """Raises MisuseError where a collective inside the replica could not be repeated."""
        if not self._job.rehearsing and (not self.active or self._committed):
            raise MisuseError(
                "a collective inside the replica belongs into attempt(), and before "
                "commit(): only there is it repeated when a rank fails"
            )

    def _agree(self, session: Session) -> None:
        job = self._job
        overhead = job.overhead
        group = session.group
        if group is None:
            raise RepeatStep("a stop has come")
        if job.device.type == "cuda":
            with group.on_device():
                _device_done(job.device)
        begin = perf_counter_ns()
        try:
            group.check()
            if job.equalises:
                assert job.buffers is not None
                job.buffers.agree(group)
                job.replicator.share_unused(group)
        except GroupBroken as error:
            raise RepeatStep(str(error)) from None
        start = perf_counter_ns()
        session.prepare()
        middle = perf_counter_ns()
        wishes = 0
        try:
            wishes = group.agree(session.wish)
            agreed = True
        except GroupBroken:
            agreed = False
        end = perf_counter_ns()
        session.enter_update(agreed, wishes)
        overhead.bookkeeping_ns += middle - start + (perf_counter_ns() - end if agreed else 0)
        overhead.buffers_ns += start - begin
        overhead.agreement_ns += end - middle

    def _swallow(self, session: Session, error: BaseException) -> bool:
        if self._committed:
            session.tear()
            return False
        if isinstance(error, RepeatStep):
            self._job.replicator.reset()
            session.settle()
            return True
        if not isinstance(error, Exception) or isinstance(error, MisuseError):
            return False
        # Without the peers' gradients a script may rightly refuse to go on ("the loss is no
        # number"): that is the group's fault, once.
        step = session.step
        if session.disturbed() and self._excused != step:
            self._excused = step
            self._job.replicator.reset()
            session.settle()
            return True
        return False


def _device_done(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
