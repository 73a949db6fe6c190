# SPDX-License-Identifier: Apache-2.0
"""Between the store's values and etcd's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.store import keys
from coordinator.store.errors import StoreRequestError
from coordinator.store.values import Absent, Created, Guard, KeyValue, Put, Write
from protos.etcd import kv_pb2, rpc_pb2

# etcd's default for --max-txn-ops: of compares, and of operations in each branch.
MAX_OPERATIONS = 128


def key_value(key: str, kv: kv_pb2.KeyValue) -> KeyValue:
    """Return etcd's key-value under the relative ``key``."""
    return KeyValue(key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def span(key: bytes) -> tuple[bytes, bytes]:
    """Return etcd's start and end of a range: all below a prefix ending in ``/``, else one key."""
    return (key, keys.prefix_end(key)) if key.endswith(b"/") else (key, b"")


def build(
    full: Callable[[str], bytes], guards: Sequence[Guard], writes: Sequence[Write]
) -> tuple[rpc_pb2.TxnRequest, list[str]]:
    """Return the transaction, and the keys that its failure branch reads, each once.

    Raises :class:`StoreRequestError` for more than etcd takes.
    """
    for what, count in (("guards", len(guards)), ("writes", len(writes))):
        if count > MAX_OPERATIONS:
            raise StoreRequestError(
                f"{count} {what} in one transaction: etcd takes at most {MAX_OPERATIONS}"
            )
    guarded = list(dict.fromkeys(guard.key for guard in guards))
    request = rpc_pb2.TxnRequest(
        compare=[_compare(full(guard.key), guard) for guard in guards],
        success=[_operation(full(write.key), write) for write in writes],
        failure=[
            rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=full(key))) for key in guarded
        ],
    )
    return request, guarded


def _compare(key: bytes, guard: Guard) -> rpc_pb2.Compare:
    if isinstance(guard, Absent | Created):
        revision = 0 if isinstance(guard, Absent) else guard.create_revision
        return rpc_pb2.Compare(
            result=rpc_pb2.Compare.EQUAL,
            target=rpc_pb2.Compare.CREATE,
            key=key,
            create_revision=revision,
        )
    return rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL,
        target=rpc_pb2.Compare.MOD,
        key=key,
        mod_revision=guard.mod_revision,
    )


def _operation(key: bytes, write: Write) -> rpc_pb2.RequestOp:
    if isinstance(write, Put):
        put = rpc_pb2.PutRequest(key=key, value=write.value, lease=write.lease)
        return rpc_pb2.RequestOp(request_put=put)
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
