# SPDX-License-Identifier: Apache-2.0
"""A recovery that stands still in the phase that a test wants to disturb."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from coordinator.cli.localcluster.cluster import PREFIX
from coordinator.controller import records
from coordinator.model import Ack, Phase
from coordinator.store import Store, keys
from tests.cluster.support import RECOVERY, Run, wait_until

ANCHOR, OTHER, VICTIM = 0, 1, 2
"""The slots of the job's three replicas, a node each: who holds PAUSE, the other survivor, who
dies first."""


@contextlib.contextmanager
def recovery(run: Run, phase: Phase) -> Iterator[None]:
    """The victim's node dies, and its recovery comes to ``phase`` and no further while inside.

    A frozen trainer can't acknowledge: the anchor's holds PAUSE. Once everybody else has
    acknowledged, the other survivor's is frozen instead, which then can't join: that is RESTORE.
    """
    cluster, job = run.cluster, run.spec.name
    anchor, other = (cluster.trainer(job, rank) for rank in (ANCHOR, OTHER))
    frozen = [anchor]
    os.kill(anchor, signal.SIGSTOP)
    try:
        victim = run.node_of(VICTIM)
        cluster.kill_node(victim)
        # The group breaks at once, which may be a generation of its own; the lease ends later.
        _await(run, victim, Phase.PAUSE)
        if phase is Phase.RESTORE:
            with Store([cluster.etcd.address], prefix=PREFIX) as store:
                wait_until(lambda: _acknowledged(run, store) == {OTHER, VICTIM})
            os.kill(other, signal.SIGSTOP)
            frozen = [other]
            os.kill(anchor, signal.SIGCONT)
            _await(run, victim, Phase.RESTORE)
        yield
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):  # the test has killed it
                os.kill(pid, signal.SIGCONT)


def _await(run: Run, victim: str, phase: Phase) -> None:
    run.wait(
        lambda one: (
            one.generation.phase == phase.value
            and all(slot.node not in ("", victim) for slot in one.slots)
        ),
        RECOVERY,
        f"{phase.name} with somebody else in the victim's slot",
    )


def _acknowledged(run: Run, store: Store) -> set[int]:
    """The slots whose nodes have acknowledged the present generation."""
    seen = run.describe()
    slots = {one.node: one.slot for one in seen.slots}
    found = set()
    for key, value in store.list(keys.acks_prefix(run.spec.name)).items.items():
        ack = records.load(keys.parse(key).kind, value)
        node = key.rpartition("/")[2]
        if isinstance(ack, Ack) and ack.generation == seen.generation.generation and node in slots:
            found.add(slots[node])
    return found
