# SPDX-License-Identifier: Apache-2.0
"""Jobs; the fields are those of ``protos/job.proto``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the operator submitted, validated."""

    name: str = ""
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    working_directory: str = ""
    replicas: int = 1
    shard_positions: int = 1
    ranks_per_node: int = 1
    spares: int = 0
    seed: int = 0
    restarts: int = 0
    min_replicas: int = 0
    spread: tuple[str, ...] = ()
    priority: int = 0

    @property
    def ranks(self) -> int:
        """The number of trainers of the whole job."""
        return self.replicas * self.shard_positions

    @property
    def slots(self) -> int:
        """The number of nodes of the whole job."""
        return self.ranks // self.ranks_per_node

    @property
    def fewest(self) -> int:
        """The number of replicas below which the job waits."""
        return self.min_replicas or self.replicas

    @property
    def block_replicas(self) -> int:
        """A job shrinks and grows by blocks: the fewest whole replicas that fill whole nodes."""
        return math.lcm(self.shard_positions, self.ranks_per_node) // self.shard_positions

    @property
    def block_slots(self) -> int:
        """The nodes of a block."""
        return math.lcm(self.shard_positions, self.ranks_per_node) // self.ranks_per_node

    @property
    def blocks(self) -> int:
        """How many blocks the whole job has."""
        return self.slots // self.block_slots

    def rank(self, slot: int, local_rank: int) -> int:
        """The rank of a slot's local rank: fixed for the whole job."""
        return slot * self.ranks_per_node + local_rank

    def shard_position(self, rank: int) -> int:
        """Which part of the model a rank holds."""
        return rank % self.shard_positions

    def replica(self, rank: int) -> int:
        """Which replica a rank belongs to."""
        return rank // self.shard_positions


@dataclass(frozen=True, slots=True)
class Job:
    """``jobs/<job>/spec``: the submission, and what an operator wants of the job since."""

    spec: JobSpec = JobSpec()
    spec_revision: int = 0
    stop: str = ""
    submitted_ns: int = 0
    request_id: str = ""
    recovery_paused: str = ""
    wanted_replicas: int = 0

    @property
    def wanted(self) -> int:
        """How many replicas are to run when there are nodes for them."""
        return self.wanted_replicas or self.spec.replicas


class JobState(IntEnum):
    """What has become of a job."""

    STATE_UNSPECIFIED = 0
    WAITING = 1
    STARTING = 2
    RUNNING = 3
    RECOVERING = 4
    FINISHED = 5
    STOPPED = 6
    FAILED = 7
    LOST = 8

    @property
    def ended(self) -> bool:
        """Whether nothing will happen to the job any more."""
        return self in (JobState.FINISHED, JobState.STOPPED, JobState.FAILED, JobState.LOST)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """``jobs/<job>/status``: the job's state and why."""

    state: JobState = JobState.STATE_UNSPECIFIED
    reason: str = ""
    replicas: int = 0
    step: int = 0
    generation: int = 0
    digests: tuple[str, ...] = ()
    held: str = ""
