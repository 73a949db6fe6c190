# SPDX-License-Identifier: Apache-2.0
"""What the SDK raises, and the two signals by which it leaves a script's own code."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of what the SDK raises into a training script."""


class MisuseError(TrainerError):
    """The script calls the SDK in a way that cannot be carried out; the message says how to."""


class LinkLost(TrainerError):
    """workerd is gone, and this trainer cannot go on without it."""


class Refused(TrainerError):
    """This process cannot take part in the job any more and ends. Says why."""


class ReplicasDiffer(TrainerError):
    """This rank and rank 0 disagree on what must be equal. Names it."""


class GroupBroken(TrainerError):
    """A collective of the current group has failed. Never leaves the SDK."""


class RepeatStep(BaseException):
    """Leaves an attempt that is to be repeated; `attempt` swallows it.

    No Exception, so that a script's `except Exception` does not stop it on its way.
    """


class Released(BaseException):
    """The job has ended while this trainer waited; `join` swallows it."""
