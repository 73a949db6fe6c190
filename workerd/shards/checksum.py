# SPDX-License-Identifier: Apache-2.0
"""The checksum of a tensor's bytes, the same on every device.

Every full block of 8 KiB gives two fingerprints: the sum, modulo 2**64, of its little-endian
64-bit words times fixed pseudo-random odd weights, and the same sum over the words that start
four bytes later. The fingerprints, the bytes after the last full block and the length go, in
order, through BLAKE2b. So the arithmetic runs at memory speed wherever the tensor lies, and only a
512th of the bytes is hashed on the host.

What it misses: a changed block whose fingerprints both stay. A difference whose words are not all
multiples of 2**32 passes the first sum with a probability of at most 2**-32; one whose words are
passes the second sum (there they are below 2**32) with at most 2**-32, and never if only one word
changed. Blocks that trade places, are lost or repeated change the BLAKE2b input itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Final

import torch

BLOCK: Final = 8192
_WORDS: Final = BLOCK // 8
_PERSON: Final = b"hotspare shard 1"
# More than this at once would not stay in a core's cache between the two sums; on a device it
# bounds the memory that the products take.
_HOST_STEP: Final = 2 << 20
DEVICE_STEP: Final = 16 << 20


def _draw_weights() -> torch.Tensor:
    drawn = bytearray(hashlib.shake_128(_PERSON).digest(BLOCK))
    return torch.frombuffer(drawn, dtype=torch.int64) | 1


_weights: dict[torch.device, torch.Tensor] = {torch.device("cpu"): _draw_weights()}


def _weights_on(device: torch.device) -> torch.Tensor:
    held = _weights.get(device)
    if held is None:
        held = _weights[device] = _weights[torch.device("cpu")].to(device)
    return held


class Checksum:
    """Takes the bytes of one tensor in order.

    Every `update` but the last one is of a multiple of BLOCK bytes.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16, person=_PERSON)
        self._tail = b""
        self._length = 0

    def update(self, piece: torch.Tensor) -> None:
        """Add a flat, contiguous uint8 tensor, whose bytes don't change during the call."""
        if self._tail:
            raise ValueError("bytes after a block that was not full")
        size = piece.numel()
        self._length += size
        full = size - size % BLOCK
        if piece.device.type == "cpu":
            # A view as int64 would need an aligned offset; the memory itself does not.
            address = piece.data_ptr()
            for start in range(0, full, _HOST_STEP):
                step = min(_HOST_STEP, full - start)
                self._hash.update(_on_host(address + start, step))
        else:
            for start in range(0, full, DEVICE_STEP):
                step = min(DEVICE_STEP, full - start)
                self._hash.update(_on_device(piece[start : start + step]))
        if full < size:
            self._tail = raw_bytes(piece[full:])

    def update_at(self, address: int, size: int) -> None:
        """Add `size` bytes of host memory, a multiple of BLOCK."""
        self._length += size
        self._hash.update(_on_host(address, size))

    def finish(self) -> str:
        """The checksum of all bytes so far, in hexadecimal."""
        self._hash.update(self._tail)
        self._hash.update(self._length.to_bytes(8, "little"))
        return self._hash.hexdigest()


def raw_bytes(flat: torch.Tensor) -> bytes:
    """A copy of a flat uint8 tensor's bytes."""
    host = flat.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel()) if host.numel() else b""


def _on_host(address: int, size: int) -> bytes:
    blocks = size // BLOCK
    memory = (ctypes.c_char * size).from_address(address)
    weights = _weights_on(torch.device("cpu"))
    words = torch.frombuffer(memory, dtype=torch.int64)
    later = torch.frombuffer(memory, dtype=torch.int64, offset=4, count=blocks * _WORDS - 1)
    sums = torch.empty((2, blocks), dtype=torch.int64, device="cpu")
    torch.mv(words.view(blocks, _WORDS), weights, out=sums[0])
    torch.mv(
        later.as_strided((blocks, _WORDS - 1), (_WORDS, 1)), weights[: _WORDS - 1], out=sums[1]
    )
    interleaved = sums.t().contiguous()
    return ctypes.string_at(interleaved.data_ptr(), blocks * 16)


def _on_device(flat: torch.Tensor) -> bytes:
    if flat.data_ptr() % 8:
        flat = flat.clone()
    weights = _weights_on(flat.device)
    words = flat.view(torch.int64).view(-1, _WORDS)
    first = (words * weights).sum(1)
    later = ((words[:, :-1] >> 32) & 0xFFFFFFFF) | (words[:, 1:] << 32)
    second = (later.mul_(weights[: _WORDS - 1])).sum(1)
    return raw_bytes(torch.stack((first, second), 1).view(torch.uint8).view(-1))
