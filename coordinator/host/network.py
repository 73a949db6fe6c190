# SPDX-License-Identifier: Apache-2.0
"""Which addresses a daemon may listen on while nothing is encrypted and nobody asked who calls."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from collections.abc import Mapping
from typing import Final

INSIST: Final = "--insecure-network"
VARIABLE: Final = "HOTSPARE_INSECURE_NETWORK"

_YES, _NO = ("1", "yes", "true", "on"), ("", "0", "no", "false", "off")


def add_flag(parser: argparse._ActionsContainer, environment: Mapping[str, str]) -> None:
    """Add the flag by which an operator insists."""
    value = environment.get(VARIABLE, "").lower()
    parser.add_argument(
        INSIST,
        action="store_true",
        default=value in _YES or (value not in _NO and value),
        help="listen on an address that is not loopback, without encryption or authentication: "
        "whoever reaches it can run programs on every node as workerd's user, and read and change "
        f"a model. Only on a network closed to everybody else (${VARIABLE}=yes)",
    )


def refused(hosts: Mapping[str, str], insists: bool | str) -> str:
    """Why these may not be listened on; empty when they may. ``hosts`` by the flag of each.

    ``insists`` is what :func:`add_flag` has found: text is a value that means neither yes nor no.
    """
    if isinstance(insists, str):
        return f"{VARIABLE}={insists}: must be yes or no"
    if insists:
        return ""
    for flag, host in hosts.items():
        try:
            if is_loopback(host):
                continue
        except OSError as error:
            return f"{flag}: {host} can't be resolved: {error.strerror}"
        return (
            f"{flag}: {host} is not a loopback address, and there is no encryption or "
            "authentication: whoever reaches it could run programs on every node. "
            f"If nobody else can reach this network, insist with {INSIST}"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether all addresses that ``host`` stands for are loopback. Raises OSError."""
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(one[4][0])).is_loopback for one in found)
