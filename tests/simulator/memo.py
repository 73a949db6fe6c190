# SPDX-License-Identifier: Apache-2.0
"""The agents' reading of one record for all of them: thousands read the same generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from google.protobuf.message import Message

from coordinator.model import from_record
from coordinator.store import KeyValue, decode
from workerd.agent import orders

_AT_MOST = 20_000  # records that are remembered


@contextmanager
def decoded_once() -> Iterator[None]:
    """In the block, ``workerd.agent.orders`` decodes the same bytes once, by its own functions."""
    messages: dict[tuple[type[Message], bytes], Message] = {}
    values: dict[tuple[Any, int], Any] = {}

    def decode_once(cls: type[Message], source: KeyValue) -> Message:
        known = messages.get((cls, source.value))
        if known is None:
            if len(messages) >= _AT_MOST:
                messages.clear()
                values.clear()
            known = messages[cls, source.value] = decode(cls, source)
        return known

    def convert_once(cls: Callable[..., Any], record: Message) -> Any:
        # By identity: the record stands in `messages` for as long as its value stands here.
        key = (cls, id(record))
        known = values.get(key)
        if known is None:
            known = values[key] = from_record(cls, record)
        return known

    with patch.multiple(orders, decode=decode_once, from_record=convert_once):
        yield
