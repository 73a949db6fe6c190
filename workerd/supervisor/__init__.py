# SPDX-License-Identifier: Apache-2.0
"""Trainer processes: how they start, and that nothing of them is left when they end."""
