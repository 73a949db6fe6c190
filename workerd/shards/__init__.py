# SPDX-License-Identifier: Apache-2.0
"""How a rank without state pulls it from a live replica.

`state` names what is served and received, `server` serves it, `client` pulls it. The modules are
imported one by one: only `server` and `client` bring in gRPC.
"""
