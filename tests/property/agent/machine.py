# SPDX-License-Identifier: Apache-2.0
"""One node's agent, with a made-up leader and trainers, and an etcd that is seen late."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator.model import (
    Ack,
    Assignment,
    DeadIncarnation,
    Device,
    Generation,
    Job,
    JobSpec,
    Node,
    NodeFlags,
    Phase,
    Slot,
    SlotRank,
    SpareAssignment,
    StepPhase,
    TrainerExit,
)
from workerd.agent import actions as do
from workerd.agent.decide import decide
from workerd.agent.reports import ACK, NODE, PROGRESS
from workerd.agent.state import (
    JobOrders,
    Limits,
    Local,
    Orders,
    Placement,
    Stopped,
    TrainerFacts,
    Written,
)

RANKS = 2
LIMITS = Limits()
SPEC = JobSpec(name="j", command=("x",), replicas=4, ranks_per_node=RANKS, spares=1)
JOB = Job(spec=SPEC, spec_revision=1)


class Played(RuleBasedStateMachine):
    """One node. ``truth`` is what etcd holds, ``seen`` what the node has read last."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.names = 0
        self.lives = 0
        self.truth = Orders()
        self.seen: Orders | None = None
        self.trainers: dict[str, TrainerFacts] = {}
        self.template = Node(node="n", incarnation="i0", devices=(Device(), Device(index=1)))
        self.registered = True
        self.overdue: float | None = None
        self.node_written: Node | None = None
        self.written: Written | None = None
        self.acked: tuple[str, int] | None = None
        self.ack_held = False
        self.flight: list[do.Action] = []
        # What happened, for the properties.
        self.acks: dict[tuple[str, int], Ack] = {}
        self.places: dict[tuple[int, Placement], str] = {}
        self.progress_at: dict[tuple[object, ...], float] = {}

    # ---- etcd

    @initialize(start=st.sampled_from(["idle", "spare", "warm", "placed", "running"]))
    def begin(self, start: str) -> None:
        self.truth = Orders(jobs={"j": JobOrders(job=JOB)})
        if start in ("spare", "warm"):
            self.truth = replace(self.truth, spare=SpareAssignment("n", "j", 1))
        elif start in ("placed", "running"):
            self.pause("me", set(), staged=False)
        if start in ("warm", "running"):
            self.calm(8, leader=True)

    def job(self) -> JobOrders:
        return self.truth.jobs["j"]

    def tell(self, **changes: object) -> None:
        jobs = {"j": replace(self.job(), **changes)}  # type: ignore[arg-type]
        self.truth = replace(self.truth, revision=self.truth.revision + 1, jobs=jobs)

    @rule(
        owner=st.sampled_from(["keep", "me", "me", "other", "move"]),
        anew=st.sets(st.integers(0, RANKS - 1)),
        staged=st.booleans(),
    )
    def pause(self, owner: str, anew: set[int], staged: bool) -> None:
        before = self.job().generation or Generation(job="j", spec_revision=1)
        if before.phase.ended:
            return
        number = before.generation + 1
        slot = self.job().slot
        mine = slot is not None and (slot.node, slot.incarnation) == self.who()
        if owner == "me" and not mine:
            slot = Slot(0, *self.who(), (SlotRank(since=number),) * RANKS, number)
            place = Assignment("n", self.template.incarnation, "j", 0, number)
            self.truth = replace(self.truth, assignment=place, spare=None)
        elif owner == "other" and mine:
            slot = Slot(0, "m", "im", (SlotRank(since=number),) * RANKS, number)
            self.truth = replace(self.truth, assignment=None)
        elif owner == "move" and mine and slot and all(one.instance for one in slot.ranks):
            slot = replace(slot, slot=1 - slot.slot, generation=number)
            place = Assignment("n", self.template.incarnation, "j", slot.slot, number)
            self.truth = replace(self.truth, assignment=place)
        elif mine and slot is not None and anew:
            ranks = tuple(
                SlotRank(since=number) if one in anew else rank
                for one, rank in enumerate(slot.ranks)
            )
            slot = replace(slot, ranks=ranks, generation=number)
        if staged:  # a large loss: the slots come first, and are valid with the record
            self.tell(slot=slot)
            self.look()
            self.act()
        self.tell(
            slot=slot,
            generation=replace(
                before, generation=number, phase=Phase.PAUSE, resume_step=-1, rendezvous_slots=(0,)
            ),
        )

    def who(self) -> tuple[str, str]:
        return "n", self.template.incarnation

    @rule()
    def restore(self) -> None:
        """As the planner does it: only over acks of this generation, which it names."""
        job = self.job()
        generation, slot, ack = job.generation, job.slot, job.ack
        if generation is None or generation.phase is not Phase.PAUSE or slot is None:
            return
        if (slot.node, slot.incarnation) == self.who():
            if ack is None or ack.generation != generation.generation:
                return
            slot = replace(
                slot,
                ranks=tuple(
                    replace(rank, instance=one.instance)
                    for rank, one in zip(slot.ranks, ack.ranks, strict=True)
                ),
            )
        self.tell(slot=slot, generation=replace(generation, phase=Phase.RESTORE, resume_step=0))

    @rule(data=st.data())
    def confuse(self, data: st.DataObject) -> None:
        """A record that no planner writes: whatever it says, the node keeps to its rules."""
        generation, slot = self.job().generation, self.job().slot
        if generation is None or slot is None:
            return
        names = st.sampled_from(["", "x", *sorted(self.trainers)])
        ranks = tuple(replace(rank, instance=data.draw(names)) for rank in slot.ranks)
        self.tell(
            slot=replace(slot, ranks=ranks),
            generation=replace(generation, phase=Phase.RESTORE, resume_step=0),
        )

    @rule(phase=st.sampled_from([Phase.FINISHED, Phase.STOPPED, Phase.FAILED]), now=st.booleans())
    @precondition(lambda self: self.names > 3)
    def end(self, phase: Phase, now: bool) -> None:
        generation = self.job().generation
        if generation is not None and now:
            self.tell(generation=replace(generation, phase=phase))

    @rule()
    def running(self) -> None:
        """As the planner does it: once every rank has joined."""
        generation, slot = self.job().generation, self.job().slot
        if generation is None or slot is None or generation.phase is not Phase.RESTORE:
            return
        mine = (slot.node, slot.incarnation) == self.who()
        joined = {one.instance: one.joined for one in self.trainers.values()}
        number = generation.generation
        if not mine or all(joined.get(one.instance) == number for one in slot.ranks):
            self.tell(generation=replace(generation, phase=Phase.RUNNING))

    @rule()
    def hold(self) -> None:
        """A planned change waits for the step's end."""
        generation = self.job().generation
        if generation is not None and generation.phase is Phase.RUNNING:
            self.tell(generation=replace(generation, hold="a move"))

    @rule(keep=st.booleans())
    def spare(self, keep: bool) -> None:
        wanted = SpareAssignment("n", "j", 1) if keep and self.truth.assignment is None else None
        self.truth = replace(self.truth, spare=wanted)

    @rule(really=st.sampled_from([False, False, False, True]))
    def condemn(self, really: bool) -> None:
        if not really:
            return
        dead = DeadIncarnation(self.template.incarnation)
        flags = NodeFlags(dead=(*self.truth.flags.dead, dead))
        self.truth = replace(self.truth, flags=flags)

    @rule()
    def look(self) -> None:
        self.seen = self.truth

    # ---- the lease

    @rule()
    def lose_lease(self) -> None:
        self.registered, self.ack_held, self.written, self.node_written = False, False, None, None
        self.overdue = self.overdue or self.now
        self.tell(ack=None)

    @rule()
    def register(self) -> None:
        if not self.truth.flags.is_dead(self.template.incarnation):
            self.registered, self.overdue = True, None

    # ---- trainers

    def one(self, data: st.DataObject) -> TrainerFacts | None:
        living = sorted(name for name, one in self.trainers.items() if one.lives)
        return self.trainers[data.draw(st.sampled_from(living))] if living else None

    def set(self, trainer: TrainerFacts, **changes: object) -> None:
        self.trainers[trainer.instance] = replace(trainer, **changes)  # type: ignore[arg-type]

    @rule(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        trainer = self.one(data)
        if trainer is not None and not trainer.connected:
            self.set(trainer, connected=True, unlinked_at=None)

    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        """It answers the last thing that it was told."""
        trainer = self.one(data)
        if trainer is not None and trainer.welcomed:
            self.answer(trainer)

    @rule(rounds=st.integers(1, 8), leader=st.sampled_from([True, True, False]))
    def calm(self, rounds: int, leader: bool) -> None:
        """Nothing goes wrong for a while: what random steps alone would seldom reach."""
        for _ in range(rounds):
            self.register()
            self.look()
            self.act()
            while self.flight:
                self.land(lost=False)
            for trainer in list(self.trainers.values()):
                if not trainer.lives:
                    self.set(trainer, cleared=True)
                elif trainer.ending:
                    self.set(trainer, ended_at=self.now, exit=TrainerExit(), connected=False)
                elif not trainer.connected:
                    self.set(trainer, connected=True, unlinked_at=None)
                elif trainer.welcomed:
                    self.answer(trainer)
            if leader:
                self.restore()
                self.running()

    def answer(self, trainer: TrainerFacts) -> None:
        told = trainer.stop_sent
        if not trainer.ready:
            self.set(trainer, ready=True)
        elif told and (trainer.stopped is None or trainer.stopped.generation < told):
            empty = trainer.restored == 0
            said = Stopped(told, StepPhase.EMPTY if empty else StepPhase.COMPUTING)
            self.set(trainer, stopped=said)
        elif trainer.restore_sent > trainer.restored:
            self.set(trainer, restored=trainer.restore_sent)
        elif trainer.restored > trainer.joined:
            self.set(trainer, joined=trainer.restored, step=0, phase=StepPhase.COMPUTING)
        elif trainer.joined:
            self.set(trainer, step=trainer.step + 1)

    @rule(data=st.data())
    def break_group(self, data: st.DataObject) -> None:
        trainer = self.one(data)
        if trainer is not None and trainer.joined:
            self.set(trainer, broken_generation=trainer.joined, broken="torn")

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        trainer = self.one(data)
        if trainer is not None:
            self.set(trainer, ended_at=self.now, exit=TrainerExit(signal=9), connected=False)

    @rule()
    def clear(self) -> None:
        for trainer in self.trainers.values():
            if not trainer.lives:
                self.set(trainer, cleared=True)

    @rule(seconds=st.sampled_from([0.1, 1.1, 6.0, 70.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ---- the agent

    def local(self) -> Local:
        kinds = {do.WriteNode: NODE, do.WriteAck: ACK}
        return Local(
            now=self.now,
            template=self.template,
            trainers=tuple(self.trainers.values()),
            registered=self.registered,
            overdue_since=self.overdue,
            node_written=self.node_written,
            written=self.written,
            acked=self.acked,
            ack_held=self.ack_held,
            busy=frozenset(kinds.get(type(one), PROGRESS) for one in self.flight),
        )

    @rule()
    def act(self) -> None:
        for action in decide(self.seen, self.local(), LIMITS):
            self.check(action)
            self.carry_out(action)

    @rule(lost=st.booleans())
    def land(self, lost: bool) -> None:
        """The oldest write that is under way arrives, or doesn't."""
        if not self.flight:
            return
        action = self.flight.pop(0)
        if lost or not self.registered:
            if isinstance(action, do.WriteProgress):
                self.progress_at.clear()  # what was not written may be tried again
            return
        match action:
            case do.WriteNode(record):
                if record.incarnation == self.template.incarnation:
                    self.node_written = record
            case do.WriteAck(job, ack):
                if ack.incarnation != self.template.incarnation:
                    return
                before = self.job().ack
                assert before is None or before.generation <= ack.generation
                self.acked, self.ack_held = (job, ack.generation), True
                self.tell(ack=ack)
            case do.WriteProgress(job, progress, marks):
                self.written = Written(job, progress, marks, self.now)
            case do.ClearPlace():
                self.written, self.ack_held = None, False
                self.tell(ack=None)

    def carry_out(self, action: do.Action) -> None:
        match action:
            case do.StartTrainer():
                self.names += 1
                name = f"t{self.names}"
                self.trainers[name] = TrainerFacts(
                    name,
                    action.local_rank,
                    action.job,
                    action.spec_revision,
                    started_at=self.now,
                    attempt=action.attempt,
                    placement=action.placement,
                )
                if action.placement is not None:
                    self.place(action.local_rank, action.placement, name)
            case do.PlaceTrainer(instance, placement):
                trainer = self.trainers[instance]
                self.set(trainer, placement=placement)
                self.place(trainer.local_rank, placement, instance)
            case do.EndTrainer(instance, grace):
                at = self.now + grace if grace else None
                self.set(self.trainers[instance], ending=action.reason, kill_at=at)
            case do.KillTrainer(instance):
                self.set(self.trainers[instance], kill_at=None)
            case do.ForgetTrainer(instance):
                del self.trainers[instance]
            case do.SendWelcome(instance):
                self.set(self.trainers[instance], welcomed=True)
            case do.SendStop(instance, generation):
                self.set(self.trainers[instance], stop_sent=generation)
            case do.SendRestore(instance, generation):
                self.set(self.trainers[instance], restore_sent=generation)
            case do.SendRunning(instance, generation):
                self.set(self.trainers[instance], running_sent=generation)
            case do.SendHold(instance, generation):
                self.set(self.trainers[instance], hold_sent=generation)
            case do.SendRelease(instance):
                self.set(self.trainers[instance], released_at=self.now)
            case do.Renew():
                self.lives += 1
                self.trainers.clear()
                self.template = replace(self.template, incarnation=f"i{self.lives}")
                self.registered = self.ack_held = False
                self.acked = self.written = self.node_written = None
                self.tell(ack=None)
            case _:
                self.flight.append(action)

    # ---- for the properties

    def place(self, local_rank: int, placement: Placement, instance: str) -> None:
        """A trainer is placed."""

    def check(self, action: do.Action) -> None:
        """An action is about to be carried out."""
