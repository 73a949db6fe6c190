# SPDX-License-Identifier: Apache-2.0
"""The devices of this node, without torch: a daemon stays small."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess

from coordinator.model import Device, DeviceKind

_SECONDS = 30.0  # a driver that has just been loaded takes its time


class DeviceError(Exception):
    """The devices that were asked for are not there; the text says why."""


def find(wanted: str) -> tuple[Device, ...]:
    """The devices for ``auto``, ``cuda`` or ``cpu:K``.

    ``auto`` is every CUDA device, or one CPU device where there is none. ``CUDA_VISIBLE_DEVICES``
    narrows them down, as it does for the trainers. Raises ValueError for anything else, and
    :class:`DeviceError` when ``cuda`` is asked for and there is none.
    """
    if match := re.fullmatch(r"cpu:([1-9][0-9]{0,3})", wanted):
        return _cpus(int(match[1]))
    if wanted not in ("auto", "cuda"):
        raise ValueError(f"devices {wanted!r}: must be auto, cuda or cpu:K with K from 1 to 9999")
    found = _cuda()
    if not found and wanted == "cuda":
        raise DeviceError("devices cuda: nvidia-smi shows none")
    return found or _cpus(1)


def _cpus(count: int) -> tuple[Device, ...]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    name = platform.machine()
    return tuple(Device(DeviceKind.CPU, index, name, memory) for index in range(count))


def _cuda() -> tuple[Device, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    try:
        run = subprocess.run(
            [command, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"nvidia-smi: {error}") from error
    return parse(run.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse(listing: str, visible: str | None) -> tuple[Device, ...]:
    """The devices of nvidia-smi's CSV listing that ``CUDA_VISIBLE_DEVICES`` lets through.

    Their index is what a trainer calls them by: the position among those.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line]
    if visible is not None:
        chosen = []
        for entry in visible.split(","):
            name = entry.strip()
            row = next((one for one in rows if _names(one, name)), None)
            if row is None:  # CUDA, too, stops at the first that it doesn't know
                break
            chosen.append(row)
        rows = chosen
    devices = []
    for position, (_, _, name, memory) in enumerate(rows):
        # An integrated device shows "[N/A]".
        size = int(memory) * 2**20 if memory.isdecimal() else 0
        devices.append(Device(DeviceKind.CUDA, position, name, size))
    return tuple(devices)


def _names(row: list[str], entry: str) -> bool:
    index, uuid = row[0], row[1]
    return entry == index or (entry.startswith("GPU-") and uuid.startswith(entry))
