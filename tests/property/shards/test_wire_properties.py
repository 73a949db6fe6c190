# SPDX-License-Identifier: Apache-2.0
"""Bytes cut into messages anywhere arrive whole."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workerd.shards.checksum import BLOCK
from workerd.shards.memory import Writer, checksum


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0, 1, 5, 100, BLOCK // 4, BLOCK // 4 + 1, 9000]), max_size=6),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_messages_may_be_cut_anywhere(lengths: list[int], strided: bool, seed: int) -> None:
    draw = random.Random(seed)
    sources, writers, targets = [], [], []
    for length in lengths:
        data = bytearray(draw.randbytes(length * 4))
        sources.append(torch.frombuffer(data, dtype=torch.int32) if data else torch.empty(0))
        target = (
            torch.zeros(length, 2, dtype=torch.int32)[:, 0]
            if strided
            else (torch.zeros(length, dtype=torch.int32))
        )
        targets.append(target)
        writers.append(Writer(target))
    stream = b"".join(bytes(s.view(torch.uint8).tolist()) for s in sources if s.numel())
    message, taken, start = b"", 0, 0
    for writer in writers:
        while writer.filled < writer.size:
            if taken == len(message):
                end = start + draw.randint(1, 2 * BLOCK)
                message, taken, start = stream[start:end], 0, end
            taken += writer.write(message, taken)
    for source, target, writer in zip(sources, targets, writers, strict=True):
        if source.numel():
            assert torch.equal(source, target)
            assert writer.finish() == checksum(source)
