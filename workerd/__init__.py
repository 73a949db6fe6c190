# SPDX-License-Identifier: Apache-2.0
"""The daemon of every node, and what training scripts import (`workerd.trainer`)."""
