# SPDX-License-Identifier: Apache-2.0
"""A simulated trainer process. What it may do is decided by ``workerd.protocol.phases``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator import model
from coordinator.model import Pull, Rendezvous, Source, TrainerExit
from tests.simulator.group import Group, Lineage, Violation
from workerd.agent.actions import SendHold, SendRelease, SendRestore, SendStop, SendWelcome
from workerd.agent.state import Stopped
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do, Standing

if TYPE_CHECKING:
    from tests.simulator.node import SimNode

_LOOK_AGAIN = 0.2  # seconds until an empty rank asks its sources again
_BYTES = 44_000_000_000  # of one rank's state: 405 billion parameters, 14 bytes each, 128 ranks


class SimTrainer:
    """One process. Everything that it is told comes to :meth:`receive`."""

    def __init__(self, node: SimNode, instance: str) -> None:
        self.node = node
        self.instance = instance
        self.cluster = node.cluster
        self.clock = node.cluster.clock
        self.times = node.cluster.times
        self.dice = node.cluster.dice
        self.standing = Standing()
        self.lives = True
        self.hung = False
        self.rank = -1
        self.lineage: Lineage = ()
        self.group: Group | None = None
        self.sources: tuple[Source, ...] = ()
        self._reserve = False
        self.ranks = 0
        """Of the generation that it joins."""
        self.skew = self.dice.random()
        self._welcomed = False
        self._spare = False
        self._after(self.times.connect, self._connect)

    def _after(self, seconds: float, run: Any, *arguments: Any) -> None:
        """Do something later, if the process still lives and goes on then."""

        def due() -> None:
            if self.lives and not self.hung:
                run(*arguments)

        self.clock.after(seconds, due)

    def _tell(self, **facts: Any) -> None:
        self.node.hear(self.instance, **facts)

    def _connect(self) -> None:
        self._tell(connected=True)

    # ---- what it is told

    def receive(
        self, message: SendWelcome | SendStop | SendRestore | SendHold | SendRelease
    ) -> None:
        """A message has come in."""
        if isinstance(message, SendWelcome):
            self._spare = message.spare
            if not self._welcomed:
                self._welcomed = True
                self._after(self.times.build * self.dice.uniform(0.8, 1.2), self._ready)
        elif isinstance(message, SendStop):
            self._stop(message)
        elif isinstance(message, SendRestore):
            self._restore(message)
        elif isinstance(message, SendHold):
            if self.group is not None and self.group.generation == message.generation:
                self.cluster.hold(self.group)
        else:
            self._after(0.5, self.end, TrainerExit())

    def _ready(self) -> None:
        self.standing = phases.ready(self.standing).standing
        if self._spare:
            self.standing = phases.dirty(self.standing).standing  # it has rehearsed
        self._tell(ready=True)
        self._answer()

    # ---- PAUSE

    def _stop(self, message: SendStop) -> None:
        self.advance()
        verdict = phases.on_stop(self.standing, message.generation)
        if verdict.do is not Do.GO:
            return
        if self.group is not None:
            self.group.stall(self.clock.now())
        self.standing, self.rank = verdict.standing, message.rank
        if self.standing.phase is StepPhase.UPDATING:
            self._after(self.times.update * self.times.step, self._updated)
        self._after(self.times.stop * self.dice.random(), self._answer)

    def _answer(self) -> None:
        verdict = phases.may_answer(self.standing)
        if verdict.do is not Do.GO:
            return
        self.standing = standing = verdict.standing
        pristine = standing.phase is StepPhase.EMPTY and standing.pristine
        self._tell(
            stopped=Stopped(
                generation=standing.stopped,
                phase=model.StepPhase(standing.phase),
                step=standing.step,
                initial_digest="seed" if pristine else "",
                shard_address=self.instance,
                offer=Rendezvous(self.instance, f"{self.instance}.{standing.stopped}"),
                held=phases.at_boundary(standing),
            )
        )

    # ---- RESTORE

    def _restore(self, message: SendRestore) -> None:
        same = any(one.initial_digest == "seed" for one in message.sources)
        verdict = phases.on_restore(
            self.standing, message.generation, message.resume_step, message.initial, same
        )
        if verdict.do is Do.REFUSE:
            raise Violation(f"rank {self.rank} of {self.instance} refuses: {verdict.reason}")
        self.standing, self.sources = verdict.standing, message.sources
        self.ranks = message.replicas * self.cluster.spec.shard_positions
        self._reserve = message.reserve
        if verdict.do is Do.ADOPT:
            self.lineage = ((0, 0),)
        if verdict.do in (Do.ADOPT, Do.REPEAT):
            self._after(self.times.repeat, self._restored, None)
        elif verdict.do is Do.ROLL_FORWARD:
            self._after(self.times.repeat, self._roll_forward)
        elif verdict.do is Do.PULL:
            self._pull(message.generation)

    def _roll_forward(self) -> None:
        verdict = phases.may_update(self.standing, agreed=False)
        if verdict.do is Do.GO:
            self.standing = verdict.standing
            self.cluster.rolled_forward += 1
            self._after(self.times.update * self.times.step, self._updated)

    def _updated(self) -> None:
        if self.standing.phase is not StepPhase.UPDATING or self.group is None:
            return  # it was told twice meanwhile
        verdict = phases.updated(self.standing)
        self.standing = verdict.standing
        self._grow(self.group.generation, self.standing.step)
        self._answer()
        self._restored(None)

    def _grow(self, generation: int, step: int) -> None:
        """An update has been applied, with the gradients of a generation."""
        if not self.lineage or self.lineage[-1][1] > step:
            raise Violation(f"{self.instance} comes from {self.lineage} to state {step}")
        if self.lineage[-1][0] == generation:
            self.lineage = (*self.lineage[:-1], (generation, step))
        else:
            self.lineage = (*self.lineage, (generation, step))
        self.cluster.checks.reached(step)

    def _pull(self, generation: int) -> None:
        if self.standing.stopped != generation or self.standing.phase is not StepPhase.EMPTY:
            return
        step = self.standing.resume_step
        for source in self.sources:
            there = self.cluster.trainer(source.node, source.instance)
            if there is None or not self._serves(there, generation, step):
                continue
            verdict = phases.pulling(self.standing, generation)
            if verdict.do is not Do.GO:
                raise Violation(f"rank {self.rank} may not pull: {verdict.reason}")
            self.standing = verdict.standing
            seconds = self.times.pull * self.dice.uniform(0.9, 1.3)
            self._after(seconds, self._pulled, generation, there, there.lineage, seconds)
            return
        self._after(_LOOK_AGAIN, self._pull, generation)

    def _serves(self, there: SimTrainer, generation: int, step: int) -> bool:
        return (
            there.lives
            and not there.hung
            and self.node.reaches(there.node)
            and phases.may_serve(there.standing, generation, step).do is Do.GO
        )

    def _pulled(
        self, generation: int, source: SimTrainer, lineage: Lineage, seconds: float
    ) -> None:
        if self.standing.stopped != generation or self.standing.phase is not StepPhase.EMPTY:
            return
        if not self._serves(source, generation, self.standing.resume_step):
            self._pull(generation)
            return
        if source.lineage != lineage:
            raise Violation(f"what rank {self.rank} pulled changed under the pull")
        verdict = phases.pulled(self.standing, generation)
        if verdict.do is Do.GO:
            self.standing, self.lineage = verdict.standing, lineage
            self._restored(Pull(source.node.name, _BYTES, seconds))

    def _restored(self, pull: Pull | None) -> None:
        generation = self.standing.stopped
        if phases.holds(self.standing, generation).do is not Do.GO:
            return
        self._tell(restored=generation, pull=pull)
        if not self._reserve:  # one that is kept for later serves, and waits
            self.cluster.arrive(generation, self)

    # ---- in the group

    def join(self, group: Group) -> bool:
        """The group of a generation is built; whether this rank is in it."""
        verdict = phases.joined(self.standing, group.generation)
        if verdict.do is not Do.GO or not self.lives or self.hung:
            return False
        self.standing, self.group = verdict.standing, group
        self._tell(joined=group.generation)
        return True

    def advance(self) -> None:
        """Come to where this rank is by now.

        Whole steps that nothing disturbs need no decision (see ``phases.undisturbed``); the one
        that is under way goes by the decisions, one after the other.
        """
        group = self.group
        if group is None or self.standing.joined != group.generation:
            return
        if self.standing.stopped > self.standing.joined or self.hung:
            return
        reduced, agreed, updated = group.moment(self.clock.now(), self.skew)
        whole = min(updated, group.last - 1)  # the last step before a stop is agreed as such
        if phases.undisturbed(self.standing) and whole > self.standing.step:
            self.standing = self.standing._replace(step=whole)
            self._grow(group.generation, whole)
        while self._next(reduced, agreed, updated):
            pass

    def _next(self, reduced: int, agreed: int, updated: int) -> bool:
        """One phase of the step that is under way; whether there was one."""
        standing = self.standing
        if standing.phase is StepPhase.COMPUTING and reduced > standing.step:
            verdict = phases.prepare(standing)
        elif standing.phase is StepPhase.PREPARED and agreed > standing.step:
            assert self.group is not None
            last = standing.step + 1 == self.group.last
            verdict = phases.may_update(standing, agreed=True, stop_after=last)
        elif standing.phase is StepPhase.UPDATING and updated > standing.step:
            verdict = phases.updated(standing)
        else:
            return False
        if verdict.do is not Do.GO:
            raise Violation(f"rank {self.rank} stands still in its step: {verdict.reason}")
        self.standing = verdict.standing
        if verdict.standing.step > standing.step:
            assert self.group is not None
            self._grow(self.group.generation, verdict.standing.step)
        return True

    # ---- its end

    def end(self, how: TrainerExit) -> None:
        """The process is gone, and its node knows."""
        if self.lives:
            self.vanish()
            self.node.ended(self.instance, how)
            if self.group is not None:
                self.cluster.break_group(self.group, self)

    def vanish(self) -> None:
        """It is gone, and nobody is told."""
        self.advance()
        self.lives = False
        if self.group is not None:
            self.group.stall(self.clock.now())

    def hang(self) -> None:
        """It stands still for ever."""
        self.advance()
        self.hung = True
        if self.group is not None:
            self.group.stall(self.clock.now())
