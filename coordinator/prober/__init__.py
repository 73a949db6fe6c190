# SPDX-License-Identifier: Apache-2.0
"""Asks nodes directly whether they live: those with a place all the time, suspects once more.

The only place with asyncio: one loop on one thread holds thousands of connections. It decides
nothing; what it sees goes as a :class:`Probed`, :class:`Contacted` or :class:`Witnessed` into its
owner's queue.
"""

from coordinator.prober.prober import Prober
from coordinator.prober.said import Contacted, Probed, Witnessed

__all__ = ["Contacted", "Probed", "Prober", "Witnessed"]
