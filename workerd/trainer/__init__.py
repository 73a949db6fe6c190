# SPDX-License-Identifier: Apache-2.0
"""What a training script imports: `join`, and the `Job` that it answers."""

from workerd.trainer.attempt import Overhead
from workerd.trainer.errors import (
    LinkLost,
    MisuseError,
    Refused,
    ReplicasDiffer,
    TrainerError,
)
from workerd.trainer.job import Job, join

__all__ = [
    "Job",
    "LinkLost",
    "MisuseError",
    "Overhead",
    "Refused",
    "ReplicasDiffer",
    "TrainerError",
    "join",
]
