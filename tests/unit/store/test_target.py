# SPDX-License-Identifier: Apache-2.0
"""Endpoints as people write them, and the one target that gRPC gets for all of them."""

from __future__ import annotations

import socket

import pytest

from coordinator.store.calls import Tls
from coordinator.store.connection import Store
from coordinator.store.errors import StoreRequestError, StoreUnavailable
from coordinator.store.target import Endpoint, parse_endpoint, resolve


@pytest.mark.parametrize(
    ("text", "host", "port", "secure"),
    [
        ("etcd-0:2379", "etcd-0", 2379, False),
        ("etcd-0", "etcd-0", 2379, False),
        ("10.0.0.1:1", "10.0.0.1", 1, False),
        ("http://10.0.0.1:2379/", "10.0.0.1", 2379, False),
        ("https://etcd:4001", "etcd", 4001, True),
        ("[::1]:2380", "::1", 2380, False),
        ("[fd00::1]", "fd00::1", 2379, False),
        ("fd00::1", "fd00::1", 2379, False),
    ],
)
def test_endpoints_are_read(text: str, host: str, port: int, secure: bool) -> None:
    assert parse_endpoint(text) == (Endpoint(host, port), secure)


@pytest.mark.parametrize(
    "text", ["", ":2379", "a:b", "a:0", "a:65536", "a:-1", "[::1", "[::1]x", "a/b:1", "[]:1"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(StoreRequestError, match="must be host:port"):
        parse_endpoint(text)


def test_several_addresses_become_one_target() -> None:
    target = resolve([Endpoint("10.0.0.1", 2379), Endpoint("10.0.0.2", 1)])
    scheme, _, rest = target.text.partition(":")
    assert scheme == "ipv4"
    assert sorted(rest.split(",")) == ["10.0.0.1:2379", "10.0.0.2:1"]
    assert target.server_name == "10.0.0.1"
    assert resolve([Endpoint("::1", 2379)]).text == "ipv6:[::1]:2379"


def test_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    book = {
        "both": ["10.0.0.1", "fd00::1"],
        "six": ["fd00::2"],
        "four": ["10.0.0.3", "10.0.0.4"],
    }

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in book:
            raise socket.gaierror(host)
        return [(0, 0, 0, "", (address, port)) for address in book[host]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    def addresses(*hosts: str) -> tuple[str, list[str]]:
        scheme, _, rest = resolve([Endpoint(h, 1) for h in hosts]).text.partition(":")
        return scheme, sorted(rest.split(","))

    assert addresses("both", "four") == ("ipv4", ["10.0.0.1:1", "10.0.0.3:1", "10.0.0.4:1"])
    assert addresses("both", "six") == ("ipv6", ["[fd00::1]:1", "[fd00::2]:1"])
    assert addresses("four", "unknown") == ("ipv4", ["10.0.0.3:1", "10.0.0.4:1"])
    with pytest.raises(StoreUnavailable, match="none of the etcd hosts can be resolved: a, b"):
        addresses("a", "b")
    # A single name stays one: gRPC resolves it again whenever a connection fails.
    assert resolve([Endpoint("both", 7)]).text == "dns:///both:7"
    assert resolve([Endpoint("unknown", 7)]).text == "dns:///unknown:7"


def test_a_store_refuses_what_cannot_work() -> None:
    with pytest.raises(StoreRequestError, match="no etcd endpoint"):
        Store([], prefix="/x")
    with pytest.raises(StoreRequestError, match="prefix is empty"):
        Store(["127.0.0.1:1"], prefix="/")
    with pytest.raises(StoreRequestError, match="both or neither"):
        Store(["127.0.0.1:1"], prefix="/x", user="u")
    with pytest.raises(StoreRequestError, match="needs TLS"):
        Store(["https://127.0.0.1:1"], prefix="/x")
    with pytest.raises(StoreRequestError, match=r"missing\.pem"):
        Store(["127.0.0.1:1"], prefix="/x", credentials=Tls("missing.pem"))
