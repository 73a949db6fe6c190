# SPDX-License-Identifier: Apache-2.0
"""Nodes and their trainers; the fields are those of ``protos/node.proto``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class DeviceKind(IntEnum):
    """What kind of device a trainer runs on."""

    KIND_UNSPECIFIED = 0
    CPU = 1
    CUDA = 2


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node: a trainer runs on exactly one."""

    kind: DeviceKind = DeviceKind.KIND_UNSPECIFIED
    index: int = 0
    name: str = ""
    memory_bytes: int = 0


class FailureClass(IntEnum):
    """What kind of failure ended a trainer; unspecified when workerd ended it."""

    CLASS_UNSPECIFIED = 0
    SOFTWARE = 1
    HOST = 2
    DEVICE = 3
    NETWORK = 4
    UNKNOWN = 5


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """How a trainer process ended: ``signal`` is 0 when it exited by itself."""

    code: int = 0
    signal: int = 0
    message: str = ""
    failure_class: FailureClass = FailureClass.CLASS_UNSPECIFIED
    cause: str = ""
    traceback: str = ""
    core: str = ""
    step: int = 0


class TrainerState(IntEnum):
    """Where one trainer process stands."""

    STATE_UNSPECIFIED = 0
    STARTING = 1
    WARM = 2
    PLACED = 3
    ENDED = 4


@dataclass(frozen=True, slots=True)
class Trainer:
    """One life of one trainer process."""

    instance: str = ""
    local_rank: int = 0
    state: TrainerState = TrainerState.STATE_UNSPECIFIED
    job: str = ""
    spec_revision: int = 0
    since: int = 0
    exit: TrainerExit | None = None


@dataclass(frozen=True, slots=True)
class Warm:
    """What all trainers of a spare are warm for."""

    job: str = ""
    spec_revision: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """What a node registers of itself under its lease."""

    node: str = ""
    incarnation: str = ""
    boot_id: str = ""
    version: str = ""
    control_address: str = ""
    data_address: str = ""
    devices: tuple[Device, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    unhealthy: str = ""
    trainers: tuple[Trainer, ...] = ()
    warm: Warm | None = None


@dataclass(frozen=True, slots=True)
class DeadIncarnation:
    """An incarnation that never lives again, and why; ``time_ns`` is wall-clock, for people."""

    incarnation: str = ""
    reason: str = ""
    time_ns: int = 0


@dataclass(frozen=True, slots=True)
class NodeFlags:
    """What the leader holds against a node; each mark is its reason, empty when not set."""

    dead: tuple[DeadIncarnation, ...] = ()
    cordoned: str = ""
    draining: str = ""
    quarantined: str = ""
    replacing: str = ""

    def is_dead(self, incarnation: str) -> bool:
        """Whether this incarnation has been recorded dead."""
        return any(one.incarnation == incarnation for one in self.dead)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node's one place over all jobs."""

    node: str = ""
    incarnation: str = ""
    job: str = ""
    slot: int = 0
    generation: int = 0
    control_address: str = ""


@dataclass(frozen=True, slots=True)
class SpareAssignment:
    """What a node without a slot is to be warm for."""

    node: str = ""
    job: str = ""
    spec_revision: int = 0
