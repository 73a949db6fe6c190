# SPDX-License-Identifier: Apache-2.0
"""Random streams that depend on (job seed, step, rank) alone.

So a rank that takes another's place, and a step that is repeated, draw what would have been drawn.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys

import torch


def derive(seed: int, step: int, rank: int) -> int:
    """A seed of 63 bits for one step of one rank. Step and rank -1: for the job as a whole."""
    packed = struct.pack("<qqq", seed, step, rank)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"hotspare streams").digest()
    return int.from_bytes(digest, "little") >> 1


class Streams:
    """Seeds every generator that a script commonly draws from, and one of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.generator = torch.Generator(device)

    def seed(self, value: int) -> None:
        """Starts all streams anew from `value`."""
        torch.default_generator.manual_seed(value)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(value)
        self.generator.manual_seed(value)
        random.seed(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(value & 0xFFFFFFFF)
