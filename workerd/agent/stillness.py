# SPDX-License-Identifier: Apache-2.0
"""Whether a trainer stands still, and what is said of it. Pure."""

from __future__ import annotations

from coordinator.model import Phase, StepPhase
from workerd.agent.standing import Owner, Standing
from workerd.agent.state import Limits, Local, TrainerFacts

_USUAL = 3
"""Usual steps without any change, at least."""


def unmoved(state: Standing, local: Local, limits: Limits, trainer: TrainerFacts) -> bool:
    """Whether nothing of a rank of the running group has changed for longer than usual."""
    return (
        isinstance(state, Owner)
        and state.generation.phase is Phase.RUNNING
        and state.keeps(trainer)
        and trainer.joined == state.generation.generation
        and trainer.moved_at > 0
        and local.now - trainer.moved_at >= max(limits.still, _USUAL * local.step_seconds)
    )


def excused(local: Local, trainer: TrainerFacts) -> bool:
    """Whether its script has said that it takes longer now."""
    return local.now < trainer.excused_until


def seen(trainer: TrainerFacts) -> bool:
    """Whether the stacks of where it stands are there."""
    return trainer.stacks is not None and trainer.stacks_asked_at >= trainer.moved_at


def waits(trainer: TrainerFacts) -> bool:
    """Whether it can't go on without its peers."""
    ahead = trainer.phase in (StepPhase.PREPARED, StepPhase.DONE)
    return trainer.waiting > 0 or ahead or trainer.done_step is not None
