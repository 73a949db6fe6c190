# SPDX-License-Identifier: Apache-2.0
"""The leader's loop: watch -> view -> plan -> guarded transactions."""
