# SPDX-License-Identifier: Apache-2.0
"""One trainer's life under workerd: the link's thread, the standing, and the way back into a group.

Two threads meet here. The link's thread takes workerd's messages and answers a stop; the main
thread runs the script, and follows a RESTORE when it comes to a point where it can. They exclude
each other by one lock, under which the standing changes and the progress page is written. What is
decided is decided in `workerd.protocol.phases`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from protos.trainer_pb2 import (
    Broken,
    Committed,
    Done,
    Failed,
    Joined,
    Ready,
    Release,
    Restore,
    Restored,
    Running,
    Stop,
    Stopped,
    Welcome,
)
from workerd.protocol import phases
from workerd.protocol.link import MAX_TEXT, LinkClosed, LinkError, TrainerEnd, Upward
from workerd.protocol.page import ProgressPage, StepPhase
from workerd.protocol.phases import Do, Standing
from workerd.shards.state import TrackedState
from workerd.trainer.errors import (
    LinkLost,
    Refused,
    Released,
    RepeatStep,
    TrainerError,
)
from workerd.trainer.group import Group
from workerd.trainer.rejoin import Building, pull_state, shard_identity
from workerd.trainer.serving import Serving

_log = logging.getLogger("workerd.trainer")

LINK_THREAD: Final = "hotspare-link"
_DROP_TIMEOUT: Final = 10.0  # seconds


class Session:
    """What the main thread calls is said to be so; the rest belongs to the link's thread."""

    def __init__(
        self,
        link: TrainerEnd,
        page: ProgressPage,
        welcome: Welcome,
        instance: str,
        device: torch.device,
    ) -> None:
        self.welcome = welcome
        self.instance = instance
        self.device = device
        self.standing = Standing()
        self.group: Group | None = None
        self.placed: Restore | None = None  # the RESTORE whose group was joined last
        self.facts: dict[str, str] = {}  # what must be equal on all replicas
        self.reloaded: Callable[[], None] = lambda: None  # the tracked state was written anew
        self._link = link
        self._page = page
        self._changed = threading.Condition()
        self._serving = Serving(welcome.data_address)
        self._tracked: TrackedState | None = None
        self._snapshot: Any = None
        self._initial_digest = ""
        self._stop = Stop()
        self._todo: tuple[Restore, Do] | None = None
        self._superseded = threading.Event()
        self._broken = 0  # the newest generation that was reported broken
        self._committed = 0  # the newest generation whose first update was reported
        self._update_of = 0  # the generation whose group agreed to the update under way
        self._release: Release | None = None
        self._lost: str | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name=LINK_THREAD, daemon=True)
        self._thread.start()

    # -- the main thread's part of a step -------------------------------------------------------

    def begin(self) -> int:
        """The step that an attempt is to compute, once a group stands.

        Raises Released when the job has ended instead, and what `settle` raises.
        """
        if not self._stands():
            self.settle()
        verdict = phases.may_begin(self.standing)
        if verdict.do is Do.REFUSE:
            raise TrainerError(verdict.reason)
        return self.standing.step

    def prepare(self) -> None:
        """The gradients are whole: PREPARED. Raises RepeatStep when a stop has come first."""
        with self._changed:
            verdict = phases.prepare(self.standing)
            if verdict.do is not Do.GO:
                raise RepeatStep(verdict.reason)
            self._set(verdict.standing)

    def enter_update(self, agreed: bool) -> None:
        """UPDATING, as soon as it is allowed. Raises RepeatStep when it is not."""
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                verdict = phases.may_update(self.standing, agreed)
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
        assert self._tracked is not None
        self._snapshot = self._tracked.snapshot()
        with self._changed:
            self._set(phases.updated(self.standing).standing)
            report = self._update_of > self._committed
            if report:
                self._committed = self._update_of
            stopped = self.standing.stopped > self.standing.joined
        if report:
            self._send(Committed(generation=self._committed, step=self.standing.step))
        if stopped:
            self._answer()

    def tear(self) -> None:
        """The update has raised: this state is served to nobody and this process ends."""
        with self._changed:
            self.standing = phases.tear(self.standing).standing

    def disturbed(self) -> bool:
        """Whether gradients may be missing because the group broke or a stop has come."""
        return not self._stands()

    # -- the main thread's waits ----------------------------------------------------------------

    def rehearsed(self) -> None:
        """What is in memory is no initial state any more."""
        with self._changed:
            self.standing = phases.dirty(self.standing).standing

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

    def forget_in_child(self) -> None:
        """In a forked child: it must not hold the link open, nor speak on it."""
        self._link.close_inherited()

    # -- following a RESTORE, in the main thread ------------------------------------------------

    def _follow(self, restore: Restore, do: Do) -> None:
        assert self._tracked is not None
        message = Restored(generation=restore.generation, step=restore.resume_step)
        if do is Do.PULL:
            pull = pull_state(self, restore)
            if pull is None:
                return
            message.pull.CopyFrom(pull)
        elif do is Do.REPEAT and self.standing.phase is not StepPhase.DONE:
            self._tracked.restore(self._snapshot)
        elif do is Do.ROLL_FORWARD:
            self.offer(restore)
        self.reloaded()
        if phases.holds(self.standing, restore.generation).do is not Do.GO:
            return
        self._send(message)
        group = Building(self, restore).wait()
        if group is None:
            return
        self._serving.end(restore.generation)
        with self._changed:
            verdict = phases.joined(self.standing, restore.generation)
            if verdict.do is Do.GO:
                self.group, self.placed = group, restore
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

    def offer(self, restore: Restore) -> None:
        """Serves the state that RESTORE resumes from, unless a newer stop has come."""
        assert self._tracked is not None
        if phases.may_serve(self.standing, restore.generation, restore.resume_step).do is Do.GO:
            served = self._tracked.serve(restore.resume_step, self._snapshot)
            try:
                self._serving.offer(shard_identity(self, restore), served)
            except ValueError as error:
                _log.info("generation %d is not served: %s", restore.generation, error)

    @property
    def tracked(self) -> TrackedState:
        """What is served and received; known from `ready` on."""
        assert self._tracked is not None
        return self._tracked

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

    def notify(self) -> None:
        """Wakes whoever waits for a change."""
        with self._changed:
            self._changed.notify_all()

    def broken(self, generation: int, error: str) -> None:
        """A collective of `generation` has failed, or its group could not be built. Any thread."""
        with self._changed:
            if self.standing.stopped > generation or self._broken >= generation or self._closed:
                return
            self._broken = generation
            self._changed.notify_all()
        _log.warning("the group of generation %d is broken: %s", generation, error)
        try:
            self._send(
                Broken(generation=generation, step=self.standing.step, error=error[:MAX_TEXT])
            )
        except LinkError as lost:
            _log.warning("workerd could not be told of the broken group: %s", lost)

    # -- the link's thread ----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if isinstance(message, Stop):
                    self._on_stop(message)
                elif isinstance(message, Restore):
                    self._on_restore(message)
                elif isinstance(message, Running):
                    if message.generation >= self.standing.stopped:
                        self._serving.running(message.generation)
                elif isinstance(message, Release):
                    with self._changed:
                        self._release = message
                        self._superseded.set()
                        self._changed.notify_all()
                else:
                    raise TrainerError(f"workerd sends a {type(message).__name__} now")
        except LinkClosed as error:
            with self._changed:
                self._lost = str(error)
                self._superseded.set()
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            with self._changed:
                self._failure = error
                self._superseded.set()
                self._changed.notify_all()

    def _on_stop(self, stop: Stop) -> None:
        with self._changed:
            verdict = phases.on_stop(self.standing, stop.generation)
            _log.info("stop %d: %s", stop.generation, verdict.reason)
            if verdict.do is not Do.GO:
                return
            self.standing = verdict.standing
            self._stop = stop
            self._todo = None
            self._superseded.set()
            self._superseded = threading.Event()
            group, self.group = self.group, None
            self._changed.notify_all()
        if group is not None:
            group.abandon()
        self._serving.end(stop.generation - 1)
        self._answer()

    def _on_restore(self, restore: Restore) -> None:
        digests = {source.initial_digest for source in restore.sources}
        with self._changed:
            verdict = phases.on_restore(
                self.standing,
                restore.generation,
                restore.resume_step,
                restore.initial,
                bool(self._initial_digest) and self._initial_digest in digests,
            )
            _log.info("restore %d: %s: %s", restore.generation, verdict.do.value, verdict.reason)
            if verdict.do is Do.IGNORE:
                return
            if verdict.do is Do.REFUSE:
                raise Refused(verdict.reason)
            self._set(verdict.standing)
            self._changed.notify_all()
        if verdict.do in (Do.REPEAT, Do.ADOPT):
            # The main thread may be far away in a forward pass: the weights are whole, and of
            # what a forward pass changes the copy is served.
            self.offer(restore)
        with self._changed:
            if self.standing.stopped == restore.generation:
                self._todo = (restore, verdict.do)
                self._changed.notify_all()

    def _answer(self) -> None:
        with self._changed:
            verdict = phases.may_answer(self.standing)
            if verdict.do is not Do.GO:
                return
            self.standing = standing = verdict.standing
            stop = self._stop
        empty = standing.phase is StepPhase.EMPTY
        message = Stopped(
            generation=stop.generation,
            phase=standing.phase.value,
            step=standing.step,
            initial_digest=self._initial_digest if empty and standing.pristine else "",
            shard_address=self._serving.open(),
        )
        if stop.offer_rendezvous:
            message.offer.CopyFrom(self._serving.offer_store(stop.generation))
        self._send(message)

    # -- shared ---------------------------------------------------------------------------------

    def _stands(self) -> bool:
        standing, group = self.standing, self.group
        return (
            group is not None
            and standing.joined > 0
            and standing.stopped <= standing.joined
            and group.error is None
        )

    def _end_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._release is not None:
            raise Released(f"the job has ended at step {self._release.step}")
        if self._lost is not None:
            raise LinkLost(f"workerd is gone: {self._lost}")

    def _set(self, standing: Standing) -> None:
        self.standing = standing
        self._page.write(standing.joined, standing.step, standing.phase)

    def _send(self, message: Upward) -> None:
        self._link.send(message)
