# SPDX-License-Identifier: Apache-2.0
"""Which nodes without a slot are to be warm for which job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from coordinator.model import ClusterView, JobView, Slot, TrainerState
from coordinator.plan import arrange, drain, holders
from coordinator.plan.actions import KeepWarm, Unassign
from coordinator.plan.placement import Candidates, in_turn, unusable
from coordinator.plan.spread import Pool


def spares(view: ClusterView, taken: Set[str]) -> Iterator[KeepWarm]:
    """Keep as many nodes warm for each running job as it asks for; let the others go.

    Jobs come in turn (see ``placement.in_turn``). When no node is free, a job takes what is kept
    for the jobs of lower priority, the last one's first.
    """
    kept: dict[str, list[str]] = {}
    # Nearly all nodes of a large cluster have a place: no loop in Python tells them apart.
    free = sorted(view.nodes.keys() - view.assignments.keys() - view.spares.keys() - taken)
    for node, record in sorted(view.spares.items()):
        job = view.jobs.get(record.job)
        if node in view.assignments or node in taken:
            yield KeepWarm(node, "", 0, "it has a slot")
        elif job is None:
            continue  # its records can't be read now: nothing of it is touched
        elif _over(job):
            if not runs(view, node, record.job):
                yield KeepWarm(node, "", 0, f"job {record.job} has ended")
        elif why := unusable(view, node, job.job.spec.ranks_per_node):
            yield KeepWarm(node, "", 0, why)
        else:
            kept.setdefault(record.job, []).append(node)
    jobs = [one for one in in_turn(view) if one.generation is not None and not _over(one)]
    for job in jobs:
        spec = job.job.spec
        # what an absent replica lacks first becomes hot: then nobody waits for its start
        lacking = arrange.wanted_blocks(job) - spec.blocks + len(arrange.absent_blocks(job))
        wanted = spec.spares + max(0, lacking) * spec.block_slots + len(drain.leaving(view, job))
        wanted -= len(kept.get(spec.name, ()))
        if wanted <= 0:
            continue
        for node in _best(view, job, kept.get(spec.name, ()), free, wanted):
            free.remove(node)
            wanted -= 1
            yield KeepWarm(
                node, spec.name, job.job.spec_revision, f"a hot spare for job {spec.name}"
            )
        for other in reversed(jobs):
            if wanted <= 0 or other.job.spec.priority >= spec.priority:
                break
            theirs = kept.get(other.job.spec.name, [])
            for node in _best(view, job, kept.get(spec.name, ()), theirs, wanted):
                theirs.remove(node)
                wanted -= 1
                yield KeepWarm(
                    node,
                    spec.name,
                    job.job.spec_revision,
                    f"a hot spare for job {spec.name} of priority {spec.priority}, no longer for "
                    f"job {other.job.spec.name} of priority {other.job.spec.priority}",
                )


def _best(
    view: ClusterView, job: JobView, spares: Sequence[str], free: Sequence[str], wanted: int
) -> list[str]:
    """Up to so many nodes to keep warm for a job, away from its others."""
    spec = job.job.spec
    able = tuple(one for one in free if not unusable(view, one, spec.ranks_per_node))
    if not able:
        return []
    owners = {slot.slot: slot.node for slot in holders.owners(job)}
    pool = Pool(view, spec, Candidates(cold=able), owners, spares)
    return [pool.take(None) for _ in range(min(wanted, len(able)))]


def leftovers(view: ClusterView) -> Iterator[Unassign]:
    """Places that are none any more.

    Of jobs that have ended: once no trainer of the job is left there, and after the job's status,
    which is told from what the placed nodes keep in etcd. Of others: where the slot has another
    owner and the leader that gave it one didn't come to take the old place away.
    """
    running = {name: job.slots for name, job in view.jobs.items() if not _over(job)}
    doubtful = []
    for node, held in view.assignments.items():
        slots = running.get(held.job)
        slot = slots.get(held.slot) if slots is not None else None
        if slot is None or slot.node != node or slot.incarnation != held.incarnation:
            doubtful.append((node, held))
    for node, held in sorted(doubtful, key=lambda one: one[0]):
        job = view.jobs.get(held.job)
        if job is None or job.generation is None:
            continue
        if _over(job):
            told = job.status is not None and job.status.state.ended
            if told and not runs(view, node, held.job):
                yield Unassign(node, held.job, f"job {held.job} has ended")
            continue
        slot = job.slots.get(held.slot, Slot(slot=held.slot))
        if max(held.generation, slot.generation) > job.generation.generation:
            continue  # staged: valid only with the next record
        left = slot.left(job.generation)
        if left is not None and (left.node, left.incarnation) == (node, held.incarnation):
            continue  # it serves its state until the others run
        if (slot.node, slot.incarnation) != (node, held.incarnation):
            owner = slot.node or "nobody"
            yield Unassign(node, held.job, f"slot {held.slot} of job {held.job} is {owner}'s")


def runs(view: ClusterView, node: str, job: str) -> bool:
    """Whether a living node still has a trainer of a job."""
    live = view.nodes.get(node)
    return live is not None and any(
        one.job == job and one.state is not TrainerState.ENDED for one in live.record.trainers
    )


def _over(job: JobView) -> bool:
    return job.generation is not None and job.generation.phase.ended
