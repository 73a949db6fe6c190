# SPDX-License-Identifier: Apache-2.0
"""The node's agent: registration, the job's generation, acknowledgements, progress."""
