# SPDX-License-Identifier: Apache-2.0
"""The ladder: what takes the place of what is lost, and why.

A hot spare first; else an ended trainer is started again on its node, with a limit and a back-off;
else a cold spare; else the job goes on with fewer replicas, as long as ``min_replicas`` are left;
else it waits, paused. With enough hot spares it grows again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from coordinator.model import (
    Cause,
    ClusterView,
    FailureClass,
    JobView,
    Phase,
    Settings,
    Slot,
    TrainerExit,
)
from coordinator.plan import arrange, deaths, hang, holders, membership, reserves
from coordinator.plan.actions import Transition, Wait
from coordinator.plan.arrange import Arrangement
from coordinator.plan.builder import Builder
from coordinator.plan.evidence import Weighed, Who
from coordinator.plan.membership import Faults, describe, some
from coordinator.plan.placement import candidates, unusable
from coordinator.plan.spread import Pool

_ILL = frozenset({FailureClass.HOST, FailureClass.DEVICE})
"""Failures that another node is likely not to have."""

_REASONS = 16
"""How many reasons a record holds: it must not grow with what is lost."""


def change(
    view: ClusterView,
    job: JobView,
    taken: Set[str],
    now: float,
    settings: Settings,
    judged: Mapping[Who, Weighed],
) -> Transition | Wait | None:
    """A generation that mends the faults, fills empty slots or grows; None when all is well."""
    current, spec = job.current, job.job.spec
    faults = membership.find(view, job, hang.find(view, job, now, settings))
    if not faults and (gone := _source_gone(view, job)):
        why = f"{gone} is lost while it serves its state to who takes its place"
        return membership.regroup(view, job, Cause.NODE_LOST, why)
    if not (faults or _waits(job) or _may_grow(job) or _unheld(view, job)):
        return None
    restarts = current.restarts + len(faults.ended)
    if faults.ended and (end := membership.failed(job, faults, restarts)):
        return end
    others = deaths.undecided(view, job, now, settings, judged) if faults.lost else []
    if others:
        return Wait(
            spec.name,
            f"{reserves.names(others)} may be dead too: what a probe says is awaited",
        )
    free = candidates(view, job.job, taken)
    found = arrange.arrange(view, job, free, frozenset(faults.lost))
    if found.awaited:
        names = ", ".join(f"{slot.node} (slot {slot.slot})" for slot in found.awaited)
        return Wait(
            spec.name,
            f"nobody but {names} may hold a state that is lost with others: it is awaited",
            blocked=now - job.phase_at >= settings.restore,
        )
    same = set(found.absent) == set(current.absent_replicas)
    if not faults and not found.placed and not found.moved and same:
        return None
    return _Words(view, job, faults, found, free.hot).change(now, settings, restarts)


def _source_gone(view: ClusterView, job: JobView) -> str:
    """Who has left, was to serve, and is lost before all members hold their state."""
    current = job.current
    if current.phase is not Phase.RESTORE:
        return ""
    left = [one for slot in job.slots.values() if (one := slot.left(current)) is not None]
    if not left:
        return ""
    living = {one.node for one in holders.leavers(view, job)}
    named = {source.node for source in current.sources}
    gone = sorted(one.node for one in left if one.node in named - living)
    for slot in holders.members(job) if gone else ():
        for local in range(len(slot.ranks)):
            seen = holders.progress(job, slot, local)
            if seen is None or seen.restored < current.generation:
                return gone[0]
    return ""


def _waits(job: JobView) -> bool:
    """Whether a slot of the present replicas has no node."""
    return any(not slot.node and not holders.absent(job, one) for one, slot in job.slots.items())


def _may_grow(job: JobView) -> bool:
    """Whether a running job has another number of replicas than it is to have.

    Not before its first step with those that it has: what comes and goes at once must not keep
    it from that.
    """
    if job.current.phase is not Phase.RUNNING:
        return False
    settled = job.incident is None or job.incident.closed
    present = job.job.spec.blocks - len(arrange.absent_blocks(job))
    return settled and present != arrange.wanted_blocks(job)


def _unheld(view: ClusterView, job: JobView) -> bool:
    """Whether a state is left with a reserve alone, now that everybody has acknowledged."""
    if job.current.phase is not Phase.PAUSE or not job.current.absent_replicas:
        return False
    kept = {
        position
        for slot in arrange.staying(view, job, frozenset()).values()
        if holders.absent(job, slot.slot) and holders.acks(job, slot) is not None
        for position in holders.held(view, job, slot)
    }
    if not kept or not holders.has_run(job):
        return False
    for slot in holders.members(job):
        kept -= holders.held(view, job, slot)
    return bool(kept)


def smaller(job: JobView) -> Wait | None:
    """What a job that runs with fewer replicas than it is to have waits for."""
    spec = job.job.spec
    present = spec.blocks - len(arrange.absent_blocks(job))
    if present >= arrange.wanted_blocks(job):
        return None
    each = f"{spec.block_slots} node{'s are' if spec.block_slots > 1 else ' is'}"
    return Wait(spec.name, f"it grows when {each} free and warm for it")


def restart_delay(job: JobView, settings: Settings) -> float:
    """Seconds after a generation's beginning before a trainer is started again on its node.

    None at first; doubled for each generation that the same incident takes.
    """
    incident = job.incident
    if incident is None or incident.closed:
        return 0.0
    times = sum(mark.phase == "detected" for mark in incident.marks)
    return float(min(settings.restart * 2 ** min(times - 1, 16), settings.restart_max))


class _Words:
    """Turns an arrangement into a transition that says what it does."""

    def __init__(
        self,
        view: ClusterView,
        job: JobView,
        faults: Faults,
        found: Arrangement,
        hot: tuple[str, ...],
    ) -> None:
        self.view, self.job, self.spec = view, job, job.job.spec
        self.faults, self.found = faults, found
        self.build = Builder(view, job, job.current.generation + 1)
        self.hot = hot
        owners = {slot.slot: slot.node for slot in holders.owners(job)}
        for number in faults.lost:
            owners.pop(number, None)
        self.pool = Pool(view, self.spec, found.left, {**owners, **found.placed})
        self.reasons: list[str] = []
        self.nodes: list[str] = []

    def change(self, now: float, settings: Settings, restarts: int) -> Transition | Wait:
        """The transition, or for how long to wait before it."""
        job, found, faults = self.job, self.found, self.faults
        if faults.staged:
            said = some(faults.staged)
            self.reasons.append(f"slots {said} were written before the leader changed")
        self._fill()
        restarted = self._ended()
        self._shrink_or_grow()
        delay = restart_delay(job, settings)
        if restarted and not faults.lost and now - job.phase_at < delay:
            return Wait(
                self.spec.name,
                f"{_shortened(self.reasons)}: not within {delay:g} s of the last attempt",
            )
        return self.build.transition(
            (self._cause(), tuple(dict.fromkeys(self.nodes))),
            _shortened(self.reasons),
            restarts=restarts,
            absent=found.absent,
            exits=membership.exits(job, faults),
        )

    def _cause(self) -> Cause:
        if self.faults.ended and not self.faults.lost:
            return Cause.NO_PROGRESS if self.faults.hung else Cause.TRAINER_ENDED
        if not self.faults and self.job.current.phase is Phase.RUNNING:
            return Cause.PLANNED
        # a node that comes for an empty slot goes on with the incident that emptied it
        return Cause.NODE_LOST

    def _kind(self, node: str) -> str:
        return "hot" if node in self.hot else "cold"

    def _fill(self) -> None:
        found, build, slots = self.found, self.build, self.job.slots
        over = self._over()
        for number in sorted({*found.placed, *found.moved, *found.open, *found.emptied}):
            old = slots.get(number, Slot(slot=number))
            lost = number in self.faults.lost
            if old.node and lost:
                self.nodes.append(old.node)
            if old.node:
                build.free(old)
            said = old.node or "empty"
            if number in found.placed:
                node = found.placed[number]
                build.place(number, node)
                self.reasons.append(f"slot {number}: {said} -> {self._kind(node)} spare {node}")
                if not lost:
                    self.nodes.append(node)
            elif number in found.moved:
                mover = found.moved[number]
                build.move(number, mover, over.get(mover.slot, {}).keys())
                where = f"from slot {mover.slot}" if mover.slot != number else "which had left it"
                self.reasons.append(f"slot {number}: {said} -> {mover.node} {where}")
            else:
                if old.node:
                    build.empty(number)
                if number in found.open:
                    what = f"{said} is lost" if old.node else "still empty"
                    self.reasons.append(f"slot {number}: {what}, no node is free")
                elif lost:
                    self.reasons.append(f"slot {number}: {said} is lost, no node is free")
                elif not holders.absent(self.job, number):
                    self.reasons.append(f"slot {number}: {said} is freed")

    def _over(self) -> dict[int, dict[int, TrainerExit]]:
        by_slot: dict[int, dict[int, TrainerExit]] = {}
        for number, local, exit_ in self.faults.ended:
            by_slot.setdefault(number, {})[local] = exit_
        return by_slot

    def _ended(self) -> bool:
        """Replace the ended trainers that are left; whether any is started again on its node."""
        view, spec, found, build = self.view, self.spec, self.found, self.build
        leaving = {*self.faults.lost}
        again = False
        for number, over in self._over().items():
            old = self.job.slots[number]
            self.nodes.append(old.node)
            how = ", ".join(
                f"rank {spec.rank(number, local)} {describe(exit_)}"
                for local, exit_ in over.items()
            )
            gone = number in found.emptied or number in found.moved
            if gone or any(one.slot == number for one in found.moved.values()):
                self.reasons.append(f"slot {number}: {how} on {old.node}")
                continue
            # an unhealthy node leaves even for a spare that has to start first
            ill = unusable(view, old.node, spec.ranks_per_node) or any(
                exit_.failure_class in _ILL for exit_ in over.values()
            )
            better = bool(self.pool) and (self.pool.hot > 0 or bool(ill))
            if better and holders.held_elsewhere(view, self.job, old, leaving):
                node = self.pool.take(number)
                leaving.add(number)
                build.free(old)
                build.place(number, node)
                self.reasons.append(
                    f"slot {number}: {how} on {old.node} -> {self._kind(node)} spare {node}"
                )
            else:
                again = True
                build.restart(old, over.keys())
                self.reasons.append(f"slot {number}: {how} on {old.node}, restarted there")
        return again

    def _shrink_or_grow(self) -> None:
        found, spec = self.found, self.spec
        before, after = self.job.current.absent_replicas, found.absent
        present = spec.replicas - len(after)
        if len(after) != len(before):
            verb = "shrinks" if len(after) > len(before) else "grows"
            self.reasons.append(f"the job {verb} to {present} of {spec.replicas} replicas")
        elif set(after) != set(before):
            self.reasons.append(f"replicas {some(after)} are absent now instead of {some(before)}")
        if found.open:
            self.reasons.append(too_few(self.job))
        kept = [
            f"{slot.node} (slot {slot.slot})"
            for slot in holders.owners(self.job)
            if spec.replica(spec.rank(slot.slot, 0)) in set(after) - set(before)
            and slot.slot not in found.emptied
            and all(one.slot != slot.slot for one in found.moved.values())
        ]
        if kept:
            self.reasons.append(f"{', '.join(kept)} keep their state until the others run")


def _shortened(reasons: list[str]) -> str:
    """The first of many reasons, which are of slots, and the last ones, of the whole job."""
    if len(reasons) > _REASONS:
        left = len(reasons) - _REASONS
        reasons = [*reasons[: _REASONS - 3], f"{left} more", *reasons[-3:]]
    return "; ".join(reasons)


def too_few(job: JobView) -> str:
    """Why the job doesn't go on without its empty slots."""
    spec = job.job.spec
    if spec.fewest == spec.replicas:
        return "the job needs all its replicas (min_replicas is not set lower)"
    return f"fewer than min_replicas = {spec.fewest} would be left"
