# SPDX-License-Identifier: Apache-2.0
"""Bytes read from and written into tensors in place."""

from __future__ import annotations

import random

import pytest
import torch

from tests.unit.shards.objects import put
from workerd.shards.memory import PIECE, Writer, checksum, host_runs

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = bytearray(random.Random(seed).randbytes(count))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _read(tensor: torch.Tensor, limit: int = PIECE) -> bytes:
    runs = [bytes(run) for run in host_runs(tensor, limit)]
    assert all(len(run) == limit for run in runs[:-1])
    return b"".join(runs)


def _plain(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same elements in the same order, laid out differently."""
    found = {"contiguous": tensor.contiguous()}
    if tensor.dim() >= 2:
        found["transposed"] = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if tensor.dim() == 4:
        found["channels last"] = tensor.contiguous(memory_format=torch.channels_last)
    if tensor.dim():
        wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
        found["every second"] = wide[..., 0]
        found["every second"].copy_(tensor)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4, 5)], ids=str)
def test_bytes_are_the_elements_in_c_order_however_they_lie(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = _filled(shape, dtype)
    plain = _plain(tensor)
    for name, laid in _layouts(tensor).items():
        assert _read(laid) == plain, name
        assert checksum(laid) == checksum(tensor), name
        target = torch.empty_strided(laid.shape, laid.stride(), dtype=laid.dtype)
        writer = Writer(target)
        put(writer, plain)
        assert _read(target) == plain, name
        assert writer.finish() == checksum(tensor), name


@pytest.mark.parametrize("limit", [16, 48, 1 << 12])
def test_a_tensor_that_does_not_lie_in_order_is_read_in_pieces(limit: int) -> None:
    tensor = _filled((37, 5, 11), torch.float32)
    for name, laid in _layouts(tensor).items():
        assert _read(laid, limit) == _plain(tensor), name


@pytest.mark.parametrize("shape", [(3, 700_001), (700_001, 3), (1_500, 2_003)])
def test_pieces_of_any_size_are_written_in_place(shape: tuple[int, ...]) -> None:
    tensor = _filled(shape, torch.int32)
    draw = random.Random(3)
    plain = b"".join(bytes(run) for run in host_runs(tensor, PIECE))
    for name, laid in _layouts(tensor).items():
        target = torch.empty_strided(laid.shape, laid.stride(), dtype=laid.dtype)
        writer = Writer(target)
        start = 0
        while start < len(plain):
            piece = plain[start : start + draw.randrange(1, 3 * PIECE)]
            put(writer, piece)
            start += len(piece)
        assert torch.equal(target, tensor), name
        assert writer.finish() == checksum(tensor), name


def test_a_writer_asks_for_no_more_than_its_tensor_lacks() -> None:
    writer = Writer(torch.zeros(4, dtype=torch.int64))
    assert len(writer.space()) == 32
    writer.taken(30)
    assert len(writer.space()) == 2
