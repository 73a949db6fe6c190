# SPDX-License-Identifier: Apache-2.0
"""The operators' service, and what a job may be. Every coordinator serves it."""

DEFAULT_ADDRESS = "127.0.0.1:7400"
"""Where a coordinator listens, and where ``hotspare`` looks for one, unless told otherwise."""

UNTIL_NOW = ("hotspare-until", "now")
"""What a call of WatchEvents sends along when it wants the past only."""
BEGINS_AT = "hotspare-begins-at"
"""Header of an event stream: the revision that it begins with, so that "now" can be resumed."""
FIRST_KEPT = "hotspare-first-kept"
"""Trailer of OUT_OF_RANGE: the oldest revision that from_revision can be."""
