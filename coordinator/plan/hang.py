# SPDX-License-Identifier: Apache-2.0
"""Who holds up a running job: the rank that has not entered what all others wait in."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from coordinator.model import (
    ClusterView,
    FailureClass,
    JobView,
    Phase,
    RankProgress,
    Settings,
    TrainerExit,
)
from coordinator.plan import holders

_USUAL = 10
"""Usual steps that a hang lasts at least."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A job that stands still; ``culprits`` by (slot, local rank), none when all wait."""

    seconds: float
    culprits: tuple[tuple[int, int, RankProgress], ...]

    def exits(self) -> tuple[tuple[int, int, TrainerExit], ...]:
        """The culprits as trainers to be replaced, with where they stand."""
        return tuple(
            (
                slot,
                local,
                TrainerExit(
                    failure_class=FailureClass.UNKNOWN,
                    cause=f"hung in {one.phase.name}({one.step}) for {self.seconds:.0f} s",
                    traceback=one.stacks,
                    step=one.step,
                ),
            )
            for slot, local, one in self.culprits
        )


def find(view: ClusterView, job: JobView, now: float, settings: Settings) -> Hang | None:
    """The job's hang; None while it moves, or while it is not certain who is to blame.

    Certain means: every rank of the group says by itself that it stands still, some of them in a
    collective that they have entered and that doesn't end, and at least one outside.
    """
    generation = job.generation
    if generation is None or generation.phase is not Phase.RUNNING:
        return None
    quiet = now - max(job.progress_at, job.phase_at, view.no_eviction_before)
    if quiet < settings.hang:
        return None
    culprits, waiting = [], 0
    for slot in holders.members(job):
        for local in range(len(slot.ranks)):
            one = holders.progress(job, slot, local)
            if one is None or not one.still or one.generation != generation.generation:
                return None
            if one.waiting:
                waiting += 1
            else:
                culprits.append((slot.slot, local, one))
    if not waiting or quiet < _limit(job, settings):
        return None
    return Hang(quiet, tuple(culprits))


def _limit(job: JobView, settings: Settings) -> float:
    """How long the job may stand still, by how long its own steps take."""
    took = [one.step_seconds for one in job.progress.values() if one.step_seconds > 0]
    if not took:
        return settings.hang_max  # its first steps: they compile, read, and warm up
    usual = _USUAL * statistics.median(took)
    return min(max(settings.hang, usual), settings.hang_max)
