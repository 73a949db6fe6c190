# SPDX-License-Identifier: Apache-2.0
"""What workerd and its trainers share. Imports neither torch nor gRPC."""
