# SPDX-License-Identifier: Apache-2.0
"""What a daemon has to do with the machine that it runs on: service manager, journal, addresses."""
