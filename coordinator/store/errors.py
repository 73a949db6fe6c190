# SPDX-License-Identifier: Apache-2.0
"""Everything that the store raises, and the one place where gRPC's codes are translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc

from coordinator.store.values import Guard, KeyValue


class StoreError(Exception):
    """The base of everything that the store raises."""


class StoreUnavailable(StoreError):
    """etcd could not be reached, or could not answer for now.

    ``outcome_unknown``: the request may have been carried out nevertheless. Only a write sets it.
    A write whose guards include what the write itself changes may be repeated as it is: if the
    first one went through, the second one fails with :class:`GuardFailed`.
    """

    def __init__(
        self, message: str, *, outcome_unknown: bool = False, retryable: bool = True
    ) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown
        self.retryable = retryable


class StoreTimeout(StoreUnavailable):
    """No answer within the deadline."""


class GuardFailed(StoreError):
    """Guards of a transaction did not hold; nothing was written.

    ``failed`` are those guards; ``current`` is what every guarded key was at ``revision``, None
    where it did not exist. They were read in the same transaction, so they are exact.
    """

    def __init__(
        self,
        message: str,
        *,
        failed: Sequence[Guard],
        current: Mapping[str, KeyValue | None],
        revision: int,
    ) -> None:
        super().__init__(message)
        self.failed = tuple(failed)
        self.current = current
        self.revision = revision


class LeaseLost(StoreError):
    """A lease that the request names does not exist (any more)."""


class Compacted(StoreError):
    """The revision that was asked for is no longer kept: list again."""


class StoreAuthError(StoreError):
    """etcd refused the user, the password, the token or the user's rights.

    ``renewable``: a new token may help.
    """

    def __init__(self, message: str, *, renewable: bool = False) -> None:
        super().__init__(message)
        self.renewable = renewable


class StoreRequestError(StoreError):
    """The request itself is wrong: malformed, too large, too many operations."""


class InvalidKey(StoreError, ValueError):
    """A name that must not become part of a key."""


class RecordError(StoreError):
    """A value could not be read as the record that its key should hold."""


# etcd answers these before it proposes anything, and gRPC reports these when it had no connection
# to send on: the write was not carried out, and may be sent again.
_NOT_CARRIED_OUT = (
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: too many requests",
    "failed to connect to all addresses",
    "connections to all backends failing",
)
_AUTH = (
    "etcdserver: user name is empty",
    "etcdserver: authentication failed",
    "etcdserver: revision of auth store is old",
    "etcdserver: invalid auth token",
    "etcdserver: authentication is not enabled",
)
_AUTH_RENEWABLE = (
    "etcdserver: user name is empty",
    "etcdserver: revision of auth store is old",
    "etcdserver: invalid auth token",
)


def translate(
    error: grpc.RpcError, *, endpoints: str, operation: str, key: str, write: bool = False
) -> StoreError:
    """Return the typed error for ``error``.

    ``write``: the request changes something, so that a lost answer leaves its outcome unknown.
    """
    raised: object = error
    code, details = grpc.StatusCode.UNKNOWN, str(error)
    if isinstance(raised, grpc.Call):  # all that gRPC itself raises are both
        code, details = raised.code(), raised.details() or ""
    subject = f" {key!r}" if key else ""
    text = f"etcd {endpoints}: {operation}{subject}: {code.name}: {details or 'no details'}"
    return _typed(code, details, text, write=write)


def _typed(code: grpc.StatusCode, details: str, text: str, *, write: bool) -> StoreError:
    status = grpc.StatusCode
    if code in (status.UNAUTHENTICATED, status.PERMISSION_DENIED) or details.startswith(_AUTH):
        renewable = code is status.UNAUTHENTICATED or details.startswith(_AUTH_RENEWABLE)
        return StoreAuthError(text, renewable=renewable)
    if code is status.DEADLINE_EXCEEDED:
        return StoreTimeout(text, outcome_unknown=write)
    if code is status.OUT_OF_RANGE and "compacted" in details:
        return Compacted(text)
    if code is status.NOT_FOUND and "lease not found" in details:
        return LeaseLost(text)
    if code is status.RESOURCE_EXHAUSTED and "space exceeded" in details:
        return StoreUnavailable(text, retryable=False)
    if code is status.RESOURCE_EXHAUSTED and "too many requests" in details:
        return StoreUnavailable(text)
    if code in _REQUEST_CODES:
        return StoreRequestError(text)
    if code is status.DATA_LOSS:
        return StoreError(text)
    # UNAVAILABLE, CANCELLED, ABORTED, INTERNAL, UNKNOWN: etcd or the way to it is in trouble.
    unsent = any(reason in details for reason in _NOT_CARRIED_OUT)
    return StoreUnavailable(text, outcome_unknown=write and not unsent)


_REQUEST_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
