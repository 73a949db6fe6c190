# SPDX-License-Identifier: Apache-2.0
"""From a list of endpoints to one gRPC channel's target and options."""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.store.errors import StoreRequestError, StoreUnavailable

_DEFAULT_PORT = 2379
_MAX_MESSAGE = 64 * 1024 * 1024
_SHUFFLE = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address, without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Target:
    """``text`` is what gRPC dials; ``server_name`` is what a certificate must name.

    ``names``: how many endpoints there are, if any is a name that was resolved here; else 0.
    """

    text: str
    server_name: str
    names: int = 0

    def same(self, other: Target) -> bool:
        """Whether it leads to the same addresses, in whatever order."""
        return sorted(self.text.split(":", 1)[1].split(",")) == sorted(
            other.text.split(":", 1)[1].split(",")
        )


def parse_endpoint(text: str) -> tuple[Endpoint, bool]:
    """Return the endpoint in ``host:port``, ``[v6]:port`` or a URL, and whether it says https."""
    rest, secure = text.strip(), False
    for scheme in ("http://", "https://"):
        if rest.startswith(scheme):
            rest, secure = rest[len(scheme) :].rstrip("/"), scheme == "https://"
    if rest.startswith("["):
        host, closed, port = rest[1:].partition("]")
        valid = bool(closed) and (not port or port.startswith(":"))
        port = port[1:]
    elif rest.count(":") > 1:
        host, port, valid = rest, "", True
    else:
        host, _, port = rest.partition(":")
        valid = True
    number = int(port) if port.isascii() and port.isdigit() else (0 if port else _DEFAULT_PORT)
    if not valid or not host or "/" in host or not 0 < number < 65536:
        raise StoreRequestError(f"etcd endpoint {text!r}: must be host:port or [address]:port")
    return Endpoint(host, number), secure


def _addresses(endpoint: Endpoint) -> list[str]:
    """Every address of the endpoint's host; [] if its name cannot be resolved."""
    try:
        return [str(ipaddress.ip_address(endpoint.host))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def resolve(endpoints: Sequence[Endpoint]) -> Target:
    """Return one target for all endpoints.

    A single host name is left to gRPC, which resolves it again whenever a connection fails.
    Several are resolved here, since gRPC takes only addresses in a list, and only of one family:
    the one in which most endpoints can be reached, IPv4 if both can. Shuffled, so that not every
    client of a cluster goes to the same member first. Raises :class:`StoreUnavailable` when no
    name can be resolved.
    """
    first = endpoints[0]
    by_endpoint = {endpoint: _addresses(endpoint) for endpoint in endpoints}
    if len(endpoints) == 1 and by_endpoint[first] != [first.host]:
        return Target(f"dns:///{first}", first.host)
    families: dict[int, list[str]] = {4: [], 6: []}
    reached = {4: 0, 6: 0}
    for endpoint, addresses in by_endpoint.items():
        versions = {address: ipaddress.ip_address(address).version for address in addresses}
        for version in families:
            mine = [str(Endpoint(a, endpoint.port)) for a, v in versions.items() if v == version]
            families[version] += mine
            reached[version] += bool(mine)
    family = 6 if reached[6] > reached[4] else 4
    targets = list(dict.fromkeys(families[family]))
    if not targets:
        names = ", ".join(endpoint.host for endpoint in endpoints)
        raise StoreUnavailable(f"none of the etcd hosts can be resolved: {names}")
    _SHUFFLE.shuffle(targets)
    named = any(addresses != [e.host] for e, addresses in by_endpoint.items())
    return Target(
        f"ipv{family}:{','.join(targets)}", first.host, names=len(endpoints) if named else 0
    )


def channel_options(
    *, keepalive: float, connect_timeout: float, server_name: str | None
) -> list[tuple[str, str | int]]:
    """Return the channel's options; times in seconds.

    ``server_name`` is set for TLS to a list of addresses, which gRPC cannot match itself.
    """
    ping = round(keepalive * 1000)
    answer = max(500, ping // 2)
    options: list[tuple[str, str | int]] = [
        # All three, or a peer that is frozen goes unnoticed.
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),
        ("grpc.http2.max_pings_without_data", 0),
        # etcd counts pings on a connection without calls as abuse.
        ("grpc.keepalive_permit_without_calls", 0),
        # A connection that a frozen process accepted in its kernel never becomes ready.
        ("grpc.min_reconnect_backoff_ms", round(connect_timeout * 1000)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Every try goes to the next member, so that one that is cut off from the others, and
        # still answers, does not hold its clients.
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", _MAX_MESSAGE),
        ("grpc.enable_http_proxy", 0),
    ]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
        options.append(("grpc.default_authority", server_name))
    return options
