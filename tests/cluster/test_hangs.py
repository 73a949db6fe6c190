# SPDX-License-Identifier: Apache-2.0
"""A trainer stands still; it alone is replaced, and what it stood in is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.model import Cause, JobSpec
from tests.cluster.support import END, Run, running, spec

Reference = Callable[[JobSpec], list[str]]

pytestmark = pytest.mark.timeout(300)

PYTHON = 'hanging.py", line'
WAYS = {
    "sleeps": (PYTHON, "in hang"),
    "holds the interpreter": (PYTHON, "in hang"),
    "waits in the kernel": (": D ",),
    "is stopped": (": T ",),
}


@pytest.mark.parametrize("how", WAYS)
def test_the_one_that_hangs_is_replaced_and_no_other(
    reference: Reference, tmp_path: Path, how: str
) -> None:
    wanted = reference(spec())
    job = spec(HANG=how, HUNG=str(tmp_path / "hung"))
    with running(4, "--hang", "3") as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(5)
        victim = run.node_of(1)
        before = {rank: cluster.trainer(job.name, rank) for rank in (0, 2)}
        incident = run.wait_incident()
        assert incident.cause == Cause.NO_PROGRESS.value
        assert list(incident.nodes) == [victim]
        assert run.node_of(1) != victim
        (one,) = incident.exits
        assert (one.rank, one.node) == (1, victim)
        assert one.exit.cause.startswith("hung in COMPUTING(20) for ")
        assert all(part in one.exit.traceback for part in WAYS[how]), one.exit.traceback
        assert {rank: cluster.trainer(job.name, rank) for rank in (0, 2)} == before
        assert incident.lost_steps <= 1
        assert run.finish() == wanted


def test_one_that_takes_longer_and_says_so_is_awaited(tmp_path: Path) -> None:
    job = spec(HANG="says so", HUNG=str(tmp_path / "hung"), SECONDS="25")
    with running(4, "--hang", "3", "--progress", "15") as cluster:
        run = Run(cluster, job)
        run.wait_spare()
        run.wait_step(21, END)
        assert not run.describe().incidents
        assert run.describe().generation.generation == 1
