# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with a shard."""

from __future__ import annotations


class ShardError(Exception):
    """Base of everything that this package raises."""


class UnsupportedState(ShardError):
    """The tracked state holds something that cannot be served. Names its path and type."""


class Mismatch(ShardError):
    """What a source serves does not fit what is tracked here. Names the place and both sides."""


class InvalidManifest(ShardError):
    """A source answered with a manifest that contradicts itself."""


class ChecksumError(ShardError):
    """What arrived is not what the source has, and no source was left to ask again."""


class SourceRefused(ShardError):
    """Every source says that it does not hold what was asked for, and never will."""


class NoSource(ShardError):
    """There is no source to pull from."""


class PullTimeout(ShardError):
    """No source had delivered the whole state in time. Says what each answered last."""


class PullAborted(ShardError):
    """The caller's stop event was set before the state was whole."""


class ReadersRemain(ShardError):
    """A reader of an ended generation was still in the state when the deadline passed."""


class Ended(ShardError):
    """The generation was ended while something was being read for it."""
