# SPDX-License-Identifier: Apache-2.0
"""A tensor's bytes (its elements in C order) read and written in place, in bounded pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Final

import torch

from workerd.shards.checksum import DEVICE_STEP, Checksum

PIECE: Final = 2 << 20
"""Bytes staged at once where a tensor's memory cannot be used as it lies."""


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of all elements, however they lie in memory."""
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # A length of 1 may have any stride, which a view as bytes would not take.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _parts(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views that together are the tensor in C order, each of at most `limit` bytes."""
    if nbytes(tensor) <= limit:
        yield tensor
        return
    row = nbytes(tensor) // tensor.shape[0]
    if row > limit:
        for i in range(tensor.shape[0]):
            yield from _parts(tensor[i], limit)
        return
    rows = limit // row
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


def _runs(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The tensor's bytes in order: flat uint8 tensors on its device, of `limit` bytes but the last.

    What is yielded holds until the next one is asked for.
    """
    if tensor.is_contiguous():
        flat = _flat(tensor)
        for start in range(0, flat.numel(), limit):
            yield flat[start : start + limit]
        return
    scratch = torch.empty(2 * limit, dtype=torch.uint8, device=tensor.device)
    filled = 0
    for part in _parts(tensor.detach(), limit):
        size = nbytes(part)
        scratch[filled : filled + size].view(part.dtype).view(part.shape).copy_(part)
        filled += size
        if filled >= limit:
            yield scratch[:limit]
            rest = filled - limit
            scratch[:rest].copy_(scratch[limit:filled])
            filled = rest
    if filled:
        yield scratch[:filled]


def host_runs(tensor: torch.Tensor, limit: int) -> Iterator[memoryview]:
    """The tensor's bytes in order, readable on the host, each run `limit` long but the last.

    What is yielded holds until the next one is asked for; between two, nothing reads the tensor.
    One on a device comes through a pinned buffer of `limit` bytes.
    """
    if tensor.device.type == "cpu":
        for run in _runs(tensor, limit):
            yield host_view(run)
        return
    buffer = torch.empty(limit, dtype=torch.uint8, device="cpu", pin_memory=True)
    for run in _runs(tensor, limit):
        staged = buffer[: run.numel()]
        staged.copy_(run)
        yield host_view(staged)


def host_view(flat: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor on the host; the caller keeps the tensor alive."""
    if not flat.numel():
        return memoryview(b"")
    return host_memory(flat.data_ptr(), flat.numel())


def host_memory(address: int, size: int) -> memoryview:
    """`size` bytes at `address`; the caller keeps what they belong to alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def checksum(tensor: torch.Tensor, check: Callable[[], None] | None = None) -> str:
    """The checksum of the tensor's bytes, computed on the device where it lies.

    `check` is called before each piece that is read; what it raises ends the reading.
    """
    total = Checksum()
    for run in _runs(tensor, PIECE if tensor.device.type == "cpu" else DEVICE_STEP):
        if check is not None:
            check()
        total.update(run)
    return total.finish()


class Writer:
    """Puts bytes that arrive in order into a tensor's memory, and takes their checksum.

    Host memory that lies in C order is written directly and summed while it is still in the cache;
    anything else goes through one staging buffer (pinned for a device) and is summed at the end.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.size = nbytes(tensor)
        self.filled = 0
        self._direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        if self._direct:
            self._address = tensor.data_ptr()
            self._summed = 0
            self._checksum = Checksum()
        else:
            self._parts = (
                _parts(_flat(tensor), PIECE)
                if tensor.is_contiguous()
                else (_parts(tensor.detach(), PIECE))
            )
            self._staging = torch.empty(
                min(PIECE, self.size),
                dtype=torch.uint8,
                device="cpu",
                pin_memory=tensor.device.type == "cuda",
            )
            self._part: torch.Tensor | None = None
            self._staged = 0

    def space(self) -> memoryview:
        """Memory for the next bytes, not empty; it holds until they are `taken`."""
        if self._direct:
            # Up to where the next sum is due.
            end = min(self.size, self._summed + PIECE)
            return host_memory(self._address + self.filled, end - self.filled)
        if self._part is None:
            self._part = next(self._parts)
        return host_view(self._staging)[self._staged : nbytes(self._part)]

    def taken(self, size: int) -> None:
        """The first `size` bytes of `space` are there."""
        self.filled += size
        if self._direct:
            if self.filled - self._summed == PIECE:
                self._checksum.update_at(self._address + self._summed, PIECE)
                self._summed = self.filled
            return
        self._staged += size
        part = self._part
        if part is not None and self._staged == nbytes(part):
            self._part, self._staged = None, 0
            # Blocking: the staging buffer is filled again at once.
            part.copy_(self._staging[: nbytes(part)].view(part.dtype).view(part.shape))

    def finish(self) -> str:
        """The checksum of the tensor as it now lies in memory."""
        if not self._direct:
            return checksum(self._tensor)
        if self._summed < self.size:
            self._checksum.update(_flat(self._tensor)[self._summed :])
        return self._checksum.finish()
