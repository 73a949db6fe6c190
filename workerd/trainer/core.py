# SPDX-License-Identifier: Apache-2.0
"""What both threads of a trainer share, and the link's thread.

Two threads meet here. The link's thread takes workerd's messages and answers a stop; the main
thread runs the script, and follows a RESTORE when it comes to a point where it can (`Session`).
They exclude each other by one lock, under which the standing changes and the progress page is
written. What is decided is decided in `workerd.protocol.phases`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from protos.trainer_pb2 import Broken, Hold, Release, Restore, Running, Stop, Stopped, Welcome
from workerd.protocol import phases
from workerd.protocol.link import MAX_TEXT, LinkClosed, TrainerEnd, Upward
from workerd.protocol.page import ProgressPage, StepPhase
from workerd.protocol.phases import Do, Standing
from workerd.shards.state import TrackedState
from workerd.trainer.errors import LinkLost, Refused, Released, TrainerError
from workerd.trainer.group import Group
from workerd.trainer.rejoin import shard_identity
from workerd.trainer.serving import Serving

_log = logging.getLogger("workerd.trainer")

LINK_THREAD: Final = "hotspare-link"
STOP_AFTER: Final = 1  # the bit in the agreement that asks all ranks to stop after this step


class Core:
    """The shared state of one trainer under workerd, and the thread that reads its link."""

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
        self.group: Group | None = None
        self.placed: Restore | None = None  # the RESTORE whose group was joined last
        self.facts: dict[str, str] = {}  # what must be equal on all replicas
        self.inner: dict[str, tuple[int, ...]] = {}  # groups inside the replica; see GroupPlan
        self.built_for: int | None = None  # the shard position, once the script depends on it
        self.reloaded: Callable[[], None] = lambda: None  # the tracked state was written anew
        self._link = link
        self._page = page
        self._lock = threading.RLock()  # of _changed; taken by itself where a step takes it
        self._changed = threading.Condition(self._lock)
        # The standing, in three: a step changes two of them.
        self._phase, self._step, *rest = Standing()
        self._rest = tuple(rest)
        self._serving = Serving(welcome.data_address)
        self._tracked: TrackedState | None = None
        self._snapshot: Any = None
        self._initial_digest = ""
        self._stop = Stop()
        # As long as `_rest` is this very object, nothing has disturbed the steps (`Session.begin`);
        # `_generation` and `_word` are the group's and the page's then.
        self._calm: tuple[object, ...] | None = None
        self._generation = 0
        self._word = 0
        self._todo: tuple[Restore, Do] | None = None
        self._superseded = threading.Event()
        self._broken = 0  # the newest generation that was reported broken
        self._committed = 0  # the newest generation whose first update was reported
        self._update_of = 0  # the generation whose group agreed to the update under way
        self.wish = 0  # what this rank says in the agreement: STOP_AFTER or nothing
        self._release: Release | None = None
        self._lost: str | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name=LINK_THREAD, daemon=True)
        self._thread.start()

    @property
    def standing(self) -> Standing:
        """Where this trainer stands. Set it under the lock alone."""
        with self._lock:
            return Standing._make((self._phase, self._step, *self._rest))

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._phase, self._step, *rest = standing
        self._rest = tuple(rest)

    @property
    def step(self) -> int:
        """The step of `standing`."""
        return self._step

    @property
    def tracked(self) -> TrackedState:
        """What is served and received; known from `ready` on."""
        assert self._tracked is not None
        return self._tracked

    def offer(self, restore: Restore) -> None:
        """Serves the state that RESTORE resumes from, unless a newer stop has come."""
        assert self._tracked is not None
        if phases.may_serve(self.standing, restore.generation, restore.resume_step).do is Do.GO:
            served = self._tracked.serve(restore.resume_step, self._snapshot)
            identity = shard_identity(self.welcome.job, self.instance, restore)
            try:
                self._serving.offer(identity, served)
            except ValueError as error:
                _log.info("generation %d is not served: %s", restore.generation, error)

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
        self._send(Broken(generation=generation, step=self.standing.step, error=error[:MAX_TEXT]))

    # The link's thread

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
                elif isinstance(message, Hold):
                    self._on_hold(message)
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
            self.wish = 0
            self._todo = None
            self._superseded.set()
            self._superseded = threading.Event()
            group, self.group = self.group, None
            self._changed.notify_all()
        if group is not None:
            group.abandon()
        self._serving.end(stop.generation - 1)
        self._answer()

    def _on_hold(self, hold: Hold) -> None:
        with self._changed:
            standing = self.standing
            if standing.stopped <= standing.joined == hold.generation:
                self.wish = STOP_AFTER

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
            if self.built_for not in (None, restore.shard_position):
                raise Refused(
                    f"it is built for shard position {self.built_for}, "
                    f"not for {restore.shard_position}"
                )
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
            held=phases.at_boundary(standing),
        )
        if stop.offer_rendezvous:
            message.offer.CopyFrom(self._serving.offer_store(stop.generation))
        self._send(message)

    # Shared

    def _stands(self) -> bool:
        standing, group = self.standing, self.group
        return (
            group is not None
            and standing.joined > 0
            and standing.stopped <= standing.joined
            and standing.held != standing.joined
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
        try:
            self._link.send(message)
        except LinkClosed as error:
            # Training goes on while its group is whole; whoever has to wait for workerd learns of
            # it from the link's thread.
            _log.warning("workerd does not get a %s: %s", type(message).__name__, error)
