# SPDX-License-Identifier: Apache-2.0
"""What the operator's commands do. Each returns an exit code."""

from __future__ import annotations

import argparse
import sys
import uuid
from pathlib import Path

from coordinator.admin.jobfile import JobError, parse
from coordinator.cli import render
from coordinator.cli.client import OLDEST, Client
from coordinator.model import to_record
from protos import admin_pb2, job_pb2

OK, FAILED, USAGE = 0, 1, 2


def submit(arguments: argparse.Namespace) -> int:
    """Check the job file, send it, say which job it became."""
    path: Path = arguments.file
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"hotspare: {path}: {error}", file=sys.stderr)
        return FAILED
    try:
        spec = parse(text)
    except JobError as error:
        for problem in error.problems:
            print(f"{path}: {problem}", file=sys.stderr)
        return FAILED
    request = admin_pb2.SubmitJobRequest(
        spec=to_record(spec, job_pb2.JobSpec()), request_id=uuid.uuid4().hex
    )
    with client(arguments) as coordinator:
        answer = coordinator.call(lambda stub, timeout: stub.SubmitJob(request, timeout=timeout))
    if arguments.output == "json":
        print(render.as_json(answer))
    else:
        print(f"job {answer.job} is submitted; follow it with: hotspare status {answer.job}")
    return OK


def status(arguments: argparse.Namespace) -> int:
    """All jobs, or one of them with everything that is known of it."""
    with client(arguments) as coordinator:
        if arguments.job is None:
            every = coordinator.call(
                lambda stub, timeout: stub.ListJobs(admin_pb2.ListJobsRequest(), timeout=timeout)
            )
            print(render.as_json(every) if arguments.output == "json" else render.jobs(every))
            return OK
        request = admin_pb2.DescribeJobRequest(job=arguments.job)
        one = coordinator.call(lambda stub, timeout: stub.DescribeJob(request, timeout=timeout))
    print(render.as_json(one) if arguments.output == "json" else render.job(one))
    return OK


def nodes(arguments: argparse.Namespace) -> int:
    """All nodes: how they stand, and what they are used for."""
    with client(arguments) as coordinator:
        answer = coordinator.call(
            lambda stub, timeout: stub.ListNodes(admin_pb2.ListNodesRequest(), timeout=timeout)
        )
    print(render.as_json(answer) if arguments.output == "json" else render.nodes(answer))
    return OK


def events(arguments: argparse.Namespace) -> int:
    """What happened, and with --follow what happens."""
    begin = arguments.from_revision
    if begin is None:
        begin = 0 if arguments.follow else OLDEST
    with client(arguments) as coordinator:
        for one in coordinator.events(begin, arguments.job or "", follow=arguments.follow):
            if arguments.output == "json":
                print(render.as_json(one, indent=None), flush=True)
            else:
                print(render.event(one), flush=True)
    return OK


def stop(arguments: argparse.Namespace) -> int:
    """Ask for a job's end."""
    request = admin_pb2.StopJobRequest(job=arguments.job, reason=arguments.reason)
    with client(arguments) as coordinator:
        answer = coordinator.call(lambda stub, timeout: stub.StopJob(request, timeout=timeout))
    if arguments.output == "json":
        print(render.as_json(answer))
    else:
        print(f"job {arguments.job} is being stopped")
    return OK


def client(arguments: argparse.Namespace) -> Client:
    """Calls to the coordinators that the command line names."""
    return Client(arguments.coordinator, arguments.timeout)
