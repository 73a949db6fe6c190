# SPDX-License-Identifier: Apache-2.0
"""A compose cluster of a test's own, its jobs, and what is done to its containers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.containers import SOON, DockerError, docker, wait_for

ROOT = Path(__file__).resolve().parents[2]
COORDINATORS = ("coordinator-1", "coordinator-2")
MEMBERS = ("etcd-1", "etcd-2", "etcd-3")
NODES = ("node-1", "node-2", "node-3", "node-4", "spare-1", "spare-2")
STEPS = 900
_ADDRESSES = {
    **{name: 11 + at for at, name in enumerate(MEMBERS)},
    **{name: 21 + at for at, name in enumerate(COORDINATORS)},
    **{name: 31 + at for at, name in enumerate(NODES)},
}


class Cluster:
    """Brought up by ``deploy/compose/cluster`` under a name and on a network of its own."""

    def __init__(self) -> None:
        self.project = f"hotspare-{uuid.uuid4().hex[:6]}"
        self.net = f"10.213.{os.getpid() % 100 + 100}"
        self._containers: dict[str, str] = {}

    def up(self) -> None:
        """Start all containers, and bring the tests' script to the nodes."""
        self._script("up")
        for name in _ADDRESSES:
            labels = (
                *("--filter", f"label=com.docker.compose.project={self.project}"),
                *("--filter", f"label=com.docker.compose.service={name}"),
            )
            self._containers[name] = docker("ps", "-aq", *labels).strip()
        for name in NODES:
            docker(
                *("cp", str(ROOT / "tests/container_job.py")),
                f"{self._containers[name]}:/opt/hotspare/examples/",
            )

    def down(self) -> None:
        """Take everything away."""
        self._script("down")

    def logs(self) -> str:
        """The end of what each container has printed."""
        parts = []
        for name, container in self._containers.items():
            done = subprocess.run(
                ["docker", "logs", "--tail", "60", container], capture_output=True, text=True
            )
            parts.append(f"---- {name}\n{done.stdout}{done.stderr}")
        return "\n".join(parts)

    def _script(self, what: str) -> None:
        done = subprocess.run(
            [str(ROOT / "deploy/compose/cluster"), what],
            env={**os.environ, "HOTSPARE_PROJECT": self.project, "HOTSPARE_NET": self.net},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise DockerError(f"cluster {what}: {done.stdout}{done.stderr}")

    # ---- what is done to containers

    def do(self, what: str, name: str) -> None:
        """``docker WHAT`` to the container of a service: kill, start, pause, unpause, restart."""
        docker(what, self._containers[name])

    def cut(self, name: str) -> None:
        """Take a container off the network."""
        docker("network", "disconnect", f"{self.project}_cluster", self._containers[name])

    def connect(self, name: str) -> None:
        """Put it back, at its address."""
        docker(
            *("network", "connect", "--ip", f"{self.net}.{_ADDRESSES[name]}"),
            *("--alias", name, f"{self.project}_cluster", self._containers[name]),
        )

    def inside(self, name: str, *command: str) -> str:
        """What a command prints in a container."""
        return docker("exec", self._containers[name], *command)

    # ---- what hotspare says

    def ask(self, *arguments: str) -> Any:
        """The answer to ``hotspare ARGUMENTS``, by a coordinator that can be asked."""
        for name in COORDINATORS:
            with contextlib.suppress(DockerError):
                return json.loads(self.inside(name, "hotspare", *arguments, "--output", "json"))
        return json.loads(self.inside(NODES[-1], "hotspare", *arguments, "--output", "json"))

    def leader(self) -> str:
        """The service that leads."""
        said = self.inside(
            "etcd-1",
            "etcdctl",
            "get",
            "--prefix",
            "--sort-by=CREATE",
            "--order=ASCEND",
            "--limit=1",
            "--print-value-only",
            "/hotspare/default/election/",
        )
        return next(name for name in COORDINATORS if name in said)

    def alive(self) -> set[str]:
        """The nodes whose lease lives."""
        return {one["node"]["node"] for one in self.ask("nodes")["nodes"] if one.get("alive")}

    def warm(self, job: str) -> set[str]:
        """The nodes that are warm for a job and have no place."""
        owners = self.owners(job)
        return {
            one["node"]["node"]
            for one in self.ask("nodes")["nodes"]
            if one.get("alive")
            and one["node"].get("warm", {}).get("job") == job
            and one["node"]["node"] not in owners
        }

    def submit(self, job: str, spares: int, pace: float) -> None:
        """Submit the tests' training script; a step takes ``pace`` seconds at least."""
        text = f"""\
name = "{job}"
command = ["python", "container_job.py", "{STEPS}"]
working_directory = "/opt/hotspare/examples"
replicas = 4
spares = {spares}
seed = 7
restarts = 50
[environment]
OMP_NUM_THREADS = "1"
PACE = "{pace}"
"""
        for name in COORDINATORS:
            with contextlib.suppress(DockerError):
                docker("exec", "-i", self._containers[name], "tee", "/tmp/job.toml", text=text)
                self.inside(name, "hotspare", "submit", "/tmp/job.toml")
                return
        raise AssertionError("nobody takes the job")

    def job(self, name: str) -> Any:
        """A job's description."""
        return self.ask("status", name)

    def owners(self, name: str) -> list[str]:
        """The nodes of a job, by slot."""
        return [one["node"] for one in self.job(name)["slots"]]

    def step(self, name: str) -> int:
        """How far a job is."""
        return int(self.job(name)["status"]["step"])

    def whole(self, name: str) -> bool:
        """Whether all places are taken by nodes that live, no incident is open, and it runs."""
        job, alive = self.job(name), self.alive()
        return bool(
            "RUNNING" in job["status"]["state"]
            and len(job["slots"]) == 4
            and all(one["node"] in alive for one in job["slots"])
            and all(one["closed"] for one in job["incidents"])
        )

    def await_steps(self, name: str, more: int = 3) -> None:
        """Wait until the job is whole and has got on."""
        before = self.step(name)
        wait_for(lambda: self.whole(name) and self.step(name) >= before + more, f"{name} goes on")

    def digests(self, name: str) -> list[str]:
        """Those of the final state, once the job is finished."""

        def finished() -> Any:
            status = self.job(name)["status"]
            assert "FAILED" not in status["state"], status
            assert "LOST" not in status["state"], status
            return status if "FINISHED" in status["state"] else None

        status = wait_for(finished, f"{name} is finished", 2 * SOON)
        return list(status["digests"])


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A running one."""
    made = Cluster()
    try:
        made.up()
        yield made
    finally:
        print(made.logs())
        made.down()
