# SPDX-License-Identifier: Apache-2.0
"""What follows for a machine's trainers when something happens to one of them.

Whether it may is decided by ``workerd.protocol.phases``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator import model
from coordinator.model import Rendezvous, TrainerExit
from tests.modelcheck.values import JOB, Arrival, Key, Machine, Process, Shape, Violation, present
from workerd.agent.actions import SendHold, SendRestore, SendStop
from workerd.agent.state import Stopped, TrainerFacts
from workerd.protocol import phases
from workerd.protocol.page import StepPhase
from workerd.protocol.phases import Do

STORE = Rendezvous("store", "nonce")

Effect = tuple[Any, ...]
"""("arrive", generation, rank, (Arrival, members)), ("level", generation, rank, level)
or ("wish", generation, rank, step)."""


class Trainers:
    """The trainers of one machine, during one event."""

    def __init__(self, machine: Machine, key: Key | None, shape: Shape) -> None:
        self.machine = machine
        self.key = key
        self.effects: list[Effect] = []
        self._shape = shape
        self._processes = {one.instance: one for one in machine.processes}

    def on_end(self, instance: str, exit_: TrainerExit) -> None:
        """The process is gone, and workerd knows."""
        self._processes.pop(instance, None)
        self._facts(instance, ended_at=0.0, exit=exit_, cleared=True, connected=False)

    def on_hang(self, instance: str) -> None:
        """The process stands still."""
        self._set(self._processes[instance]._replace(hung=True))

    def on_ready(self, instance: str) -> None:
        """The script has come to its waiting point."""
        me = self._processes[instance]
        standing = phases.ready(me.standing).standing
        if self._trainer(instance).placement is None:
            standing = phases.dirty(standing).standing  # a spare rehearses
        self._tell(me._replace(standing=standing), ready=True)
        self._answer(instance)

    def on_prepare(self, instance: str) -> None:
        """Its gradients are whole."""
        me = self._processes[instance]
        verdict = phases.prepare(me.standing)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} can't prepare: {verdict.reason}")
        self._tell(me._replace(standing=verdict.standing))
        self._level(me, 1)
        if me.wish == me.standing.joined:
            self.effects.append(("wish", me.standing.joined, me.rank, me.standing.step))

    def on_agree(self, instance: str) -> None:
        """Its replica has agreed."""
        self._level(self._processes[instance], 2)

    def on_update(self, instance: str, agreed: bool, stop_after: bool) -> None:
        """All have agreed: it updates. Nobody could tell the moment in between from before."""
        me = self._processes[instance]
        verdict = phases.may_update(me.standing, agreed, stop_after)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} can't update: {verdict.reason}")
        self._updated(me._replace(standing=verdict.standing))
        if me.standing.joined >= me.standing.stopped:
            me = self._processes[instance]
            self._level(me, 0)
            if phases.at_boundary(me.standing):
                self._tell(me, committed=me.standing.joined, held=me.standing.joined)
                return
            self._tell(me, committed=me.standing.joined)
            self._finish(instance)

    def on_forward(self, instance: str) -> None:
        """It applies the update that RESTORE asks for, and comes to the barrier."""
        me = self._processes[instance]
        verdict = phases.may_update(me.standing, agreed=False)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} can't roll forward: {verdict.reason}")
        self._updated(me._replace(standing=verdict.standing))
        self._arrive(instance)

    def on_pull(self, instance: str, source: str, lineage: tuple[str, ...]) -> None:
        """It begins to pull."""
        me = self._processes[instance]
        verdict = phases.pulling(me.standing, me.standing.stopped)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} may not pull: {verdict.reason}")
        self._set(me._replace(standing=verdict.standing, pull=(source, lineage)))

    def on_pulled(self, instance: str) -> None:
        """The state has arrived and is verified."""
        me = self._processes[instance]
        assert me.pull is not None
        verdict = phases.pulled(me.standing, me.standing.stopped)
        self._tell(
            me._replace(standing=verdict.standing, lineage=me.pull[1], pull=None, sources=())
        )
        self._arrive(instance)

    def on_join(self, instance: str) -> None:
        """Everybody has come to the barrier."""
        me = self._processes[instance]
        verdict = phases.joined(me.standing, me.standing.stopped)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} can't join: {verdict.reason}")
        me = me._replace(standing=verdict.standing)
        self._tell(me, joined=verdict.standing.joined)
        self._level(me, 0)
        self._finish(instance)

    def on_break(self, instance: str, generation: int) -> None:
        """It sees its group break."""
        me = self._processes[instance]._replace(broken=generation)
        self._tell(me, broken_generation=generation, broken="broken")

    # ---- inside a trainer

    def _updated(self, me: Process) -> None:
        verdict = phases.updated(me.standing)
        standing = verdict.standing
        if standing.answered == standing.stopped > max(standing.restored, standing.joined):
            raise Violation(f"rank {me.rank} updates its weights after it has acknowledged")
        # a rank prepares only in the group that it has joined
        lineage = (*me.lineage, f"g{standing.joined}")
        if len(lineage) != standing.step + 1:
            raise Violation(f"rank {me.rank} has applied {lineage} to come to {standing.step}")
        self._tell(me._replace(standing=standing, lineage=lineage))

    def _level(self, me: Process, more: int) -> None:
        level = 3 * me.standing.step + more
        self.effects.append(("level", me.standing.joined, me.rank, level))

    def _finish(self, instance: str) -> None:
        me = self._processes[instance]
        if me.standing.phase is not StepPhase.COMPUTING or me.standing.step < self._shape.steps:
            return
        verdict = phases.finish(me.standing)
        if verdict.do is not Do.GO:
            raise Violation(f"rank {me.rank} can't finish: {verdict.reason}")
        me = me._replace(standing=verdict.standing)
        self._tell(me, done_step=me.standing.step, digest="/".join(me.lineage))

    def _arrive(self, instance: str) -> None:
        me = self._processes[instance]
        number = me.standing.stopped
        if me.arrived >= number or phases.holds(me.standing, number).do is not Do.GO:
            return
        arrival = Arrival(instance, me.standing.step, me.lineage)
        if not me.reserve:
            self.effects.append(("arrive", number, me.rank, (arrival, self._members())))
        self._tell(me._replace(arrived=number), restored=number)

    def _digest(self, instance: str) -> str:
        """Of the initial state that the script built: at a job's start one has another one."""
        return "odd" if self._shape.from_start and instance == "n1t1" else "seed"

    def _members(self) -> tuple[int, ...]:
        """The ranks of the replicas that the generation has, by the record that it follows."""
        orders = self.machine.orders
        assert orders is not None
        generation, job = orders.jobs[JOB].generation, orders.jobs[JOB].job
        assert generation is not None
        assert job is not None
        return present(job.spec, generation)

    def _answer(self, instance: str) -> None:
        me = self._processes[instance]
        verdict = phases.may_answer(me.standing)
        if verdict.do is not Do.GO:
            return
        standing = verdict.standing
        pristine = standing.phase is StepPhase.EMPTY and standing.pristine
        stopped = Stopped(
            generation=standing.stopped,
            phase=model.StepPhase(standing.phase),
            step=standing.step,
            initial_digest=self._digest(instance) if pristine else "",
            shard_address="address",
            offer=STORE,
            held=phases.at_boundary(standing),
        )
        self._tell(me._replace(standing=standing), stopped=stopped)

    # ---- messages of workerd to a trainer

    def _stop(self, message: SendStop) -> None:
        me = self._processes[message.instance]
        if me.hung:
            return
        verdict = phases.on_stop(me.standing, message.generation)
        self._set(me._replace(standing=verdict.standing, rank=message.rank, pull=None))
        self._answer(message.instance)

    def _hold(self, message: SendHold) -> None:
        me = self._processes[message.instance]
        if not me.hung:
            self._set(me._replace(wish=message.generation))

    def _restore(self, message: SendRestore) -> None:
        me = self._processes[message.instance]
        if me.hung:
            return
        same = any(one.initial_digest == self._digest(me.instance) for one in message.sources)
        verdict = phases.on_restore(
            me.standing, message.generation, message.resume_step, message.initial, same
        )
        if verdict.do is Do.REFUSE and message.reserve:
            # the others go on without what it alone has come to: nobody joins with it
            self.on_end(message.instance, TrainerExit(code=1))
            return
        if verdict.do is Do.REFUSE:
            raise Violation(f"rank {me.rank} refuses RESTORE: {verdict.reason}")
        if verdict.do is Do.IGNORE:
            return
        pulls = verdict.do is Do.PULL
        me = me._replace(
            standing=verdict.standing,
            sources=tuple(message.sources) if pulls else (),
            reserve=message.reserve,
        )
        if verdict.do is Do.ADOPT:
            me = me._replace(lineage=(self._digest(me.instance),))
        self._set(me)
        self._arrive(message.instance)

    # ---- values

    def _local(self, **changes: Any) -> None:
        self.machine = self.machine._replace(local=replace(self.machine.local, **changes))

    def _trainer(self, instance: str) -> TrainerFacts:
        return next(one for one in self.machine.local.trainers if one.instance == instance)

    def _facts(self, instance: str, **changes: Any) -> None:
        self._local(
            trainers=tuple(
                replace(one, **changes) if one.instance == instance else one
                for one in self.machine.local.trainers
            )
        )

    def _set(self, me: Process) -> None:
        self._processes[me.instance] = me

    def _tell(self, me: Process, **facts: Any) -> None:
        self._set(me)
        phase = model.StepPhase(me.standing.phase)
        self._facts(me.instance, step=me.standing.step, phase=phase, **facts)
