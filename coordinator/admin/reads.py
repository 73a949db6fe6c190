# SPDX-License-Identifier: Apache-2.0
"""What operators ask, answered from etcd by whichever coordinator is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass

import grpc

from coordinator.admin.refusal import Refused
from coordinator.store import KeyKind, KeyValue, RecordError, Store, decode, keys
from protos import admin_pb2, incident_pb2, job_pb2, membership_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """Who leads, and where its Admin service is."""

    id: str
    admin: str


def election_value(candidate: str, admin: str) -> bytes:
    """What a candidate's election key holds."""
    return json.dumps({"id": candidate, "admin": admin}).encode()


def leader(store: Store) -> LeaderAddress | None:
    """The leader, by its election key; None while there is none.

    Raises :class:`RecordError` for a key without an address, and the other store errors.
    """
    candidates = store.list(keys.ELECTION).items.values()
    first = min(candidates, key=lambda kv: kv.create_revision, default=None)
    if first is None:
        return None
    try:
        value = json.loads(first.value)
        return LeaderAddress(str(value["id"]), str(value["admin"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"key {first.key!r} names no leader: {first.value[:80]!r}") from error


def describe_job(store: Store, job: str) -> admin_pb2.JobDescription:
    """Everything of one job as it stood at one revision.

    Raises :class:`Refused` with NOT_FOUND, and store errors.
    """
    snapshot = store.list(keys.job_prefix(job))
    spec = snapshot.items.get(keys.job_spec(job))
    if spec is None:
        raise Refused(grpc.StatusCode.NOT_FOUND, f"there is no job {job!r}")
    described = admin_pb2.JobDescription(job=decode(job_pb2.Job, spec))
    slots: list[tuple[int, KeyValue]] = []
    for key, value in snapshot.items.items():
        parsed = keys.parse(key)
        match parsed.kind:
            case KeyKind.JOB_STATUS:
                described.status.CopyFrom(decode(job_pb2.JobStatus, value))
            case KeyKind.GENERATION:
                described.generation.CopyFrom(decode(membership_pb2.Generation, value))
            case KeyKind.SLOT:
                slots.append((parsed.number, value))
            case KeyKind.PROGRESS:
                described.progress[parsed.node].CopyFrom(decode(membership_pb2.Progress, value))
    for _, value in sorted(slots, key=lambda one: one[0]):
        described.slots.append(decode(membership_pb2.Slot, value))
    # An incident is named <job>.<generation>, and no job's name has a dot.
    incidents = store.list(f"{keys.INCIDENTS}{job}.", revision=snapshot.revision)
    found = [decode(incident_pb2.Incident, value) for value in incidents.items.values()]
    described.incidents.extend(sorted(found, key=lambda one: one.first_generation))
    return described


def list_jobs(store: Store) -> admin_pb2.ListJobsResponse:
    """Every job with its status, by name, and a revision from which on changes are to be followed.

    What each job's nodes have written isn't read. Raises store errors.
    """
    names, revision = store.below(keys.JOBS)
    jobs = [name for name in names if keys.parse(keys.JOBS + name + "/spec").job]
    wanted = [key for name in jobs for key in (keys.job_spec(name), keys.job_status(name))]
    found = store.read(wanted).items if wanted else {}
    answer = admin_pb2.ListJobsResponse(revision=revision)
    for name in jobs:
        if keys.job_spec(name) not in found:
            continue
        summary = answer.jobs.add(job=name)
        status = found.get(keys.job_status(name))
        if status is not None:
            summary.status.CopyFrom(decode(job_pb2.JobStatus, status))
    return answer


def list_nodes(store: Store) -> admin_pb2.ListNodesResponse:
    """Every node that has a record of any kind, by name. Raises store errors."""
    ranges = [keys.NODES, keys.FLAGS, keys.ASSIGNMENTS, keys.SPARES]
    snapshot, _ = store.list_ranges(ranges)
    nodes: dict[str, admin_pb2.NodeDescription] = {}
    for key, value in snapshot.items.items():
        parsed = keys.parse(key)
        if not parsed.node:
            continue
        if parsed.node not in nodes:
            named = node_pb2.Node(node=parsed.node)
            nodes[parsed.node] = admin_pb2.NodeDescription(node=named)
        one = nodes[parsed.node]
        match parsed.kind:
            case KeyKind.NODE:
                one.node.CopyFrom(decode(node_pb2.Node, value))
                one.alive = True
            case KeyKind.FLAGS:
                one.flags.CopyFrom(decode(node_pb2.NodeFlags, value))
            case KeyKind.ASSIGNMENT:
                one.assignment.CopyFrom(decode(node_pb2.Assignment, value))
            case KeyKind.SPARE:
                one.spare.CopyFrom(decode(node_pb2.SpareAssignment, value))
    return admin_pb2.ListNodesResponse(
        nodes=[nodes[name] for name in sorted(nodes)], revision=snapshot.revision
    )
