# SPDX-License-Identifier: Apache-2.0
"""Who has which slot in the next generation: the ladder's arithmetic, without its words.

A job shrinks and grows by *blocks*: the fewest whole replicas that fill whole nodes (one node, as
long as a replica fits into it). A block that the generation runs without is *absent*. Slots at the
same place in their blocks hold the same shard positions, so an owner can move between them with
its state.

What an arrangement holds to:

- Who owns a slot and can stay, stays; a node moves only out of a block that is absent.
- Blocks are absent only if the nodes don't suffice, and never so many that fewer than the job's
  ``fewest`` replicas are left: then slots stay empty, and the job waits.
- A shard position has a member that may hold its state, if any owner may (rule 8).
- Whoever of an absent block may hold state stays in its slot, as a reserve; others are freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from coordinator.model import ClusterView, JobView, Phase, Slot, StepPhase
from coordinator.plan import holders
from coordinator.plan.placement import Candidates
from coordinator.plan.spread import Pool


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What changes, by slot."""

    placed: Mapping[int, str] = field(default_factory=dict)
    """The node without a place that takes it."""
    moved: Mapping[int, Slot] = field(default_factory=dict)
    """The owner of another slot that takes it, as it stands there."""
    emptied: frozenset[int] = frozenset()
    """Slots that lose their owner and get none."""
    open: tuple[int, ...] = ()
    """Slots of present replicas for which there is no node: the job waits."""
    absent: tuple[int, ...] = ()
    """The replicas that the generation runs without."""
    awaited: tuple[Slot, ...] = ()
    """Reserves without which nobody may hold some shard position, and that aren't `in_line` yet."""
    left: Candidates = field(default_factory=Candidates)
    """The nodes that are still free."""


def wanted_blocks(job: JobView) -> int:
    """How many blocks the job is to have when there are nodes for them."""
    return job.job.wanted // job.job.spec.block_replicas


def absent_blocks(job: JobView) -> frozenset[int]:
    """The blocks that the generation runs without."""
    spec = job.job.spec
    gone = job.generation.absent_replicas if job.generation is not None else ()
    return frozenset(replica // spec.block_replicas for replica in gone)


def in_line(job: JobView, slot: Slot) -> bool:
    """Whether a reserve's state is still one that the members could go on from.

    Not when it was to drop its gradients and hasn't said yet that it has: before RUNNING is
    recorded the members may have gone on with others.
    """
    if job.current.phase is Phase.PAUSE:
        return True
    if job.current.phase is not Phase.RESTORE:
        return False
    given = holders.acks(job, slot)
    repeats = (StepPhase.PREPARED, job.current.resume_step)
    for local in range(len(slot.ranks)):
        if given is not None and (given[local].phase, given[local].step) != repeats:
            continue
        seen = holders.progress(job, slot, local)
        if seen is None or seen.restored < job.current.generation:
            return False
    return True


def staying(view: ClusterView, job: JobView, lost: Set[int]) -> dict[int, Slot]:
    """The owners that live, by slot; of absent blocks those whose trainers all live."""
    stay = {}
    for slot in holders.owners(job):
        held = view.assignments.get(slot.node)
        if slot.slot in lost or held is None or held.slot != slot.slot:
            continue  # or it has been moved, by a leader that didn't come to the record
        if holders.absent(job, slot.slot):
            dead = view.flags_of(slot.node).is_dead(slot.incarnation)
            if dead or holders.ended(view, job, slot):
                continue
        stay[slot.slot] = slot
    return stay


def arrange(view: ClusterView, job: JobView, free: Candidates, lost: Set[int]) -> Arrangement:
    """The next generation's slots, without the owners of ``lost``.

    Any free node keeps a block that is there; only hot ones bring an absent one back, so that
    nobody waits for a start.
    """
    return _Arranging(view, job, free, lost).arrange()


class _Arranging:
    def __init__(self, view: ClusterView, job: JobView, free: Candidates, lost: Set[int]) -> None:
        self.view, self.job, self.spec = view, job, job.job.spec
        self.size = self.spec.block_slots
        living = staying(view, job, lost)
        self.stay = {
            number: slot
            for number, slot in living.items()
            if not holders.absent(job, number) or in_line(job, slot)
        }
        self.pool = Pool(
            view, self.spec, free, {number: slot.node for number, slot in living.items()}
        )
        self.unclear = [slot for number, slot in living.items() if number not in self.stay]
        self.back = {slot.slot: slot for slot in holders.leavers(view, job) if slot.slot in lost}
        self.awaited: list[Slot] = []
        self.absent = absent_blocks(job)
        self.placed: dict[int, str] = {}
        self.moved: dict[int, Slot] = {}

    def slots(self, block: int) -> range:
        return range(block * self.size, (block + 1) * self.size)

    def needs(self, count: int) -> int:
        """How many free nodes it takes to have so many whole blocks."""
        kinds = [0] * self.size
        for number in self.stay.keys() | self.back.keys():
            kinds[number % self.size] += 1
        return sum(max(0, count - one) for one in kinds)

    def arrange(self) -> Arrangement:
        present = [one for one in range(self.spec.blocks) if one not in self.absent]
        count = min(len(present), wanted_blocks(self.job))
        while count and self.needs(count) > len(self.pool):
            count -= 1
        if count * self.spec.block_replicas < self.spec.fewest:
            count = len(present)  # too few: everybody stays, and the job waits
        elif count == len(present):
            while count < wanted_blocks(self.job) and self.needs(count + 1) <= self.pool.hot:
                count += 1
        chosen = sorted(range(self.spec.blocks), key=self._worth)[:count]
        self._fill(chosen)
        self._keep_holders(chosen)
        return self._result(chosen)

    def _worth(self, block: int) -> tuple[bool, int, int]:
        mine = sum(number in self.stay for number in self.slots(block))
        return block in self.absent, -mine, block

    def _fill(self, chosen: list[int]) -> None:
        donors: dict[int, list[int]] = {}
        filled = frozenset(chosen)
        outside = [number for number in self.stay if number // self.size not in filled]
        for number in sorted(outside, key=lambda one: (not self._held(self.stay[one]), one)):
            donors.setdefault(number % self.size, []).append(number)
        for number in (one for block in chosen for one in self.slots(block)):
            if number in self.stay:
                continue
            if number in self.back:  # who had left it takes it back, with its state
                self.moved[number] = self.back[number]
                continue
            of_kind = donors.get(number % self.size)
            if of_kind:
                self.moved[number] = self.stay.pop(of_kind.pop(0))
            elif self.pool:
                self.placed[number] = self.pool.take(number)

    def _held(self, slot: Slot) -> frozenset[int]:
        return holders.held(self.view, self.job, slot)

    def _keep_holders(self, chosen: list[int]) -> None:
        """A state that no member holds comes back with whoever has it."""
        if not holders.has_run(self.job):
            return
        members = [one for block in sorted(chosen) for one in self.slots(block)]
        held = {}
        for number in members:
            owner = self.stay.get(number) or self.moved.get(number)
            held[number] = self._held(owner) if owner is not None else frozenset()
        outside = {
            number: self._held(slot)
            for number, slot in sorted(self.stay.items())
            if number not in held
        }
        for position in sorted(set(range(self.spec.shard_positions)).difference(*held.values())):
            having = [number for number, holds in outside.items() if position in holds]
            if not having:
                self.awaited += [slot for slot in self.unclear if position in self._held(slot)]
            for number in having:
                seats = [
                    one
                    for one in members
                    if one % self.size == number % self.size and held[one] < outside[number]
                ]
                if seats:
                    seat = min(seats, key=lambda one: one in self.stay or one in self.moved)
                    self._take(seat, number)
                    held[seat] = outside.pop(number)
                    break

    def _take(self, seat: int, number: int) -> None:
        node = self.placed.pop(seat, "")
        if node:
            self.pool.put_back(node)
        self.stay.pop(seat, None)
        self.moved[seat] = self.stay.pop(number)

    def _result(self, chosen: list[int]) -> Arrangement:
        members = {one for block in chosen for one in self.slots(block)}
        run = holders.has_run(self.job)
        filled_blocks = frozenset(chosen)
        kept = {
            number
            for number, slot in self.stay.items()
            if number in members or (run and self._held(slot))
        }
        filled = kept | self.placed.keys() | self.moved.keys()
        size = self.spec.block_replicas
        return Arrangement(
            placed=self.placed,
            moved=self.moved,
            emptied=frozenset(
                number
                for number, slot in self.job.slots.items()
                if slot.node and number not in filled
            ),
            open=tuple(sorted(members - filled)),
            absent=tuple(
                block * size + one
                for block in range(self.spec.blocks)
                if block not in filled_blocks
                for one in range(size)
            ),
            awaited=tuple(self.awaited),
            left=self.pool.left(),
        )
