# SPDX-License-Identifier: Apache-2.0
"""What the main thread of a trainer does: its steps, its waits, and following a RESTORE."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from protos.trainer_pb2 import Committed, Done, Failed, Held, Joined, Ready, Restore, Restored
from workerd.protocol import phases
from workerd.protocol.link import MAX_TEXT, LinkError
from workerd.protocol.page import STEP, StepPhase, pack
from workerd.protocol.phases import Do
from workerd.shards.snapshot import EMPTY
from workerd.shards.state import TrackedState
from workerd.trainer.core import STOP_AFTER, Core
from workerd.trainer.errors import Released, RepeatStep, TrainerError
from workerd.trainer.rejoin import Building, pull_state

_log = logging.getLogger("workerd.trainer")

# As plain numbers: a sum with a member of an enum runs Python.
_COMPUTING: Final = int(StepPhase.COMPUTING)
_PREPARED: Final = int(StepPhase.PREPARED)
_UPDATING: Final = int(StepPhase.UPDATING)
_DROP_TIMEOUT: Final = 10.0  # seconds


class Session(Core):
    """One trainer's life under workerd. Everything here is the main thread's."""

    # A step

    def begin(self) -> tuple[int, int]:
        """The step that an attempt is to compute, and by which rank, once a group stands.

        Raises Released when the job has ended instead, and what `settle` raises.
        """
        group = self.group
        disturbed = self._rest is not self._calm
        if (
            group is None
            or group.error is not None
            or (disturbed and phases.at_boundary(self.standing))
        ):
            self.settle()
        if self._rest is not self._calm or self._phase is not StepPhase.COMPUTING:
            with self._lock:
                standing = self.standing
                verdict = phases.may_begin(standing)
                if verdict.do is Do.REFUSE:
                    raise TrainerError(verdict.reason)
                if phases.undisturbed(standing):
                    self._calm = self._rest
                    self._generation = standing.joined
                    self._word = pack(standing.joined, standing.step, 0)
        assert self.placed is not None
        return self._step, self.placed.rank

    # The three that follow have a way of their own for the step that nothing disturbs. After a
    # backward pass, or an update, all code and data are cold: each function that a step goes
    # through, and each object that it makes, costs it microseconds.

    def prepare(self) -> None:
        """The gradients are whole: PREPARED. Raises RepeatStep when a stop has come first."""
        with self._lock:
            if self._rest is self._calm and self._phase is StepPhase.COMPUTING:
                self._phase = StepPhase.PREPARED
                self._page.put(self._word | _PREPARED)
                return
            verdict = phases.prepare(self.standing)
            if verdict.do is not Do.GO:
                raise RepeatStep(verdict.reason)
            self._set(verdict.standing)

    def enter_update(self, agreed: bool, wishes: int = 0) -> None:
        """UPDATING, as soon as it is allowed. Raises RepeatStep when it is not.

        `wishes`: what the ranks have said in the agreement, joined by "or".
        """
        with self._lock:
            calm = self._rest is self._calm and self._failure is None and not wishes
            if agreed and calm and self._phase is StepPhase.PREPARED:
                self._phase = StepPhase.UPDATING
                self._update_of = self._generation
                self._page.put(self._word | _UPDATING)
                return
            while True:
                if self._failure is not None:
                    raise self._failure
                verdict = phases.may_update(self.standing, agreed, bool(wishes & STOP_AFTER))
                if verdict.do is Do.GO:
                    stopped = self.standing.stopped > self.standing.joined
                    self._update_of = 0 if stopped else self.standing.joined
                    self._set(verdict.standing)
                    return
                if verdict.do is not Do.WAIT:
                    raise RepeatStep(verdict.reason)
                self._end_if_over()
                self._changed.wait()

    def end_update(self) -> None:
        """The update is whole: COMPUTING the next step, with its forward-changed state copied."""
        if self._snapshot is not EMPTY:
            self._snapshot = self.tracked.snapshot()
        with self._lock:
            if self._rest is self._calm and self._phase is StepPhase.UPDATING:
                self._phase = StepPhase.COMPUTING
                self._step += 1
                self._word += STEP
                self._page.put(self._word | _COMPUTING)
                if self._update_of == self._committed:
                    return
            else:
                self._set(phases.updated(self.standing).standing)
            report = self._update_of > self._committed
            if report:
                self._committed = self._update_of
            stopped = self.standing.stopped > self.standing.joined
            held = phases.at_boundary(self.standing)
        if report:
            self._send(Committed(generation=self._committed, step=self._step))
        if held:
            self._send(Held(generation=self.standing.held, step=self._step))
        if stopped:
            self._answer()

    def tear(self) -> None:
        """The update has raised: this state is served to nobody and this process ends."""
        with self._changed:
            self.standing = phases.tear(self.standing).standing

    def disturbed(self) -> bool:
        """Whether gradients may be missing because the group broke or a stop has come."""
        return not self._stands()

    # Waiting

    def rehearsed(self) -> None:
        """What is in memory is no initial state any more."""
        with self._changed:
            self.standing = phases.dirty(self.standing).standing

    def position(self) -> int:
        """This rank's shard position; where that depends on the slot, waits for one.

        Raises Released when the job has ended instead, and what ends the session.
        """
        if self.built_for is None:
            positions, welcome = self.welcome.shard_positions, self.welcome
            if welcome.ranks_per_node % positions == 0:
                self.built_for = welcome.local_rank % positions
            else:
                # As warm as a spare can be that does not know yet which part of a replica it gets.
                self._send(Ready())
                with self._changed:
                    while not self._stop.generation:
                        self._end_if_over()
                        self._changed.wait()
                    self.built_for = self._stop.rank % positions
        return self.built_for

    def ready(self, tracked: TrackedState) -> None:
        """Everything that needs no group is built; a stop may be answered from here on."""
        self._tracked = tracked
        self._snapshot = tracked.snapshot()
        if self.standing.pristine:
            self._initial_digest = tracked.digest(self._snapshot)
        with self._changed:
            self.standing = phases.ready(self.standing).standing
        self._send(Ready())
        self._answer()

    def settle(self) -> None:
        """Returns when a group stands that no stop has ended: follows every RESTORE until then.

        Raises Released when the job has ended, LinkLost, Refused, ReplicasDiffer, or whatever
        has ended the link's thread.
        """
        while True:
            with self._changed:
                while True:
                    if self._stands():
                        return
                    self._end_if_over()
                    if self._todo is not None:
                        (restore, do), self._todo = self._todo, None
                        break
                    self._changed.wait()
            self._follow(restore, do)

    def finish(self) -> None:
        """The script has ended: keeps the last state, for whoever needs it, until the release."""
        assert self._tracked is not None
        while True:
            try:
                self.settle()
            except Released:
                return
            with self._changed:
                verdict = phases.finish(self.standing)
                if verdict.do is Do.REFUSE:
                    raise TrainerError(verdict.reason)
                if verdict.do is Do.GO:
                    self._set(verdict.standing)
                    break
        digest = self._tracked.digest(self._snapshot)
        self._send(Done(step=self.standing.step, digest=digest))
        while True:
            with self._changed:
                while self._todo is None:
                    if self._release is not None:
                        return
                    self._end_if_over()
                    self._changed.wait()
                (restore, do), self._todo = self._todo, None
            self._follow(restore, do)

    def failed(self, traceback: str) -> None:
        """The script has raised: says so to workerd, if it is still there."""
        try:
            self._send(Failed(step=self.standing.step, traceback=traceback[-MAX_TEXT:]))
        except LinkError as error:
            _log.warning("workerd could not be told of the failure: %s", error)

    def released_at(self) -> int | None:
        """The job's last step if it has ended, else None."""
        return None if self._release is None else self._release.step

    def close(self) -> None:
        """Gives everything back. The process no longer belongs to the job."""
        with self._changed:
            self._closed = True
            group, self.group = self.group, None
            self._superseded.set()
        dropping = group.abandon() if group is not None else None
        self._serving.close()
        self._link.close()
        if dropping is not None:
            # An interpreter that ends while torch frees a group takes the process down with it.
            dropping.join(_DROP_TIMEOUT)
        self._thread.join(10)
        self._page.close()

    def excuse(self, until_ns: int) -> None:
        """The script takes longer until then, by CLOCK_MONOTONIC; 0: not any more."""
        self._page.excuse(until_ns)

    def forget_in_child(self) -> None:
        """In a forked child: it must not hold the link open, nor speak on it."""
        self._link.close_inherited()

    # Following a RESTORE

    def _follow(self, restore: Restore, do: Do) -> None:
        assert self._tracked is not None
        message = Restored(generation=restore.generation, step=restore.resume_step)
        if do is Do.PULL:
            pull = pull_state(self, restore)
            if pull is None:
                return
            message.pull.CopyFrom(pull)
        elif do is Do.REPEAT:
            self._tracked.restore(self._snapshot)
        elif do is Do.ROLL_FORWARD:
            self.offer(restore)
        self.reloaded()
        if phases.holds(self.standing, restore.generation).do is not Do.GO:
            return
        self._send(message)
        if restore.reserve:
            return  # it is served until the others run, or a stop brings this rank back
        group = Building(self, restore).wait()
        if group is None:
            return
        self._serving.end(restore.generation)
        with self._changed:
            verdict = phases.joined(self.standing, restore.generation)
            if verdict.do is Do.GO:
                self.group, self.placed = group, restore
                group.told = self._page.wait
                self._set(verdict.standing)
        if verdict.do is not Do.GO:
            group.abandon()
            return
        self._send(Joined(generation=restore.generation, step=restore.resume_step))

    def begin_pull(self, generation: int) -> threading.Event | None:
        """The event that ends the pull, or None when it must not start."""
        with self._changed:
            verdict = phases.pulling(self.standing, generation)
            if verdict.do is not Do.GO:
                return None
            self.standing = verdict.standing
            return self._superseded

    def end_pull(self, generation: int) -> bool:
        """The pulled state is loaded. False when the rank was acknowledged EMPTY meanwhile."""
        assert self._tracked is not None
        snapshot = self._tracked.snapshot()
        with self._changed:
            verdict = phases.pulled(self.standing, generation)
            if verdict.do is Do.GO:
                self._snapshot = snapshot
                self._set(verdict.standing)
            return verdict.do is Do.GO

    def wait_for(self, done: Callable[[], bool], generation: int) -> bool:
        """Waits until `done()`, or a stop newer than `generation`; answers which: done or not.

        The caller wakes it by `notify`. Raises what ends the session.
        """
        with self._changed:
            while not done():
                if self.standing.stopped > generation:
                    return False
                self._end_if_over()
                self._changed.wait()
            return True
