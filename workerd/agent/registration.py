# SPDX-License-Identifier: Apache-2.0
"""How a node comes into etcd: its key, under its own lease, as one incarnation among all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.model import Node, NodeFlags, to_record
from coordinator.store import (
    Absent,
    Created,
    Guard,
    GuardFailed,
    Lease,
    LeaseEvent,
    Put,
    Store,
    StoreError,
    Unchanged,
    decode_value,
    encode,
    keys,
)
from protos import node_pb2


@dataclass(frozen=True, slots=True)
class Registered:
    """The node key is there. Every later write is guarded by ``create_revision``."""

    lease: Lease
    create_revision: int
    record: Node


@dataclass(frozen=True, slots=True)
class Occupied:
    """Another workerd has this node id, or had it: its lease still has ``seconds`` to live."""

    incarnation: str
    control_address: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Dead:
    """The leader has recorded this incarnation dead: it never lives again."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Something changed between looking and writing: try again at once."""


Outcome: TypeAlias = Registered | Occupied | Dead | Overtaken


def register(
    store: Store,
    record: Node,
    ttl: float,
    sink: Callable[[LeaseEvent], None],
    own: Collection[str],
) -> Outcome:
    """Try once to register ``record`` under a new lease of ``ttl`` seconds.

    ``own`` are the incarnations of this very process: what is left of them may be taken over.
    The transaction is guarded by the flags not having changed, so that no incarnation comes back
    while it is being recorded dead (rule 13). Raises StoreError; then nothing is held.
    """
    node_key, flags_key = keys.node(record.node), keys.flags(record.node)
    seen = store.read([node_key, flags_key]).items
    flags = NodeFlags()
    guards: list[Guard] = []
    if flags_key in seen:
        flags = decode_value(NodeFlags, node_pb2.NodeFlags, seen[flags_key])
        guards.append(Unchanged(flags_key, seen[flags_key].mod_revision))
    else:
        guards.append(Absent(flags_key))
    if flags.is_dead(record.incarnation):
        return Dead()
    if node_key in seen:
        before = decode_value(Node, node_pb2.Node, seen[node_key])
        if before.incarnation not in own:
            left = store.time_to_live(seen[node_key].lease) if seen[node_key].lease else 0
            return Occupied(before.incarnation, before.control_address, max(0.0, left))
        guards.append(Created(node_key, seen[node_key].create_revision))
    else:
        guards.append(Absent(node_key))

    lease = store.lease(ttl, sink)
    try:
        put = Put(node_key, encode(to_record(record, node_pb2.Node())), lease.id)
        revision = store.commit(guards, [put])
    except GuardFailed:
        lease.close(revoke=True)
        return Overtaken()
    except StoreError:
        # If it was carried out after all, this takes it back, or the next try finds its own.
        lease.close(revoke=True)
        raise
    created = seen[node_key].create_revision if node_key in seen else revision
    return Registered(lease, created, record)
