# SPDX-License-Identifier: Apache-2.0
"""Planned changes, and why the leader does what it does. Each returns an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from coordinator.cli import render
from coordinator.cli.commands import OK, client
from protos import admin_pb2, admin_pb2_grpc

_Ask = Callable[[admin_pb2_grpc.AdminStub, float], admin_pb2.ChangeResponse]


def explain(arguments: argparse.Namespace) -> int:
    """What is done for a job now, or why it isn't."""
    request = admin_pb2.ExplainJobRequest(job=arguments.job)
    with client(arguments) as coordinator:
        answer = coordinator.call(lambda stub, timeout: stub.ExplainJob(request, timeout=timeout))
    print(render.as_json(answer) if arguments.output == "json" else render.explanation(answer))
    return OK


def cordon(arguments: argparse.Namespace) -> int:
    """Let a node take no new place."""
    request = admin_pb2.CordonNodeRequest(
        node=arguments.node, reason=arguments.reason, dry_run=arguments.dry_run
    )
    return _change(
        arguments,
        lambda stub, timeout: stub.CordonNode(request, timeout=timeout),
        f"node {arguments.node} takes no new place",
    )


def uncordon(arguments: argparse.Namespace) -> int:
    """Let a node take places again."""
    request = admin_pb2.UncordonNodeRequest(node=arguments.node, dry_run=arguments.dry_run)
    return _change(
        arguments,
        lambda stub, timeout: stub.UncordonNode(request, timeout=timeout),
        f"node {arguments.node} takes places",
    )


def drain(arguments: argparse.Namespace) -> int:
    """Give a node's place to another one, and let it take no new one."""
    request = admin_pb2.DrainNodeRequest(
        node=arguments.node, reason=arguments.reason, dry_run=arguments.dry_run
    )
    return _change(
        arguments,
        lambda stub, timeout: stub.DrainNode(request, timeout=timeout),
        f"node {arguments.node} is being drained",
    )


def replace(arguments: argparse.Namespace) -> int:
    """Give a node's place to another one."""
    request = admin_pb2.ReplaceNodeRequest(
        node=arguments.node, reason=arguments.reason, dry_run=arguments.dry_run
    )
    return _change(
        arguments,
        lambda stub, timeout: stub.ReplaceNode(request, timeout=timeout),
        f"node {arguments.node} is being replaced",
    )


def pause_recovery(arguments: argparse.Namespace) -> int:
    """Let nothing be decided for a job but its end."""
    request = admin_pb2.PauseRecoveryRequest(
        job=arguments.job, reason=arguments.reason, dry_run=arguments.dry_run
    )
    return _change(
        arguments,
        lambda stub, timeout: stub.PauseRecovery(request, timeout=timeout),
        f"job {arguments.job} does not recover by itself",
    )


def resume_recovery(arguments: argparse.Namespace) -> int:
    """Let everything be decided for a job again."""
    request = admin_pb2.ResumeRecoveryRequest(job=arguments.job, dry_run=arguments.dry_run)
    return _change(
        arguments,
        lambda stub, timeout: stub.ResumeRecovery(request, timeout=timeout),
        f"job {arguments.job} recovers by itself",
    )


def scale(arguments: argparse.Namespace) -> int:
    """Let a job run with so many replicas."""
    request = admin_pb2.ScaleJobRequest(
        job=arguments.job, replicas=arguments.replicas, dry_run=arguments.dry_run
    )
    return _change(
        arguments,
        lambda stub, timeout: stub.ScaleJob(request, timeout=timeout),
        f"job {arguments.job} is to run with {arguments.replicas} replicas",
    )


def _change(arguments: argparse.Namespace, ask: _Ask, done: str) -> int:
    with client(arguments) as coordinator:
        answer = coordinator.call(ask)
    if arguments.output == "json":
        print(render.as_json(answer))
    elif arguments.dry_run:
        print(render.dry_run(answer))
    else:
        print(done if answer.changed else f"{done}, as before")
    return OK
