# SPDX-License-Identifier: Apache-2.0
"""etcd for Hotspare: connection, watches, leases, election, guarded transactions, key layout.

The threads in here never act: they call the ``sink`` that they were given, which should only
put the event into its owner's queue. All times are seconds of :func:`time.monotonic`.

Two things are called ``LeaseLost``, so neither is exported here: the error of a write that names
a lease that etcd no longer has (:class:`coordinator.store.errors.LeaseLost`), and the event of a
lease that could not be kept (:class:`coordinator.store.lease.LeaseLost`).
"""

from coordinator.store.calls import Tls
from coordinator.store.codec import decode, decode_value, encode
from coordinator.store.connection import Store
from coordinator.store.election import Deposed, Elected, Election, ElectionEvent
from coordinator.store.errors import (
    Compacted,
    GuardFailed,
    InvalidKey,
    RecordError,
    StoreAuthError,
    StoreError,
    StoreRequestError,
    StoreTimeout,
    StoreUnavailable,
)
from coordinator.store.keys import KeyKind, ParsedKey
from coordinator.store.lease import Lease, LeaseDeadlinePassed, LeaseEvent, LeaseRenewed
from coordinator.store.values import (
    Absent,
    Created,
    Delete,
    Guard,
    KeyValue,
    Put,
    Snapshot,
    Unchanged,
    Write,
)
from coordinator.store.watch import (
    Change,
    Changed,
    Disconnected,
    Listed,
    Reconnected,
    Watch,
    WatchEvent,
)

__all__ = [
    "Absent",
    "Change",
    "Changed",
    "Compacted",
    "Created",
    "Delete",
    "Deposed",
    "Disconnected",
    "Elected",
    "Election",
    "ElectionEvent",
    "Guard",
    "GuardFailed",
    "InvalidKey",
    "KeyKind",
    "KeyValue",
    "Lease",
    "LeaseDeadlinePassed",
    "LeaseEvent",
    "LeaseRenewed",
    "Listed",
    "ParsedKey",
    "Put",
    "Reconnected",
    "RecordError",
    "Snapshot",
    "Store",
    "StoreAuthError",
    "StoreError",
    "StoreRequestError",
    "StoreTimeout",
    "StoreUnavailable",
    "Tls",
    "Unchanged",
    "Watch",
    "WatchEvent",
    "Write",
    "decode",
    "decode_value",
    "encode",
]
