# SPDX-License-Identifier: Apache-2.0
"""The settings that decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds, all of them but ``disruption``, which is a share."""

    lease_ttl: float = 5.0
    """A node's and a leader's lease. After an outage of etcd no node is declared dead for this
    and ``election_timeout`` together."""

    election_timeout: float = 1.0
    """etcd's own; see ``lease_ttl``."""

    probe: float = 1.0
    """How long a suspected node may take to answer a direct probe."""

    ping: float = 0.5
    """Between two pings of a node with a place, and how long it may take to answer one, to accept
    a new connection and to say who it is; a witness may take twice as long."""

    disruption: float = 0.25
    """The disruption budget: the share of the nodes, though at least one, that may be declared dead
    within ``lease_ttl`` before their leases end. When more don't answer, their leases decide."""

    start: float = 300.0
    """How long a node may take to start the trainers of a slot."""

    pause: float = 15.0
    """How long an owner that holds state may take to acknowledge a PAUSE."""

    restore: float = 300.0
    """How long an owner may take to hold the resume step's state and join."""

    progress: float = 600.0
    """A RUNNING job that commits no step for this long is paused, to find who doesn't answer."""

    hang: float = 180.0
    """A RUNNING job that stands still for this long, and for ten usual steps, is hung: the rank
    that the others wait for is replaced."""

    hang_max: float = 600.0
    """Upper bound of those ten steps, and what counts until a job's usual step is known."""

    regroup: float = 0.25
    """How long a broken group waits for a culprit to show before it is rebuilt with everybody;
    doubled for each such generation in a row."""

    regroup_max: float = 30.0
    """Upper bound of that doubling."""

    restart: float = 1.0
    """Before a trainer that has ended is started again on its node, if that is not the first try
    of an incident; doubled for each further one."""

    restart_max: float = 60.0
    """Upper bound of that doubling."""

    status: float = 1.0
    """A job's step is written to its status at most once in this time."""
