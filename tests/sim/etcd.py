# SPDX-License-Identifier: Apache-2.0
"""An etcd as an immutable value: revisions, guarded transactions, leases. No watches: whoever
wants to know reads, at one revision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from coordinator.controller.records import dump, load
from coordinator.store import Guard, KeyKind, KeyValue, ParsedKey, Put, Write, keys
from coordinator.store.values import holds


@dataclass(frozen=True, slots=True)
class Lease:
    """Who a lease was granted to."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Etcd:
    """All keys and leases at one revision."""

    revision: int = 1
    items: Mapping[str, KeyValue] = field(default_factory=dict)
    leases: Mapping[int, Lease] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The frozen value that a key holds; None when it is absent."""
        found = self.items.get(key)
        return None if found is None else value(key, found.value)

    def mod_revision(self, key: str) -> int:
        """The revision of the key's last change; 0 when it is absent."""
        found = self.items.get(key)
        return 0 if found is None else found.mod_revision

    def created(self, key: str) -> int:
        """The revision at which the key came to be; 0 when it is absent."""
        found = self.items.get(key)
        return 0 if found is None else found.create_revision

    def commit(self, guards: Iterable[Guard], writes: Iterable[Write]) -> Etcd | None:
        """Carry out a transaction; None when a guard doesn't hold."""
        if not all(holds(guard, self.items.get(guard.key)) for guard in guards):
            return None
        revision = self.revision + 1
        items = dict(self.items)
        for write in writes:
            before = items.get(write.key)
            if isinstance(write, Put):
                created = before.create_revision if before else revision
                items[write.key] = KeyValue(write.key, write.value, created, revision, write.lease)
            elif before is not None:
                del items[write.key]
        return Etcd(revision, items, self.leases)

    def grant(self, lease: Lease) -> tuple[Etcd, int]:
        """A new lease and its id."""
        number = self.revision + 1
        return Etcd(number, self.items, {**self.leases, number: lease}), number

    def expire(self, lease: int) -> Etcd:
        """End a lease with its keys."""
        items = {key: one for key, one in self.items.items() if one.lease != lease}
        leases = {number: one for number, one in self.leases.items() if number != lease}
        return Etcd(self.revision + 1, items, leases)


@cache
def parsed(key: str) -> ParsedKey:
    """What a key is about."""
    return keys.parse(key)


@lru_cache(maxsize=100_000)
def _loaded(kind: KeyKind, raw: bytes) -> Any:
    return load(kind, KeyValue("", raw, 0, 0, 0))


def value(key: str, raw: bytes) -> Any:
    """The frozen value of a key's bytes."""
    return _loaded(parsed(key).kind, raw)


def put(key: str, record: Any, lease: int = 0) -> Put:
    """A write of a frozen value."""
    return Put(key, _dumped(record), lease)


@lru_cache(maxsize=100_000)
def _dumped(record: Any) -> bytes:
    return dump(record)
