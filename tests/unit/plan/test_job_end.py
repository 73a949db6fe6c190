# SPDX-License-Identifier: Apache-2.0
"""When a job is over."""

from __future__ import annotations

import pytest

from coordinator.model import (
    Generation,
    Job,
    JobSpec,
    JobView,
    Phase,
    Progress,
    RankProgress,
    Slot,
    SlotRank,
    StepPhase,
)
from coordinator.plan import recover


def _view(digests: tuple[str, ...], steps: tuple[int, ...]) -> JobView:
    number = 4
    return JobView(
        Job(spec=JobSpec(name="j", replicas=len(digests))),
        generation=Generation(job="j", generation=number, phase=Phase.RUNNING),
        slots={
            slot: Slot(slot, f"n{slot}", f"i{slot}", (SlotRank(f"t{slot}", 1),), 1)
            for slot in range(len(digests))
        },
        progress={
            f"n{slot}": Progress(
                f"i{slot}",
                (
                    RankProgress(
                        rank=slot,
                        instance=f"t{slot}",
                        generation=number,
                        phase=StepPhase.DONE,
                        step=steps[slot],
                        digest=digest,
                    ),
                ),
            )
            for slot, digest in enumerate(digests)
        },
    )


def test_a_rank_is_done_only_when_its_digest_has_come() -> None:
    assert recover.finished(_view(("a", ""), (9, 9))) is None


@pytest.mark.parametrize(
    ("digests", "steps", "phase"),
    [
        (("a", "a"), (9, 9), Phase.FINISHED),
        (("a", "b"), (9, 9), Phase.FAILED),
        (("a", "a"), (9, 8), Phase.FAILED),
    ],
)
def test_the_end_is_what_all_ranks_agree_on(
    digests: tuple[str, ...], steps: tuple[int, ...], phase: Phase
) -> None:
    over = recover.finished(_view(digests, steps))
    assert over is not None
    assert over.generation.phase is phase
