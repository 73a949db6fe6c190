# SPDX-License-Identifier: Apache-2.0
"""What a source serves: tensors where they lie, the skeleton around them, the manifest of both."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from protos import shards_pb2
from workerd.shards.errors import InvalidManifest
from workerd.shards.memory import checksum, nbytes
from workerd.shards.tree import dtype_name, parse_dtype

# From here on a second core pays for starting a thread.
_PARALLEL_BYTES: Final = 32 << 20
_MOST_THREADS: Final = 4


def _always() -> None:
    """Nothing ends this reading."""


class Served:
    """One state, whole, for as long as nobody changes what it refers to."""

    def __init__(self, step: int, tensors: Mapping[str, torch.Tensor], skeleton: str) -> None:
        self.step = step
        self.tensors = tensors
        self.skeleton = skeleton
        self._lock = threading.Lock()
        self._manifest: shards_pb2.Manifest | None = None

    def manifest(self, check: Callable[[], None] = _always) -> shards_pb2.Manifest:
        """The manifest, from one reading of every tensor; later calls answer the same one.

        `check` is called before each piece that is read; what it raises ends the reading.
        """
        with self._lock:
            if self._manifest is None:
                self._manifest = self._read(check)
            return self._manifest

    def _read(self, check: Callable[[], None]) -> shards_pb2.Manifest:
        tensors = list(self.tensors.values())
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        if threads == 1 or sum(map(nbytes, tensors)) < _PARALLEL_BYTES:
            sums = [checksum(tensor, check) for tensor in tensors]
        else:
            # The largest first, so that no thread begins with one when the others are through.
            order = sorted(range(len(tensors)), key=lambda i: -nbytes(tensors[i]))
            sums = [""] * len(tensors)
            with ThreadPoolExecutor(threads, "shards-checksum") as pool:
                found = pool.map(lambda i: checksum(tensors[i], check), order)
                for index, value in zip(order, found, strict=True):
                    sums[index] = value
        manifest = shards_pb2.Manifest(step=self.step, skeleton=self.skeleton)
        for (name, tensor), value in zip(self.tensors.items(), sums, strict=True):
            manifest.tensors.add(
                name=name,
                shape=tensor.shape,
                dtype=dtype_name(tensor.dtype),
                bytes=nbytes(tensor),
                checksum=value,
            )
        manifest.digest = digest(manifest)
        return manifest


def digest(manifest: shards_pb2.Manifest) -> str:
    """SHA-256 over every name, shape, dtype, size and checksum, and the skeleton; not the step."""
    rows = [[t.name, list(t.shape), t.dtype, t.bytes, t.checksum] for t in manifest.tensors]
    return hashlib.sha256(json.dumps([rows, manifest.skeleton]).encode()).hexdigest()


def validate(manifest: shards_pb2.Manifest, step: int) -> None:
    """Raises InvalidManifest for one that contradicts itself or is of another step."""
    if manifest.step != step:
        raise InvalidManifest(f"the manifest is of step {manifest.step}, not of {step}")
    names = set()
    for entry in manifest.tensors:
        try:
            size = parse_dtype(entry.dtype).itemsize
        except ValueError as error:
            raise InvalidManifest(f"{entry.name}: {error}") from error
        for length in entry.shape:
            if length < 0:
                raise InvalidManifest(f"{entry.name}: shape {list(entry.shape)}")
            size *= length
        if size != entry.bytes:
            raise InvalidManifest(
                f"{entry.name}: {entry.bytes} bytes, but its shape and dtype make {size}"
            )
        names.add(entry.name)
    if len(names) != len(manifest.tensors):
        raise InvalidManifest("a name stands for two tensors")
    if digest(manifest) != manifest.digest:
        raise InvalidManifest("the digest is not the one of what the manifest lists")
