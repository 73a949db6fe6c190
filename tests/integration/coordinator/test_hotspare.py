# SPDX-License-Identifier: Apache-2.0
"""The operator's command against real coordinators."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.store import keys
from tests.integration.coordinator.cluster import Cluster
from tests.integration.coordinator.processes import SOON

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from coordinator.cli import main; sys.exit(main())",
]

JOB = """
name = "demo"
command = ["train"]
replicas = 2
spares = 1
"""


class Operator:
    """Runs ``hotspare`` against some addresses."""

    def __init__(self, folder: Path, addresses: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, "HOTSPARE_COORDINATOR": addresses, "TZ": "UTC"}

    def run(self, *arguments: str, input: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=SOON,
            env=self.environment,
            cwd=os.getcwd(),
        )

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--output", "json"))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, env=self.environment
        )

    def job_file(self, text: str = JOB) -> str:
        path = self.folder / "job.toml"
        path.write_text(text)
        return str(path)


@pytest.fixture
def operator(cluster: Cluster, tmp_path: Path) -> Operator:
    """Knows both coordinators, the follower first."""
    cluster.launch("c0", "c1")
    leader = cluster.leader()
    addresses = sorted(
        (one.address for one in cluster.coordinators.values()), key=leader.address.__eq__
    )
    return Operator(tmp_path, ",".join(addresses))


def test_a_job_from_submission_over_a_failure_to_its_stop(
    operator: Operator, cluster: Cluster
) -> None:
    assert operator.ok("status") == "no jobs\n"
    assert operator.ok("nodes") == "no nodes\n"
    cluster.add_nodes("n0", "n1")
    said = operator.ok("submit", operator.job_file())
    assert "job demo is submitted" in said
    cluster.runs()
    cluster.add_nodes("n2")
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)

    lines = operator.ok("nodes").splitlines()
    assert lines[0].split() == ["NODE", "STATE", "PLACE", "DEVICES", "VERSION", "WHY"]
    assert "demo slot 0" in lines[1]
    assert "demo hot spare" in lines[3]

    cluster.nodes["n0"].kill()
    cluster.runs(after=1)
    cluster.wait(lambda: cluster.incidents()[0].closed, "the incident is closed", play=True)
    cluster.wait(lambda: cluster.status().generation == 2, "the status", play=True)
    table = operator.ok("status").splitlines()
    assert table[1].split()[:2] == ["demo", "RUNNING"]
    text = operator.ok("status", "demo")
    assert "demo: RUNNING" in text
    assert "incident demo.2: node lost on n0, generation 2, over" in text
    for phase in ("detected", "paused", "pulled", "regrouped", "first step"):
        assert f"  {phase} " in text
    assert "n0" in operator.ok("nodes")

    described = operator.json("status", "demo")
    assert described["status"]["state"] == "RUNNING"
    assert described["job"]["spec"]["name"] == "demo"
    assert [one["job"] for one in operator.json("status")["jobs"]] == ["demo"]
    assert [one["node"]["node"] for one in operator.json("nodes")["nodes"]] == ["n0", "n1", "n2"]

    assert "is being stopped" in operator.ok("stop", "demo", "--reason", "time to go")
    cluster.wait(lambda: "time to go" in cluster.status().reason, "it is stopped")
    assert "STOPPED" in operator.ok("status", "demo")
    events = operator.ok("events", "--job", "demo")
    assert "job.submitted" in events
    assert "job.stopped" in events
    assert "incident.closed" in events


def test_planned_changes_and_why(operator: Operator, cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1")
    tried = operator.ok("cordon", "n1", "--reason", "a fan", "--dry-run")
    assert tried == "nothing would be done now\n"
    said = "node n1 takes no new place"
    assert operator.ok("cordon", "n1", "--reason", "a fan") == f"{said}\n"
    assert operator.ok("cordon", "n1") == f"{said}, as before\n"
    assert "cordoned" in operator.ok("nodes")
    operator.ok("submit", operator.job_file())
    cluster.wait(lambda: cluster.status().reason, "the leader has seen it")
    text = operator.ok("explain", "demo")
    assert "job demo waits: needs 2 nodes, 1 are free" in text
    assert text.splitlines()[-1].split() == ["n1", "free", "cordoned:", "a", "fan"]
    tried = operator.ok("uncordon", "n1", "--dry-run")
    assert tried == "job demo: write generation 1 PAUSE: start on 2 nodes\n"
    assert operator.ok("uncordon", "n1") == "node n1 takes places\n"
    assert operator.ok("uncordon", "n1", "--dry-run").startswith("it stands so already")
    cluster.runs()
    drained = operator.ok("drain", "n1", "--reason", "a new rack")
    assert drained == "node n1 is being drained\n"
    cluster.wait(lambda: "draining" in cluster.status().reason, "it waits", play=True)
    (line,) = [one for one in operator.ok("nodes").splitlines() if one.startswith("n1")]
    assert line.split()[:2] == ["n1", "draining"]
    cluster.add_nodes("n2")
    cluster.runs(after=1)
    cluster.wait(lambda: "drained" in operator.ok("nodes"), "n1 is empty", play=True)
    assert "FAILED_PRECONDITION" in operator.run("replace", "n1").stderr
    done = operator.run("scale", "demo", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FAILED_PRECONDITION: replicas = 1: job 'demo' can run with 2 replicas" in done.stderr
    said = "job demo is to run with 2 replicas, as before\n"
    assert operator.ok("scale", "demo", "2") == said
    assert operator.json("pause-recovery", "demo", "--reason", "look first")["changed"] is True
    assert "paused: look first" in operator.ok("status", "demo")
    assert "paused: look first" in operator.ok("explain", "demo")
    told = operator.json("explain", "demo")
    assert (told["recovery_paused"], told["job"]) == ("look first", "demo")
    assert operator.ok("resume-recovery", "demo") == "job demo recovers by itself\n"
    operator.ok("stop", "demo")
    cluster.wait(lambda: cluster.status().state.ended, "it is stopped", play=True)
    assert "nothing: it has ended" in operator.ok("explain", "demo")
    events = operator.ok("events")
    for kind in (
        "node.draining",
        "job.held",
        "node.cordoned",
        "node.cordoned.cleared",
        "recovery.paused",
        "recovery.resumed",
    ):
        assert f"  {kind} " in events


def test_a_wrong_job_file_is_refused_with_every_error(operator: Operator) -> None:
    wrong = 'name = "A"\ncommand = "x"\nreplicas = 0\nrank_per_node = 3\n'
    done = operator.run("submit", operator.job_file(wrong))
    assert done.returncode == 1
    assert not done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 4
    assert "job.toml: name = 'A': must be" in lines[0]
    assert "did you mean ranks_per_node?" in lines[3]


def test_a_job_file_from_the_input(operator: Operator, cluster: Cluster) -> None:
    assert operator.run("submit", "-", input=JOB).returncode == 0
    assert cluster.store.get(keys.job_spec("demo"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("submit", "/nowhere/job.toml"), "No such file"),
        (("status", "nope"), "NOT_FOUND: there is no job 'nope'"),
        (("stop", "nope"), "NOT_FOUND: there is no job 'nope'"),
        (("explain", "nope"), "NOT_FOUND: there is no job 'nope'"),
        (("cordon", "nope"), "NOT_FOUND: there is no node 'nope'"),
        (("uncordon", "Nope", "--dry-run"), "INVALID_ARGUMENT: node 'Nope': must be"),
        (("pause-recovery", "nope"), "NOT_FOUND: there is no job 'nope'"),
        (("events", "--from-revision", "999999999"), "OUT_OF_RANGE"),
    ],
)
def test_what_fails_exits_1_and_says_why(
    operator: Operator, arguments: tuple[str, ...], says: str
) -> None:
    done = operator.run(*arguments)
    assert done.returncode == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_taken(operator: Operator) -> None:
    operator.ok("submit", operator.job_file())
    done = operator.run("submit", operator.job_file())
    assert done.returncode == 1
    assert "ALREADY_EXISTS" in done.stderr
    assert "choose another name" in done.stderr


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address that is taken and refuses every connection."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_nobody_answers(tmp_path: Path, nobody: str) -> None:
    done = Operator(tmp_path, nobody).run("status", "--timeout", "1")
    assert done.returncode == 1
    assert f"UNAVAILABLE: coordinator {nobody}" in done.stderr


def test_it_goes_on_to_a_coordinator_that_answers(
    operator: Operator, tmp_path: Path, nobody: str
) -> None:
    both = f"{nobody},{operator.environment['HOTSPARE_COORDINATOR']}"
    Operator(tmp_path, both).ok("status")


def test_a_submission_waits_for_the_next_leader(operator: Operator, cluster: Cluster) -> None:
    cluster.leader().kill()
    operator.ok("submit", operator.job_file())


def test_following_events_over_the_death_of_the_coordinator_that_sends_them(
    operator: Operator, cluster: Cluster
) -> None:
    """Every event comes exactly once, as the history has them."""
    following = operator.start("events", "--follow", "--output", "json", "--from-revision", "1")
    seen: list[dict[str, Any]] = []
    stdout = following.stdout
    assert stdout is not None
    reader = threading.Thread(target=lambda: seen.extend(map(json.loads, stdout)))
    reader.start()
    cluster.add_nodes("n0", "n1", "n2")
    operator.ok("submit", operator.job_file())
    cluster.runs()
    first = operator.environment["HOTSPARE_COORDINATOR"].split(",", maxsplit=1)[0]
    next(one for one in cluster.coordinators.values() if one.address == first).kill()
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
    cluster.nodes["n1"].kill()
    cluster.runs(after=1)
    cluster.wait(
        lambda: any(one["kind"] == "incident.closed" for one in seen) or not reader.is_alive(),
        "it is told",
        play=True,
    )
    following.send_signal(signal.SIGINT)
    assert following.wait(SOON) == 130
    reader.join(SOON)
    last = seen[-1]["revision"]
    history = [
        json.loads(line)
        for line in operator.ok("events", "--output", "json", "--from-revision", "1").splitlines()
    ]

    def told(events: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        return [
            (one["revision"], one["kind"], one["job"], one["node"], one["message"])
            for one in events
            if int(one["revision"]) < int(last)
        ]

    assert told(seen) == told(history)
    assert len(seen) > 10


def test_a_reader_that_has_seen_enough(operator: Operator, cluster: Cluster) -> None:
    cluster.add_nodes(*(f"n{number}" for number in range(20)))
    done = subprocess.run(
        f"{sys.executable} -c 'import sys; from coordinator.cli import main; sys.exit(main())'"
        " events | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=SOON,
        env=operator.environment,
    )
    assert done.stderr == ""
