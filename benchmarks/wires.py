# SPDX-License-Identifier: Apache-2.0
"""A cluster whose nodes and coordinators each have a network namespace, so that cables can be cut.

All hang on one bridge in a namespace of its own; etcd and this process are on it, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from coordinator.cli.localcluster import LocalCluster
from coordinator.host import network

_OWN = 254
"""The last number in the address of this process and of etcd."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Wires:
    """The namespaces, by the names of nodes and coordinators."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"hs{secrets.token_hex(3)}"
        self._net = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.host = f"{self._net}.{_OWN}"
        self._numbers = {name: number for number, name in enumerate(names, 1)}

    def address(self, name: str) -> str:
        return f"{self._net}.{self._numbers[name]}"

    def space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def port(self, name: str) -> str:
        """The bridge's end of somebody's cable, inside the hub."""
        return f"p{self._numbers[name]}"

    def build(self) -> None:
        """Raises OSError, with the reason, where this machine, or this user, may not."""
        if shutil.which("ip") is None or shutil.which("nft") is None:
            raise OSError("ip and nft are needed to cut cables")
        hub = self.space("hub")
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge0", "up")
        for name in self._numbers:
            space = self.space(name)
            _run("ip", "netns", "add", space)
            self._cable(space, "eth0", self.port(name), f"{self.address(name)}/24")
            _run("ip", "-n", space, "link", "set", "lo", "up")
        self._cable("", f"{self._tag}h", "own", f"{self.host}/24")

    def _cable(self, space: str, end: str, port: str, address: str) -> None:
        hub = self.space("hub")
        inside = ("-n", space) if space else ()
        _run(
            "ip", "-n", hub, "link", "add", "name", port, "type", "veth", "peer", "name", self._tag
        )
        if space:
            _run("ip", "-n", hub, "link", "set", self._tag, "netns", space)
        else:
            _run("ip", "-n", hub, "link", "set", self._tag, "netns", str(os.getpid()))
        _run("ip", *inside, "link", "set", self._tag, "name", end)
        _run("ip", *inside, "addr", "add", address, "dev", end)
        _run("ip", *inside, "link", "set", end, "up")
        _run("ip", "-n", hub, "link", "set", port, "master", "bridge0")
        _run("ip", "-n", hub, "link", "set", port, "up")

    def close(self) -> None:
        for name in ("hub", *self._numbers):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", self.space(name))

    def pull(self, name: str) -> None:
        """Take its cable out: nothing gets through in either direction, and nobody is told."""
        _run("ip", "-n", self.space("hub"), "link", "set", self.port(name), "nomaster")

    def plug(self, name: str) -> None:
        _run("ip", "-n", self.space("hub"), "link", "set", self.port(name), "master", "bridge0")

    def drop(self, name: str, rule: str) -> None:
        """Let what somebody sends, and an nftables rule names, be lost."""
        ruleset = (
            "table inet cut { chain out { type filter hook output priority 0; "
            f"{rule} drop; }}; }}"
        )
        _run("ip", "netns", "exec", self.space(name), "nft", ruleset)

    def restore(self, name: str) -> None:
        _run("ip", "netns", "exec", self.space(name), "nft", "delete table inet cut")


class WiredCluster(LocalCluster):
    """A :class:`LocalCluster` on such wires."""

    def __init__(self, wires: Wires, **more: Any) -> None:
        super().__init__(**more)
        self.wires = wires

    def _place(self, name: str) -> tuple[Sequence[str], str]:
        if name == "etcd":
            return (), self.wires.host
        return ("ip", "netns", "exec", self.wires.space(name)), self.wires.address(name)

    def _mark(self) -> dict[str, str]:
        return {**super()._mark(), network.VARIABLE: "yes"}
