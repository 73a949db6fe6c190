# SPDX-License-Identifier: Apache-2.0
"""Answers as text: what a person at 3 am must see."""

from __future__ import annotations

import json

import pytest

from coordinator.cli import render
from protos import admin_pb2, incident_pb2, job_pb2, membership_pb2, node_pb2


def description(**more: object) -> admin_pb2.JobDescription:
    spec = job_pb2.JobSpec(
        name="demo", command=["train", "-x"], replicas=4, ranks_per_node=2, spares=1, restarts=3
    )
    described = admin_pb2.JobDescription(job=job_pb2.Job(spec=spec, submitted_ns=10**18))
    for name, value in more.items():
        getattr(described, name).MergeFrom(value)
    return described


def test_a_job_that_waits_says_for_what() -> None:
    text = render.job(
        description(
            status=job_pb2.JobStatus(
                state=job_pb2.JobStatus.WAITING, reason="needs 2 nodes, 1 is free"
            )
        )
    )
    assert text.splitlines()[0].split(None, 1) == ["job", "demo: WAITING"]
    assert "needs 2 nodes, 1 is free" in text
    assert "generation  0 none yet" in text


def test_a_job_that_nobody_has_seen() -> None:
    assert "demo: SUBMITTED" in render.job(description())


def test_a_running_job() -> None:
    described = description(
        status=job_pb2.JobStatus(state=job_pb2.JobStatus.RUNNING, step=9, generation=2),
        generation=membership_pb2.Generation(generation=2, phase=membership_pb2.RUNNING),
    )
    described.slots.add(slot=0, node="n0", incarnation="a").ranks.add(since=1)
    described.slots.add(slot=1)
    described.progress["n0"].steps_per_second = 2.5
    described.progress["n0"].ranks.add(rank=0, step=8)
    described.progress["n0"].ranks.add(rank=1, step=9)
    described.incidents.add(id="demo.1", job="demo", closed=True)
    described.incidents.add(id="demo.2", job="demo", cause=incident_pb2.Incident.NODE_LOST)
    text = render.job(described)
    assert "step        9, 2.50 steps/s" in text
    assert "generation  2 RUNNING" in text
    assert "0 of 4 run, at least 4 needed" in text
    described.job.spec.min_replicas = 3
    assert "at least 3 needed" in render.job(described)
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "n0", "0-1", "1", "8,9", "a"] in rows
    assert ["1", "(empty)", "2-3", "-", "-", "-"] in rows
    assert "2 incidents, the last one:" in text
    assert "incident demo.2: node lost" in text
    assert "incident demo.1" not in text


def test_a_failed_job_shows_all_of_its_reason() -> None:
    text = render.job(
        description(
            status=job_pb2.JobStatus(
                state=job_pb2.JobStatus.FAILED, reason="rank 1 exited\nTraceback\nValueError"
            )
        )
    )
    assert "Traceback" in text
    assert "ValueError" in text


def test_the_table_of_jobs_keeps_one_line_each() -> None:
    answer = admin_pb2.ListJobsResponse()
    answer.jobs.add(job="a").status.reason = "one\ntwo"
    answer.jobs.add(job="long-name").status.state = job_pb2.JobStatus.FINISHED
    lines = render.jobs(answer).splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["a", "SUBMITTED", "0", "0", "0", "one"]
    assert lines[2].split()[:2] == ["long-name", "FINISHED"]


def node(**more: object) -> admin_pb2.NodeDescription:
    one = admin_pb2.NodeDescription(
        node=node_pb2.Node(node="n0", incarnation="a", version="1"), alive=True
    )
    for name, value in more.items():
        getattr(one, name).MergeFrom(value)
    return one


dead = node_pb2.NodeFlags(dead=[node_pb2.DeadIncarnation(incarnation="a", reason="silent")])
gone = admin_pb2.NodeDescription(node=node_pb2.Node(node="n0"), flags=dead)


@pytest.mark.parametrize(
    ("one", "state", "place", "why"),
    [
        (node(), "ready", "free", ""),
        (node(flags=dead), "dead", "free", "silent"),
        (gone, "gone", "free", "silent"),
        (node(flags=node_pb2.NodeFlags(cordoned="c")), "cordoned", "free", "c"),
        (node(flags=node_pb2.NodeFlags(replacing="r")), "replacing", "free", "r"),
        (node(flags=node_pb2.NodeFlags(cordoned="c", draining="d")), "drained", "free", "d"),
        (
            node(
                flags=node_pb2.NodeFlags(draining="d"),
                assignment=node_pb2.Assignment(job="demo", slot=3),
            ),
            "draining",
            "demo slot 3",
            "d",
        ),
        (
            node(
                flags=node_pb2.NodeFlags(draining="d"),
                node=node_pb2.Node(trainers=[node_pb2.Trainer(state=node_pb2.Trainer.WARM)]),
            ),
            "draining",
            "free",
            "d",
        ),
        (
            node(
                flags=node_pb2.NodeFlags(draining="d"),
                node=node_pb2.Node(trainers=[node_pb2.Trainer(state=node_pb2.Trainer.ENDED)]),
            ),
            "drained",
            "free",
            "d",
        ),
        (node(node=node_pb2.Node(unhealthy="hot")), "unhealthy", "free", "hot"),
        (
            node(assignment=node_pb2.Assignment(job="demo", slot=3)),
            "ready",
            "demo slot 3",
            "",
        ),
        (
            node(spare=node_pb2.SpareAssignment(job="demo")),
            "ready",
            "demo spare, warming",
            "",
        ),
        (
            node(
                spare=node_pb2.SpareAssignment(job="demo"),
                node=node_pb2.Node(warm=node_pb2.Warm(job="demo")),
            ),
            "ready",
            "demo hot spare",
            "",
        ),
    ],
)
def test_nodes(one: admin_pb2.NodeDescription, state: str, place: str, why: str) -> None:
    line = render.nodes(admin_pb2.ListNodesResponse(nodes=[one])).splitlines()[1]
    assert line.split()[:2] == ["n0", state]
    assert place in line
    assert line.endswith(why or "-")


def test_devices_are_counted() -> None:
    cuda, cpu = node_pb2.Device.CUDA, node_pb2.Device.CPU
    devices = [node_pb2.Device(kind=kind) for kind in (cuda, cuda, cpu)]
    text = render.nodes(
        admin_pb2.ListNodesResponse(nodes=[node(node=node_pb2.Node(devices=devices))])
    )
    assert "1 cpu, 2 cuda" in text


def test_nothing_there() -> None:
    assert render.jobs(admin_pb2.ListJobsResponse()) == "no jobs"
    assert render.nodes(admin_pb2.ListNodesResponse()) == "no nodes"


def test_events() -> None:
    one = admin_pb2.Event(revision=12, kind="node.dead", node="n0", message="a\nb")
    text = render.event(one)
    assert text.startswith("      12  (before this call)")
    assert "node.dead" in text
    assert "n0: a\n            b" in text
    stamped = admin_pb2.Event(revision=12, time_ns=1_700_000_000_123_000_000, kind="x", job="demo")
    assert "2023-11-1" in render.event(stamped)
    assert ".123" in render.event(stamped)


def test_json_has_every_field() -> None:
    read = json.loads(render.as_json(description()))
    assert read["job"]["spec"]["seed"] == "0"
    assert read["slots"] == []
    assert "\n" not in render.as_json(description(), indent=None)
