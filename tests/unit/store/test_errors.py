# SPDX-License-Identifier: Apache-2.0
"""Every gRPC code becomes a typed error whose text says where, what and on which key."""

from __future__ import annotations

import grpc
import pytest

from coordinator.store.errors import (
    Compacted,
    LeaseLost,
    StoreAuthError,
    StoreError,
    StoreRequestError,
    StoreTimeout,
    StoreUnavailable,
    translate,
)
from coordinator.store.values import Absent, Created, Guard, KeyValue, Unchanged, holds

STATUS = grpc.StatusCode


class Failed(grpc.RpcError, grpc.Call):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def _nothing(self, *_: object) -> None: ...

    add_callback = cancel = initial_metadata = is_active = _nothing  # type: ignore[assignment]
    time_remaining = trailing_metadata = _nothing  # type: ignore[assignment]


def typed(code: grpc.StatusCode, details: str, *, write: bool = False) -> StoreError:
    return translate(
        Failed(code, details), endpoints="a:1,b:2", operation="read", key="nodes/x", write=write
    )


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_every_code_is_typed_and_named(code: grpc.StatusCode) -> None:
    error = typed(code, "because")
    assert type(error) is not StoreError or code is STATUS.DATA_LOSS
    for part in ("a:1,b:2", "read", "'nodes/x'", code.name, "because"):
        assert part in str(error)


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (STATUS.UNAVAILABLE, "Socket closed", StoreUnavailable),
        (STATUS.CANCELLED, "", StoreUnavailable),
        (STATUS.INTERNAL, "", StoreUnavailable),
        (STATUS.UNKNOWN, "context canceled", StoreUnavailable),
        (STATUS.DEADLINE_EXCEEDED, "", StoreTimeout),
        (STATUS.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Compacted),
        (STATUS.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision",
         StoreRequestError),
        (STATUS.NOT_FOUND, "etcdserver: requested lease not found", LeaseLost),
        (STATUS.NOT_FOUND, "etcdserver: user name not found", StoreRequestError),
        (STATUS.PERMISSION_DENIED, "etcdserver: permission denied", StoreAuthError),
        (STATUS.UNAUTHENTICATED, "etcdserver: invalid auth token", StoreAuthError),
        (STATUS.INVALID_ARGUMENT, "etcdserver: user name is empty", StoreAuthError),
        (STATUS.INVALID_ARGUMENT, "etcdserver: request is too large", StoreRequestError),
        (STATUS.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", StoreUnavailable),
        (STATUS.RESOURCE_EXHAUSTED, "Received message larger than max", StoreRequestError),
    ],
)  # fmt: skip
def test_what_etcd_says(code: grpc.StatusCode, details: str, expected: type[StoreError]) -> None:
    assert type(typed(code, details)) is expected


def test_an_error_that_is_no_call_is_typed_too() -> None:
    error = translate(grpc.RpcError("odd"), endpoints="a:1", operation="list", key="")
    assert isinstance(error, StoreUnavailable)
    assert str(error) == "etcd a:1: list: UNKNOWN: odd"


@pytest.mark.parametrize(
    ("code", "details", "unknown"),
    [
        (STATUS.UNAVAILABLE, "failed to connect to all addresses; last error: refused", False),
        (STATUS.UNAVAILABLE, "connections to all backends failing; last error: x", False),
        (STATUS.UNAVAILABLE, "etcdserver: no leader", False),
        (STATUS.RESOURCE_EXHAUSTED, "etcdserver: too many requests", False),
        (STATUS.UNAVAILABLE, "etcdserver: request timed out", True),
        (STATUS.UNAVAILABLE, "etcdserver: leader changed", True),
        (STATUS.UNAVAILABLE, "recvmsg: Connection reset by peer", True),
        (STATUS.UNAVAILABLE, "something that this version has never heard of", True),
        (STATUS.DEADLINE_EXCEEDED, "Deadline Exceeded", True),
        (STATUS.CANCELLED, "Channel closed!", True),
    ],
)
def test_the_outcome_of_a_write_is_unknown_unless_it_was_certainly_not_carried_out(
    code: grpc.StatusCode, details: str, unknown: bool
) -> None:
    error = typed(code, details, write=True)
    assert isinstance(error, StoreUnavailable)
    assert error.outcome_unknown is unknown
    read = typed(code, details)
    assert isinstance(read, StoreUnavailable)
    assert not read.outcome_unknown


@pytest.mark.parametrize(
    ("guard", "missing", "present"),
    [
        (Absent("k"), True, False),
        (Created("k", 5), False, True),
        (Created("k", 6), False, False),
        (Unchanged("k", 7), False, True),
        (Unchanged("k", 5), False, False),
        (Unchanged("k", 0), True, False),
        (Created("k", 0), True, False),
    ],
)
def test_guards_hold_as_etcd_compares(guard: Guard, missing: bool, present: bool) -> None:
    assert holds(guard, None) is missing
    assert holds(guard, KeyValue("k", b"", 5, 7, 0)) is present
