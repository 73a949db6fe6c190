# SPDX-License-Identifier: Apache-2.0
"""How long things take in a simulated cluster: seconds, all of them assumptions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """The whole of what the simulator assumes about machines and scripts.

    ``build`` and ``join`` follow what was measured at 8,192 GPUs (TrainMover, 2024: 1.8 minutes
    of warm-up, 1.6 of loading, 1.1 of NCCL's start); a hot spare has the former behind it.
    """

    step: float = 6.0
    """One optimizer step. In shares of it: """
    reduced: float = 0.80
    """until the gradients are reduced,"""
    agreed: float = 0.85
    """until every rank has agreed to the update,"""
    skew: float = 0.05
    """how much later than others a rank may come to know either,"""
    update: float = 0.03
    """and the update."""
    connect: float = 3.0
    """From a process' start to its first word."""
    build: float = 110.0
    """From there until the script has all that needs no group."""
    stop: float = 0.05
    """From PAUSE to a trainer's answer, at most, besides an update that must end first."""
    repeat: float = 0.02
    """For a rank that has the state, from RESTORE to its word."""
    pull: float = 8.0
    """A rank's whole state, from another one's memory."""
    join: float = 5.0
    """The new group, once all are there."""
    notice: float = 0.3
    """Until the neighbours of an ended process see it, at most."""
    message: float = 0.001
    """Over a local socket."""
    reach: float = 0.002
    """To etcd and back, without its own time."""
    ask: float = 0.005
    """To a node and back."""
    turn: float = 0.002
    """From an event to workerd's decision."""
    lead: float = 0.02
    """A turn of the leader,"""
    lead_node: float = 0.00002
    """and for each node of the cluster besides."""
