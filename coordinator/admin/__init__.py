# SPDX-License-Identifier: Apache-2.0
"""The operators' service, and what a job may be. Every coordinator serves it."""

DEFAULT_ADDRESS = "127.0.0.1:7400"
"""Where a coordinator listens, and where ``hotspare`` looks for one, unless told otherwise."""
