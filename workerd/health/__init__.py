# SPDX-License-Identifier: Apache-2.0
"""What the node can say of itself: its devices, how trainers ended and how fast they go."""
