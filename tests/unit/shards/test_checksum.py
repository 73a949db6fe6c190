# SPDX-License-Identifier: Apache-2.0
"""What the checksum catches, and that it depends on the bytes alone."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from workerd.shards.checksum import BLOCK, Checksum, _on_device, _on_host
from workerd.shards.memory import checksum


def _bytes(size: int, seed: int = 0) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.uint8)


def _by_the_book(data: bytes) -> str:
    """The algorithm as its module's text says it, in plain arithmetic."""
    person = b"hotspare shard 1"
    drawn = hashlib.shake_128(person).digest(BLOCK)
    weights = [int.from_bytes(drawn[i : i + 8], "little") | 1 for i in range(0, BLOCK, 8)]
    total = hashlib.blake2b(digest_size=16, person=person)
    full = len(data) - len(data) % BLOCK
    for start in range(0, full, BLOCK):
        block = data[start : start + BLOCK]
        for offset in (0, 4):
            words = (block[i : i + 8] for i in range(offset, BLOCK - 7, 8))
            summed = sum(
                int.from_bytes(word, "little") * weight
                for word, weight in zip(words, weights, strict=False)
            )
            total.update((summed % 2**64).to_bytes(8, "little"))
    total.update(data[full:])
    total.update(len(data).to_bytes(8, "little"))
    return total.hexdigest()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK, 3 * BLOCK + 5])
def test_the_value_is_the_documented_one(size: int) -> None:
    data = _bytes(size)
    assert checksum(data) == _by_the_book(bytes(data.tolist()))


def test_any_cut_into_whole_blocks_gives_the_same_value() -> None:
    data = _bytes(7 * BLOCK + 13)
    whole = checksum(data)
    for cut in (1, 2, 5):
        total = Checksum()
        for start in range(0, data.numel(), cut * BLOCK):
            total.update(data[start : start + cut * BLOCK])
        assert total.finish() == whole


def test_bytes_after_a_part_of_a_block_are_an_error() -> None:
    total = Checksum()
    total.update(_bytes(BLOCK + 1))
    with pytest.raises(ValueError, match="not full"):
        total.update(_bytes(BLOCK))


def test_memory_at_any_address_gives_the_same_value() -> None:
    data = _bytes(4 * BLOCK + 3)
    for shift in range(1, 9):
        moved = torch.empty(data.numel() + shift, dtype=torch.uint8)[shift:]
        moved.copy_(data)
        assert checksum(moved) == checksum(data)


@pytest.mark.parametrize("size", [1, 8, BLOCK - 1, BLOCK, 2 * BLOCK + 100])
def test_every_flipped_bit_is_caught(size: int) -> None:
    data = _bytes(size)
    whole = checksum(data)
    places = range(size * 8) if size < 100 else random.Random(1).sample(range(size * 8), 300)
    for place in places:
        data[place // 8] ^= 1 << place % 8
        assert checksum(data) != whole, place
        data[place // 8] ^= 1 << place % 8
    assert checksum(data) == whole


@pytest.mark.parametrize("bit", [63, 62, 56, 47, 32, 31, 0])
def test_a_bit_flipped_in_two_words_is_caught(bit: int) -> None:
    # A plain weighted sum modulo 2**64 loses exactly these at bit 63.
    data = _bytes(BLOCK)
    whole = checksum(data)
    draw = random.Random(bit)
    for _ in range(200):
        first, second = draw.sample(range(BLOCK // 8), 2)
        for word in (first, second):
            data[word * 8 + bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole, (first, second)
        for word in (first, second):
            data[word * 8 + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("length", [1, 4, 8, 512, BLOCK])
def test_pieces_that_trade_places_are_caught(length: int) -> None:
    data = _bytes(4 * BLOCK)
    whole = checksum(data)
    draw = random.Random(length)
    for _ in range(50):
        first, second = draw.sample(range(data.numel() // length), 2)
        swapped = data.clone()
        swapped[first * length :][:length] = data[second * length :][:length]
        swapped[second * length :][:length] = data[first * length :][:length]
        assert torch.equal(swapped, data) or checksum(swapped) != whole


def test_what_is_cut_off_or_added_is_caught() -> None:
    data = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    sizes = [0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK]
    assert len({checksum(data[:size]) for size in sizes}) == len(sizes)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_a_devices_arithmetic_gives_the_same_sums(shift: int) -> None:
    # On the host's tensors: the operations are the ones that a device runs.
    data = _bytes(5 * BLOCK + shift)[shift:]
    assert _on_device(data) == _on_host(data.data_ptr(), data.numel())
