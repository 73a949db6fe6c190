# SPDX-License-Identifier: Apache-2.0
"""A small GPT that reads bytes, and a text that every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
CONTEXT = 64
WIDTH = 384
HEADS = 6
LAYERS = 3


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer over (batch, time, width)."""
        batch, time, _ = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, WIDTH))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Predicts the next byte; 5.5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss over a batch of texts of CONTEXT + 1 bytes each."""
        seen, wanted = text[:, :-1], text[:, 1:]
        place = torch.arange(seen.shape[1], device=text.device)
        x = self.blocks(self.dropout(self.byte(seen) + self.place(place)))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class Corpus:
    """The sources of Python's standard library, one after the other."""

    def __init__(self, batch: int) -> None:
        """``batch``: texts a step, over all replicas."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self._text = torch.frombuffer(text, dtype=torch.uint8)
        self._batch = batch

    def batch(self, step: int, replica: int, replicas: int) -> Tensor:
        """A replica's part of a step's batch: always the same for the same arguments."""
        generator = torch.Generator().manual_seed(step)
        last = len(self._text) - CONTEXT - 1
        starts = torch.randint(last, (self._batch,), generator=generator)[replica::replicas]
        return torch.stack([self._text[one : one + CONTEXT + 1] for one in starts.tolist()]).long()
