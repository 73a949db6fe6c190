# SPDX-License-Identifier: Apache-2.0
"""Bytes that arrive in pieces cut anywhere are whole in the end."""

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
def test_pieces_may_be_cut_anywhere(lengths: list[int], strided: bool, seed: int) -> None:
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
    for writer in writers:
        while writer.filled < writer.size:
            space = writer.space()
            size = draw.randint(1, min(len(space), 2 * BLOCK))
            space[:size] = stream[:size]
            stream = stream[size:]
            writer.taken(size)
    for source, target, writer in zip(sources, targets, writers, strict=True):
        if source.numel():
            assert torch.equal(source, target)
            assert writer.finish() == checksum(source)
