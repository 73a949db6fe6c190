# SPDX-License-Identifier: Apache-2.0
"""One record is read once, however many read it, and what was just written isn't parsed.

Thousands of agents read the same generation, and a leader reads what thousands write; in one
process both would be the same work again and again. The functions that do it are production's; that
a value comes out of its bytes as it went in is tested elsewhere (``tests/property/model``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from google.protobuf.message import Message

from coordinator.controller import records
from coordinator.model import Ack, Node, Progress, to_record
from coordinator.store import KeyKind, KeyValue, decode_value, encode
from workerd.agent import desk, orders

_AT_MOST = 20_000  # records that are remembered
_WRITTEN = {KeyKind.NODE: Node, KeyKind.ACK: Ack, KeyKind.PROGRESS: Progress}


class _Memo:
    def __init__(self) -> None:
        self._load = records.load
        self._values: dict[tuple[type[Message], bytes], Any] = {}
        self._dumped: dict[bytes, Any] = {}
        self._from: tuple[Message, Any] | None = None

    # ---- reading

    def decode_value(self, value: Callable[..., Any], cls: type[Message], source: KeyValue) -> Any:
        known = self._values.get((cls, source.value))
        if known is None:
            if len(self._values) >= _AT_MOST:
                self._values.clear()
            known = self._values[cls, source.value] = decode_value(value, cls, source)
        return known

    # ---- what an agent writes, for the leader

    def to_record(self, value: Any, record: Message) -> Message:
        self._from = (record, value)
        return to_record(value, record)

    def encode(self, message: Message) -> bytes:
        raw = encode(message)
        if self._from is not None and self._from[0] is message:
            if len(self._dumped) >= _AT_MOST:
                self._dumped.clear()
            self._dumped[raw] = self._from[1]
        return raw

    def load(self, kind: KeyKind, source: KeyValue) -> Any:
        known = self._dumped.get(source.value)
        return known if type(known) is _WRITTEN.get(kind) else self._load(kind, source)


@contextmanager
def decoded_once() -> Iterator[None]:
    """In the block."""
    memo = _Memo()
    with (
        patch.object(orders, "decode_value", memo.decode_value),
        patch.multiple(desk, encode=memo.encode, to_record=memo.to_record),
        patch.object(records, "load", memo.load),
    ):
        yield
