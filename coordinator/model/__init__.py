# SPDX-License-Identifier: Apache-2.0
"""Frozen values: what the cluster is, as decisions see it.

Every record of ``protos/`` has a dataclass of the same name and fields here, so that decisions
work on hashable, immutable values; :mod:`coordinator.model.convert` turns one into the other.
"""

from coordinator.model.convert import from_record, to_record
from coordinator.model.incident import Cause, Incident, IncidentMark, RankExit
from coordinator.model.job import Job, JobSpec, JobState, JobStatus
from coordinator.model.membership import (
    Ack,
    Generation,
    Leaver,
    Phase,
    Progress,
    Pull,
    RankAck,
    RankProgress,
    Rendezvous,
    Slot,
    SlotRank,
    Source,
    StepPhase,
)
from coordinator.model.node import (
    Assignment,
    DeadIncarnation,
    Device,
    DeviceKind,
    FailureClass,
    Node,
    NodeFlags,
    SpareAssignment,
    Trainer,
    TrainerExit,
    TrainerState,
    Warm,
)
from coordinator.model.settings import Settings
from coordinator.model.view import (
    Answer,
    ClusterView,
    Contact,
    JobView,
    Line,
    LiveNode,
    Statement,
    Suspect,
    Verdict,
)

__all__ = [
    "Ack",
    "Answer",
    "Assignment",
    "Cause",
    "ClusterView",
    "Contact",
    "DeadIncarnation",
    "Device",
    "DeviceKind",
    "FailureClass",
    "Generation",
    "Incident",
    "IncidentMark",
    "Job",
    "JobSpec",
    "JobState",
    "JobStatus",
    "JobView",
    "Leaver",
    "Line",
    "LiveNode",
    "Node",
    "NodeFlags",
    "Phase",
    "Progress",
    "Pull",
    "RankAck",
    "RankExit",
    "RankProgress",
    "Rendezvous",
    "Settings",
    "Slot",
    "SlotRank",
    "Source",
    "SpareAssignment",
    "Statement",
    "StepPhase",
    "Suspect",
    "Trainer",
    "TrainerExit",
    "TrainerState",
    "Verdict",
    "Warm",
    "from_record",
    "to_record",
]
