# SPDX-License-Identifier: Apache-2.0
"""A whole cluster on one machine as separate processes: for the demo, the tests, the benchmarks."""

from coordinator.cli.localcluster.admin import Admin
from coordinator.cli.localcluster.cluster import LocalCluster
from coordinator.cli.localcluster.processes import ClusterError, Process, signals_interrupt

__all__ = ["Admin", "ClusterError", "LocalCluster", "Process", "signals_interrupt"]
