# SPDX-License-Identifier: Apache-2.0
"""The ranks of one generation: their barrier, and the steps that they take together.

Steps are not simulated one by one: as long as nothing stands still, where every rank is follows
from the time alone. A group *stalls* when its first member stops, ends or hangs: what needs
everybody, the reduction of the gradients and the agreement, doesn't come about after that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.simulator.trainer import SimTrainer

from tests.simulator.times import Times

Lineage = tuple[tuple[int, int], ...]
"""Where a state comes from: (generation, the state that its updates led to), one after another."""


class Violation(AssertionError):
    """An invariant of the protocol doesn't hold."""


class Moment(NamedTuple):
    """Where a rank stands."""

    reduced: int
    """Steps whose gradients it has, whole."""
    agreed: int
    """Steps whose update it knows that it may apply."""
    updated: int
    """Steps whose update it has applied."""


@dataclass(slots=True, eq=False)
class Group:
    """One generation of a job."""

    generation: int
    ranks: int
    times: Times
    seconds: float
    """A step's: with fewer replicas each has a larger part of the batch."""
    step: int = -1
    """The state from which it goes on."""
    began: float = math.inf
    stalled: float = math.inf
    last: int = 1 << 60
    """The state after which all have agreed to stop; not yet that of any step, by default."""
    members: dict[int, SimTrainer] = field(default_factory=dict)

    def arrive(self, rank: int, member: SimTrainer) -> bool:
        """Somebody has come to the barrier; whether all are there. Raises Violation."""
        before = self.members.get(rank)
        if before is not None and before is not member and before.lives:
            raise Violation(
                f"{before.instance} and {member.instance} both join generation "
                f"{self.generation} as rank {rank}"
            )
        for other in self.members.values():
            if other is member or not other.lives:
                continue
            if other.standing.step != member.standing.step:
                raise Violation(
                    f"generation {self.generation} would go on from different steps: rank "
                    f"{other.rank} from {other.standing.step}, rank {rank} from "
                    f"{member.standing.step}"
                )
            if other.lineage != member.lineage:
                raise Violation(
                    f"generation {self.generation} would go on from different states: rank "
                    f"{other.rank} has {other.lineage}, rank {rank} has {member.lineage}"
                )
            break  # all that are there are alike
        self.members[rank] = member
        return len(self.members) == self.ranks and all(
            one.lives and one.standing.stopped == self.generation for one in self.members.values()
        )

    def begin(self, now: float) -> None:
        """All have joined."""
        self.began = now
        self.step = next(iter(self.members.values())).standing.step

    def stall(self, now: float) -> None:
        """Somebody stops taking part."""
        self.stalled = min(self.stalled, now)

    def updated_at(self, step: int) -> float:
        """When every rank has come to a state, if nothing stalls."""
        times = self.times
        share = step - self.step - 1 + times.agreed + times.skew + times.update
        return self.began + share * self.seconds

    def hold(self, now: float) -> bool:
        """A rank wishes to stop after the step under way; whether it is the first one."""
        if self.last < 1 << 60 or self.step < 0:
            return False
        self.last = self.step + self._count(self.times.agreed, now) + 1
        return True

    def moment(self, now: float, skew: float) -> Moment:
        """Where a rank stands that comes to know things ``skew`` (0 to 1) later than the first."""
        times = self.times
        late = skew * times.skew * self.seconds

        def passed(share: float, more: float = 0.0) -> int:
            # what happens for everybody at once, and the rank has heard of
            done = self._count(share, self.stalled)
            heard = self._count(share, now - late - more)
            return min(done, heard, self.last - self.step)

        return Moment(
            self.step + passed(times.reduced),
            self.step + passed(times.agreed),
            self.step + passed(times.agreed, times.update * self.seconds),
        )

    def _count(self, share: float, until: float) -> int:
        """How many times that share of a step has been reached before a time."""
        if until <= self.began:
            return 0
        if math.isinf(until):
            return 1 << 60
        return max(0, math.ceil((until - self.began) / self.seconds - share))
