# SPDX-License-Identifier: Apache-2.0
"""What goes into the store and comes out of it. Keys are relative to the cluster's prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it stood at one revision of the store.

    ``create_revision`` is the revision at which the key came to be, ``mod_revision`` that of its
    last change; ``lease`` is the id of the lease that the key ends with, 0 for none.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keys as they all stood at ``revision``. A key that is missing did not exist then."""

    revision: int
    items: Mapping[str, KeyValue]


@dataclass(frozen=True, slots=True)
class Absent:
    """Holds while the key does not exist."""

    key: str


@dataclass(frozen=True, slots=True)
class Created:
    """Holds while the key is the one created at ``create_revision``, whatever its value is.

    The fence: the key of a deposed leader or of an earlier incarnation has another one.
    """

    key: str
    create_revision: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while the key was last changed at ``mod_revision``."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Sets a key. With ``lease`` 0 the key stays until it is deleted, and leaves its lease."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key; one that does not exist is no error."""

    key: str


Guard = Absent | Created | Unchanged
Write = Put | Delete


def holds(guard: Guard, current: KeyValue | None) -> bool:
    """Whether ``guard`` holds while its key is ``current`` (None: does not exist)."""
    if isinstance(guard, Absent):
        return current is None
    # As etcd compares: a key that does not exist has revision 0.
    if isinstance(guard, Created):
        return guard.create_revision == (current.create_revision if current else 0)
    return guard.mod_revision == (current.mod_revision if current else 0)
