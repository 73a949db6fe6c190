# SPDX-License-Identifier: Apache-2.0
"""What the service answers when it can't do what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from coordinator.admin.history import InTheFuture, NotKept
from coordinator.store import (
    Compacted,
    InvalidKey,
    RecordError,
    StoreError,
    StoreUnavailable,
)

_Code = grpc.StatusCode


class Refused(Exception):
    """A call is answered with a status code and a message for the operator."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what the store raises into :class:`Refused`."""
    try:
        yield
    except StoreError as error:
        raise Refused(_code(error), str(error)) from error


def _code(error: StoreError) -> grpc.StatusCode:
    match error:
        case StoreUnavailable():
            return _Code.UNAVAILABLE
        case Compacted() | NotKept() | InTheFuture():
            return _Code.OUT_OF_RANGE
        case InvalidKey():
            return _Code.INVALID_ARGUMENT
        case RecordError():
            return _Code.DATA_LOSS
        case _:
            return _Code.INTERNAL
