# SPDX-License-Identifier: Apache-2.0
"""Machines with a real systemd: containers that run it as PID 1, on a network of their own."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.containers import DockerError, docker, wait_for

ROOT = Path(__file__).resolve().parents[2]
BASE = "hotspare-systemd-base"
WORKERD = "hotspare-workerd@{}.service"

_BOOT = (
    *("--cap-add", "SYS_ADMIN", "--security-opt", "seccomp=unconfined", "--cgroupns", "host"),
    *("--tmpfs", "/run", "--tmpfs", "/run/lock", "--tmpfs", "/tmp"),
    *("-v", "/sys/fs/cgroup:/sys/fs/cgroup:rw"),
)


class Machine:
    """One machine, at ``address`` on the network."""

    def __init__(self, name: str, image: str, network: str, address: str, *options: str) -> None:
        self.name = name
        self.address = address
        docker(
            *("run", "--detach", "--name", name, "--hostname", name),
            *("--network", network, "--ip", address, *_BOOT, *options, image, "/sbin/init"),
        )
        self.await_boot()

    def await_boot(self) -> None:
        """Wait until systemd has started everything."""

        def booted() -> bool:
            with contextlib.suppress(DockerError):
                return self.run("systemctl", "is-system-running").strip() == "running"
            return False

        wait_for(booted, f"{self.name} boots")

    def run(self, *command: str) -> str:
        """What a command prints there. Raises :class:`DockerError`."""
        return docker("exec", self.name, *command)

    def shell(self, line: str) -> str:
        """The same for a line of shell."""
        return self.run("bash", "-ec", line)

    def write(self, path: str, text: str) -> None:
        """Write a file there."""
        docker(
            *("exec", "-i", self.name, "bash", "-c"),
            f"mkdir -p $(dirname {path}) && cat >{path}",
            text=text,
        )

    def copy_sources(self) -> None:
        """Bring all that git knows of to /src."""
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.split(b"\0")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in sorted(one.decode() for one in files if one):
                if (ROOT / name).exists():
                    archive.add(ROOT / name, f"src/{name}")
        subprocess.run(
            ["docker", "cp", "-", f"{self.name}:/"], input=packed.getvalue(), check=True, timeout=60
        )

    def show(self, unit: str, field: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--property", field, "--value", unit).strip()

    def main_pid(self, unit: str) -> int:
        """The daemon's process."""
        return int(self.show(unit, "MainPID"))

    def processes(self, unit: str) -> list[int]:
        """All processes of a unit, the trainers too."""
        return self._found(f"grep -lsF /{unit} /proc/[0-9]*/cgroup")

    def trainers(self) -> list[int]:
        """The processes that were started as trainers, whoever they belong to by now."""
        return self._found("grep -lsaz ^HOTSPARE_INSTANCE= /proc/[0-9]*/environ")

    def _found(self, grep: str) -> list[int]:
        # A process that ends meanwhile makes grep fail, as finding none does.
        return [int(path.split("/")[2]) for path in self.shell(f"{grep} || true").split()]

    def remove(self) -> None:
        """Take the machine away."""
        docker("rm", "--force", "--volumes", self.name)


class Cluster:
    """What ``hotspare`` says, asked on the machine where a coordinator is."""

    def __init__(self, head: Machine) -> None:
        self.head = head

    def ask(self, *arguments: str) -> Any:
        """The answer to ``hotspare ARGUMENTS``."""
        options = ("--output", "json", "--coordinator", f"{self.head.address}:7400")
        return json.loads(self.head.run("hotspare", *arguments, *options))

    def nodes(self) -> dict[str, Any]:
        """Every node that lives, by its id."""
        found = self.ask("nodes")["nodes"]
        return {one["node"]["node"]: one for one in found if one.get("alive")}

    def job(self, name: str) -> Any:
        """A job's description."""
        return self.ask("status", name)

    def owners(self, name: str) -> list[str]:
        """The nodes of a job, by slot."""
        return [one["node"] for one in self.job(name)["slots"]]
