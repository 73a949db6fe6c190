# SPDX-License-Identifier: Apache-2.0
"""What holds of the agent's decisions, whatever happens around them."""

from __future__ import annotations

from hypothesis import event, settings
from hypothesis.stateful import invariant, rule

from coordinator.model import (
    Ack,
    Phase,
)
from tests.property.agent.machine import LIMITS, RANKS, Played
from workerd.agent import actions as do
from workerd.agent.decide import decide
from workerd.agent.state import (
    JobOrders,
    Orders,
    Placement,
)


class Agent(Played):
    """The properties."""

    def place(self, local_rank: int, placement: Placement, instance: str) -> None:
        key = (local_rank, placement)
        assert key not in self.places, "one trainer for one (slot, rank, since)"
        self.places[key] = instance

    def check(self, action: do.Action) -> None:
        assert action.reason
        seen = self.seen or Orders()
        job = seen.jobs.get("j", JobOrders())
        instance = getattr(action, "instance", None)
        trainer = self.trainers.get(instance) if instance is not None else None
        dead = seen.flags.is_dead(self.template.incarnation)
        if isinstance(action, do.PlaceTrainer) or (
            isinstance(action, do.StartTrainer) and action.placement is not None
        ):
            assert job.slot is not None
            assert job.generation is not None
            assert job.slot.generation <= job.generation.generation, "the slot is valid"
        match action:
            case do.StartTrainer(local_rank):
                assert not dead
                assert not job.phase.ended
                others = [one for one in self.trainers.values() if one.local_rank == local_rank]
                assert all(one.cleared for one in others), "the device is free"
            case do.PlaceTrainer():
                assert trainer is not None
                assert trainer.lives
                assert not trainer.ending
                if trainer.placement is not None:  # placed once, but where its node moves with it
                    event("a trainer moves to another slot")
                    assert job.slot is not None
                    assert action.placement.slot == job.slot.slot != trainer.placement.slot
                    assert job.slot.ranks[trainer.local_rank].instance == trainer.instance
                    assert action.placement.since == trainer.placement.since
            case do.SendStop(_, generation):
                assert trainer is not None
                assert job.generation is not None
                assert not trainer.ending
                assert generation == job.generation.generation > trainer.stop_sent
            case do.SendRestore(_, generation):
                event("a RESTORE is passed on")
                assert trainer is not None
                assert trainer.placement is not None
                assert job.slot is not None
                assert not trainer.ending
                assert ("j", generation) in self.acks, "only what was acknowledged"
                assert self.acks["j", generation].incarnation == self.template.incarnation
                assert trainer.stopped is not None
                assert trainer.stopped.generation == generation > trainer.restore_sent
                assert job.slot.ranks[trainer.local_rank].instance == trainer.instance
            case do.SendHold(_, generation):
                event("a wish for a stop is passed on")
                assert trainer is not None
                assert job.generation is not None
                assert job.generation.hold
                assert generation == job.generation.generation == trainer.joined
            case do.SendRunning() | do.SendRelease() | do.Renew() | do.ClearPlace():
                event(type(action).__name__)
            case do.WriteAck(name, ack):
                self.check_ack(name, ack)
            case do.WriteProgress(name, _, marks):
                before = self.progress_at.get((name, self.template.incarnation, marks))
                first = self.written is None
                assert first or before is None or self.now - before >= LIMITS.progress_interval
                self.progress_at = {(name, self.template.incarnation, marks): self.now}
        if isinstance(action, do.Renew):
            assert dead
            assert all(one.cleared for one in self.trainers.values())
        if isinstance(action, do.WriteNode | do.WriteAck | do.WriteProgress | do.ClearPlace):
            assert self.registered, "nothing is written without a lease"

    def check_ack(self, name: str, ack: Ack) -> None:
        assert len(ack.ranks) == RANKS
        for one in ack.ranks:
            trainer = self.trainers[one.instance]
            assert trainer.lives
            assert trainer.stopped is not None
            assert trainer.stopped.generation == ack.generation
            assert (trainer.stopped.phase, trainer.stopped.step) == (one.phase, one.step)
        before = self.acks.setdefault((name, ack.generation), ack)
        assert before == ack, "never two acks of one generation"

    @rule()
    def settles(self) -> None:
        """What is carried out and seen is not asked for again: the actions come to an end."""
        self.calm(12, leader=False)
        assert decide(self.seen, self.local(), LIMITS) == ()

    @invariant()
    def what_lost_its_place_ends(self) -> None:
        if self.seen is None:
            return
        job = self.seen.jobs["j"]
        slot, generation = job.slot, job.generation
        if slot is None or generation is None or generation.phase is Phase.FINISHED:
            return
        ends = {
            one.instance
            for one in decide(self.seen, self.local(), LIMITS)
            if isinstance(one, do.EndTrainer)
        }
        dead = self.seen.flags.is_dead(self.template.incarnation)
        held = self.seen.assignment
        mine = held is not None and held.incarnation == self.template.incarnation
        for trainer in self.trainers.values():
            if not trainer.lives or trainer.ending or trainer.placement is None:
                continue
            lost = dead or not mine
            if mine and slot.generation <= generation.generation:
                rank = slot.ranks[trainer.local_rank]
                lost |= slot.node != "n" or rank.since != trainer.placement.since
                lost |= rank.instance not in ("", trainer.instance)
            assert not lost or trainer.instance in ends


Agent.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestAgent = Agent.TestCase
