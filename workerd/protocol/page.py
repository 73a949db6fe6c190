# SPDX-License-Identifier: Apache-2.0
"""The progress page: a small file in shared memory through which a trainer tells where it stands.

There is one file per trainer instance, mapped by the trainer and by workerd. Each of its words has
one writer: the trainer writes all but the heartbeat, which is workerd's. A page tells
what a trainer was doing; it is never an acknowledgement for it.
"""

from __future__ import annotations

import enum
import mmap
import os
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

from protos import membership_pb2

PAGE_BYTES: Final = 64

_MAGIC: Final = 0x48535041_00000002  # "HSPA", version 2
_MAGIC_AT, _WORD_AT, _CHANGED_AT, _HEARTBEAT_AT, _WAITING_AT, _EXCUSED_AT = range(6)

_GENERATION_SHIFT: Final = 44
_STEP_SHIFT: Final = 4
STEP: Final = 1 << _STEP_SHIFT  # what one step adds to a word
_PHASE_MASK: Final = (1 << _STEP_SHIFT) - 1
_STEP_MASK: Final = (1 << (_GENERATION_SHIFT - _STEP_SHIFT)) - 1

MAX_GENERATION: Final = (1 << (64 - _GENERATION_SHIFT)) - 1
MAX_STEP: Final = _STEP_MASK - 1


class StepPhase(enum.IntEnum):
    """Where a rank stands in its step, with the values of `protos/membership.proto`."""

    EMPTY = membership_pb2.EMPTY
    COMPUTING = membership_pb2.COMPUTING
    PREPARED = membership_pb2.PREPARED
    UPDATING = membership_pb2.UPDATING
    DONE = membership_pb2.DONE


class PageError(ValueError):
    """The file is no progress page of this version, or a value does not fit into one."""


@dataclass(frozen=True)
class PageView:
    """One reading of a page. Times are CLOCK_MONOTONIC in nanoseconds, 0 before the first."""

    generation: int  # whose group the trainer has joined; 0 before
    step: int  # -1 while EMPTY
    phase: StepPhase
    changed_ns: int
    heartbeat_ns: int
    waiting: int = 0  # collectives that it has entered and that have not ended
    excused_ns: int = 0  # until when its script has said that it takes longer


def pack(generation: int, step: int, phase: int) -> int:
    """The word that says `generation`, `step` (-1 for none) and `phase`."""
    if not (0 <= generation <= MAX_GENERATION and -1 <= step <= MAX_STEP):
        raise PageError(f"generation {generation} and step {step} do not fit into a page's word")
    return generation << _GENERATION_SHIFT | (step + 1) << _STEP_SHIFT | phase


class ProgressPage:
    """One mapped page. Any thread may read; see the module for who may write what."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        # A cast view stores one aligned machine word at once, which slices of a mapping do not.
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> ProgressPage:
        """Makes the file (mode 0600, EMPTY at step -1). Raises FileExistsError if it is there."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        now = monotonic_ns()
        page._words[_WORD_AT] = pack(0, -1, StepPhase.EMPTY)
        page._words[_CHANGED_AT] = now
        page._words[_HEARTBEAT_AT] = now
        page._words[_MAGIC_AT] = _MAGIC
        return page

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ProgressPage:
        """Maps an existing page. Raises PageError if the file is none, OSError if unreadable."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != PAGE_BYTES:
                raise PageError(f"{os.fspath(path)} is no progress page: not {PAGE_BYTES} bytes")
            page = cls(mmap.mmap(descriptor, PAGE_BYTES))
        finally:
            os.close(descriptor)
        if page._words[_MAGIC_AT] != _MAGIC:
            page.close()
            raise PageError(f"{os.fspath(path)} is no progress page of this version")
        return page

    def write(self, generation: int, step: int, phase: int) -> None:
        """The trainer's: publishes where it stands. Raises PageError if it does not fit."""
        self.put(pack(generation, step, phase))

    def put(self, word: int) -> None:
        """`write` of what `pack` has made a word of."""
        words = self._words
        # Word before time: a reader that meets a new word with an old time only waits longer.
        words[_WORD_AT] = word
        words[_CHANGED_AT] = monotonic_ns()

    def wait(self, collectives: int) -> None:
        """The trainer's: how many collectives it has entered that have not ended yet."""
        self._words[_WAITING_AT] = collectives
        self._words[_CHANGED_AT] = monotonic_ns()

    def excuse(self, until_ns: int) -> None:
        """The trainer's: that it takes longer is expected until then; 0: not any more."""
        self._words[_EXCUSED_AT] = until_ns
        self._words[_CHANGED_AT] = monotonic_ns()

    def beat(self) -> None:
        """workerd's: says that it lives now."""
        self._words[_HEARTBEAT_AT] = monotonic_ns()

    def read(self) -> PageView:
        """What the page says now. Raises PageError if its word makes no sense."""
        word = self._words[_WORD_AT]
        try:
            phase = StepPhase(word & _PHASE_MASK)
        except ValueError as error:
            raise PageError(f"the page's word {word:#x} names no phase") from error
        return PageView(
            generation=word >> _GENERATION_SHIFT,
            step=(word >> _STEP_SHIFT & _STEP_MASK) - 1,
            phase=phase,
            changed_ns=self._words[_CHANGED_AT],
            heartbeat_ns=self._words[_HEARTBEAT_AT],
            waiting=self._words[_WAITING_AT],
            excused_ns=self._words[_EXCUSED_AT],
        )

    def close(self) -> None:
        """Unmaps the page; the file stays. No other call is allowed afterwards."""
        self._words.release()
        self._mapping.close()
