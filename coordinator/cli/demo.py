# SPDX-License-Identifier: Apache-2.0
"""``hotspare demo``: kill a node of a training job on this machine, and see it recover exactly.

A cluster of its own, in processes of its own, in a temporary folder: nothing of it is left.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from coordinator.admin import jobfile, timeline
from coordinator.cli.localcluster import ClusterError, LocalCluster, signals_interrupt
from coordinator.cli.screen import Screen, Sight
from coordinator.model import Incident, JobSpec, JobState, from_record
from protos import admin_pb2, incident_pb2

NODES = 4
KILL_AFTER = 12
"""The step after which a node is killed."""

_LOSS = re.compile(r"^step (\d+) loss (\d+\.\d+)$", re.MULTILINE)
_STARTING = 120.0
_RECOVERING = 60.0
_RUNNING = 150.0


def run() -> int:
    """Run the demo on standard output.

    Returns the exit code: 0 when the weights of both runs are identical, 1 when they aren't, 2 when
    the demo could not be carried through, 130 when it was interrupted.
    """
    screen = Screen(sys.stdout)
    try:
        with signals_interrupt():
            screen.say(f"starting etcd, 2 coordinators and {NODES} nodes on this machine")
            with LocalCluster(nodes=NODES) as cluster:
                return _Demo(cluster, screen).run()
    except KeyboardInterrupt:
        screen.say("interrupted; nothing is left running")
        return 130
    except ClusterError as error:
        screen.say(f"error: {error}")
        return 2


def examples() -> Path:
    """The folder of the examples: next to this module where Hotspare is installed, else above."""
    here = Path(__file__).resolve().parent
    installed = here / "examples"
    return installed if installed.is_dir() else here.parents[1] / "examples"


def job() -> JobSpec:
    """The example's job, to be run from where the example is, by this interpreter."""
    folder = examples()
    spec = jobfile.parse((folder / "gpt.toml").read_text())
    return replace(
        spec,
        command=(sys.executable, *spec.command[1:]),
        working_directory=str(folder),
    )


class _Losses:
    """What the trainers have printed, on all nodes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._read: dict[Path, int] = {}
        self.step = 0
        self.loss: float | None = None

    def look(self) -> bool:
        """Whether there is a new step."""
        before = self.step
        for log in self._cluster.trainer_logs():
            with log.open("rb") as lines:
                lines.seek(self._read.get(log, 0))
                new = lines.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for step, loss in _LOSS.findall(whole.decode(errors="replace")):
                if int(step) + 1 > self.step:
                    self.step, self.loss = int(step) + 1, float(loss)
        return self.step > before

    def reset(self) -> None:
        """Forget the job before."""
        self.look()
        self.step, self.loss = 0, None


class _Demo:
    def __init__(self, cluster: LocalCluster, screen: Screen) -> None:
        self._cluster = cluster
        self._screen = screen
        self._losses = _Losses(cluster)
        self._spec = job()
        self._steps = int(self._spec.command[-1])
        self._pause = threading.Event()

    def run(self) -> int:
        say = self._screen.say
        spec = replace(self._spec, name="with-a-failure")
        say(
            f"job {spec.name}: {spec.replicas} nodes train a GPT of 5.5 million parameters on "
            "the standard library's sources, 1 is a hot spare"
        )
        self._cluster.admin.submit(spec)
        self._follow(spec.name, self._ready_to_be_hit, _STARTING)
        killed, at_ns = self._kill(spec.name)
        self._follow(spec.name, _recovered, _RECOVERING)
        self._timeline(spec.name, killed, at_ns)
        disturbed = self._finish(spec.name)

        spec = replace(self._spec, name="undisturbed", spares=0)
        say()
        say(f"job {spec.name}: the same run on the {spec.replicas} nodes that are left")
        self._losses.reset()
        self._cluster.admin.submit(spec)
        undisturbed = self._finish(spec.name)

        say()
        say(f"weights with a failure  {' '.join(disturbed)}")
        say(f"weights undisturbed     {' '.join(undisturbed)}")
        identical = bool(disturbed) and disturbed == undisturbed
        say(f"weights identical: {'yes' if identical else 'no'}")
        return 0 if identical else 1

    # ---- what happens

    def _ready_to_be_hit(self, seen: admin_pb2.JobDescription) -> bool:
        warm = any(one.node.warm.job == seen.job.spec.name for one in self._nodes().values())
        return warm and self._losses.step >= KILL_AFTER

    def _kill(self, name: str) -> tuple[str, int]:
        """Kill the node of slot 1 in the middle of a step; returns it, and when."""
        slots = self._cluster.admin.describe(name).slots
        victim = next(one.node for one in slots if one.slot == 1)
        self._next_step()
        begun = time.monotonic()
        self._next_step()
        self._pause.wait((time.monotonic() - begun) / 2)
        at_ns = time.time_ns()  # noqa: TID251 - shown next to the incident's, which are for people
        self._cluster.kill_node(victim)
        self._screen.say(
            f"SIGKILL to workerd and trainer of node {victim}, in the middle of step "
            f"{self._losses.step + 1}"
        )
        return victim, at_ns

    def _next_step(self) -> None:
        deadline = time.monotonic() + _RECOVERING
        while not self._losses.look():
            if time.monotonic() >= deadline:
                raise ClusterError("the job makes no progress")
            self._pause.wait(0.005)

    def _timeline(self, name: str, victim: str, killed_ns: int) -> None:
        say = self._screen.say
        incident = self._cluster.admin.describe(name).incidents[-1]
        say()
        say(timeline.headline(from_record(Incident, incident)))
        say(f"  {'killed':12} {0:7.3f} s            node {victim}")
        before = killed_ns
        for mark in incident.marks:
            since, step = (mark.time_ns - killed_ns) / 1e9, (mark.time_ns - before) / 1e9
            before = mark.time_ns
            name = mark.phase.replace("_", " ")
            say(f"  {name:12} {since:7.3f} s  {step:+7.3f} s  {_short(mark.note)}")
        say(
            f"  {timeline.size(incident.bytes_moved)} moved to the spare, "
            f"resumed at step {incident.resume_step}, "
            f"steps computed again: {incident.lost_steps}"
        )
        say()

    # ---- what is seen

    def _finish(self, name: str) -> list[str]:
        seen = self._follow(name, _finished, _RUNNING)
        self._screen.close()
        return list(seen.status.digests)

    def _nodes(self) -> dict[str, admin_pb2.NodeDescription]:
        return self._cluster.admin.nodes()

    def _follow(
        self, name: str, until: Callable[[admin_pb2.JobDescription], bool], timeout: float
    ) -> admin_pb2.JobDescription:
        """Show the job until a condition holds."""
        deadline = time.monotonic() + timeout
        while True:
            self._losses.look()
            seen = self._cluster.admin.describe(name)
            state = JobState(seen.status.state)
            self._screen.show(self._sight(seen, state))
            if until(seen):
                return seen
            if state.ended:
                raise ClusterError(f"job {name} is {state.name}: {seen.status.reason}")
            if time.monotonic() >= deadline:
                raise ClusterError(f"job {name} is {state.name} for too long: {seen.status.reason}")
            self._pause.wait(0.1)

    def _sight(self, seen: admin_pb2.JobDescription, state: JobState) -> Sight:
        slots = {one.node: one.slot for one in seen.slots}
        doing = {}
        for name, node in sorted(self._nodes().items()):
            if not node.alive:
                doing[name] = "gone"
            elif name in slots:
                doing[name] = f"slot {slots[name]}"
            elif node.node.warm.job == seen.job.spec.name:
                doing[name] = "hot spare"
            else:
                doing[name] = "spare"
        return Sight(
            state=state.name,
            reason=seen.status.reason,
            step=max(self._losses.step, seen.status.step),
            steps=self._steps,
            loss=self._losses.loss,
            nodes=doing,
        )


def _recovered(seen: admin_pb2.JobDescription) -> bool:
    incidents: list[incident_pb2.Incident] = list(seen.incidents)
    return bool(incidents) and incidents[-1].closed


def _finished(seen: admin_pb2.JobDescription) -> bool:
    return JobState(seen.status.state) is JobState.FINISHED


def _short(note: str) -> str:
    return note if len(note) <= 80 else note[:77] + "..."
