# SPDX-License-Identifier: Apache-2.0
"""What operators plan: changes of a node's flags and of a job, done or only tried out.

Done: the record is read, changed and written, fenced by the leader's election key and guarded by
what was read. Tried out: the same change is made in the leader's view, and the planner is asked
with it and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from coordinator.admin.refusal import Refused
from coordinator.admin.writes import NO_REASON, TRIES, deposed, refuse_too_long
from coordinator.controller import records
from coordinator.controller.leader import Seen
from coordinator.model import ClusterView, Job, JobSpec, JobStatus, NodeFlags, to_record
from coordinator.plan import explain, plan
from coordinator.store import (
    Absent,
    Created,
    Guard,
    GuardFailed,
    KeyKind,
    Put,
    Store,
    Unchanged,
    keys,
)
from protos import admin_pb2, job_pb2, membership_pb2

_Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class OfNode:
    """A change of a node's flags. ``placed``: it is only of use while the node has a place."""

    node: str
    change: Callable[[NodeFlags], NodeFlags]
    placed: bool = False


@dataclass(frozen=True, slots=True)
class OfJob:
    """A change of a job that has not ended."""

    job: str
    change: Callable[[Job], Job]


def cordon(request: admin_pb2.CordonNodeRequest) -> OfNode:
    """The node takes no new place. The first reason is kept."""
    refuse_too_long("reason", request.reason)
    reason = request.reason or NO_REASON
    return OfNode(request.node, lambda flags: replace(flags, cordoned=flags.cordoned or reason))


def uncordon(request: admin_pb2.UncordonNodeRequest) -> OfNode:
    """The node takes places again, and keeps what it has."""
    return OfNode(
        request.node, lambda flags: replace(flags, cordoned="", draining="", replacing="")
    )


def drain(request: admin_pb2.DrainNodeRequest) -> OfNode:
    """The node's place goes to another one, and it takes no new one. The first reason is kept."""
    refuse_too_long("reason", request.reason)
    reason = request.reason or NO_REASON
    return OfNode(request.node, lambda flags: replace(flags, draining=flags.draining or reason))


def replace_node(request: admin_pb2.ReplaceNodeRequest) -> OfNode:
    """The node's place goes to another one. The first reason is kept."""
    refuse_too_long("reason", request.reason)
    reason = request.reason or NO_REASON
    return OfNode(
        request.node,
        lambda flags: replace(flags, replacing=flags.replacing or reason),
        placed=True,
    )


def pause_recovery(request: admin_pb2.PauseRecoveryRequest) -> OfJob:
    """Nothing is decided for the job any more but its end. The first reason is kept."""
    refuse_too_long("reason", request.reason)
    reason = request.reason or NO_REASON
    return OfJob(
        request.job, lambda job: replace(job, recovery_paused=job.recovery_paused or reason)
    )


def resume_recovery(request: admin_pb2.ResumeRecoveryRequest) -> OfJob:
    """All that was held back is decided now."""
    return OfJob(request.job, lambda job: replace(job, recovery_paused=""))


def scale(request: admin_pb2.ScaleJobRequest) -> OfJob:
    """So many replicas are to run."""

    def scaled(job: Job) -> Job:
        spec, wanted = job.spec, request.replicas
        if wanted % spec.block_replicas or not spec.fewest <= wanted <= spec.replicas:
            raise Refused(
                _Code.FAILED_PRECONDITION,
                f"replicas = {wanted}: job {spec.name!r} can run with {_range(spec)}",
            )
        return replace(job, wanted_replicas=0 if wanted == spec.replicas else wanted)

    return OfJob(request.job, scaled)


def _range(spec: JobSpec) -> str:
    """The numbers of replicas that a job can have, and why."""
    each = spec.block_replicas
    if spec.fewest == spec.replicas:
        return f"{spec.replicas} replicas only: its min_replicas is not set lower"
    lowest = -(-spec.fewest // each) * each
    text = f"{lowest} (its min_replicas) to {spec.replicas} replicas"
    return text if each == 1 else f"{text}, in steps of {each}: so many fill whole nodes"


# ---- done


def carry_out(store: Store, leading: Created, wanted: OfNode | OfJob) -> admin_pb2.ChangeResponse:
    """Make the change; where it stands so already nothing is written.

    Raises :class:`Refused` with NOT_FOUND, FAILED_PRECONDITION or ABORTED, and store errors.
    """
    for _ in range(TRIES):
        if isinstance(wanted, OfNode):
            key, before = _flags(store, wanted)
            value: Any = NodeFlags() if before is None else records.load(KeyKind.FLAGS, before)
            after: Any = wanted.change(value)
        else:
            key = keys.job_spec(wanted.job)
            status_key = keys.job_status(wanted.job)
            found = store.read([key, status_key]).items
            before = found.get(key)
            if before is None:
                raise _no_job(wanted.job)
            status: JobStatus | None = None
            if status_key in found:
                status = records.load(KeyKind.JOB_STATUS, found[status_key])
            value = records.load(KeyKind.JOB_SPEC, before)
            after = _changed(wanted, value, status)
        if after == value:
            return admin_pb2.ChangeResponse(revision=before.mod_revision if before else 0)
        guard: Guard = Absent(key) if before is None else Unchanged(key, before.mod_revision)
        try:
            revision = store.commit([leading, guard], [Put(key, records.dump(after))])
        except GuardFailed as failed:
            if leading in failed.failed:
                raise deposed() from failed
            continue
        return admin_pb2.ChangeResponse(revision=revision, changed=True)
    raise Refused(_Code.ABORTED, f"key {key} is being changed by others; try again")


def _flags(store: Store, wanted: OfNode) -> tuple[str, Any]:
    """The key and value of a node's flags, of a node that anything is known of."""
    key, place = keys.flags(wanted.node), keys.assignment(wanted.node)
    found = store.read([key, keys.node(wanted.node), place]).items
    if not found:
        raise _no_node(wanted.node)
    if wanted.placed and place not in found:
        raise _no_place(wanted.node)
    return key, found.get(key)


# ---- tried out


def try_out(seen: Seen, wanted: OfNode | OfJob) -> admin_pb2.ChangeResponse:
    """What the planner would do after the change and doesn't do without it.

    Raises :class:`Refused` as :func:`carry_out` does.
    """
    view = seen.view
    if isinstance(wanted, OfNode):
        after, changed = _with_flags(view, wanted)
    else:
        after, changed = _with_job(view, wanted)
    response = admin_pb2.ChangeResponse(revision=seen.revision, changed=changed)
    told = explain.difference(plan, view, after, seen.now, seen.settings)
    response.plan.extend(_message(one) for one in told)
    return response


def _with_flags(view: ClusterView, wanted: OfNode) -> tuple[ClusterView, bool]:
    node = wanted.node
    keys.check_name(node, "node")
    if not any(node in known for known in (view.nodes, view.flags, view.assignments)):
        raise _no_node(node)
    if wanted.placed and node not in view.assignments:
        raise _no_place(node)
    before = view.flags_of(node)
    after = wanted.change(before)
    return replace(view, flags={**view.flags, node: after}), after != before


def _with_job(view: ClusterView, wanted: OfJob) -> tuple[ClusterView, bool]:
    keys.check_name(wanted.job, "job")
    if wanted.job not in view.jobs:
        raise _no_job(wanted.job)
    job = view.jobs[wanted.job]
    after = _changed(wanted, job.job, job.status)
    jobs = {**view.jobs, wanted.job: replace(job, job=after)}
    return replace(view, jobs=jobs), after != job.job


# ---- explained


def explain_job(seen: Seen, name: str) -> admin_pb2.ExplainJobResponse:
    """What the leader does for a job now, or why it doesn't.

    Raises :class:`Refused` with NOT_FOUND.
    """
    view = seen.view
    keys.check_name(name, "job")
    if name not in view.jobs:
        raise _no_job(name)
    job = view.jobs[name]
    response = admin_pb2.ExplainJobResponse(
        job=name, revision=seen.revision, recovery_paused=job.job.recovery_paused
    )
    if job.status is not None:
        response.status.CopyFrom(to_record(job.status, job_pb2.JobStatus()))
    if job.generation is not None:
        response.generation.CopyFrom(to_record(job.generation, membership_pb2.Generation()))
    if job.generation is None or not job.generation.phase.ended:
        told = explain.actions(plan, view, name, seen.now, seen.settings)
        response.actions.extend(_message(one) for one in told)
        for note in explain.notes(view, job):
            response.nodes.add(node=note.node, place=note.place, note=note.note)
    return response


def _message(told: explain.Told) -> admin_pb2.PlannedAction:
    return admin_pb2.PlannedAction(
        kind=told.kind, job=told.job, node=told.node, what=told.what, reason=told.reason
    )


# ---- refused


def _changed(wanted: OfJob, job: Job, status: JobStatus | None) -> Job:
    if status is not None and status.state.ended:
        raise Refused(
            _Code.FAILED_PRECONDITION,
            f"job {wanted.job!r} has ended: {status.state.name}, {status.reason}; "
            "only a job that has not ended can be changed",
        )
    return wanted.change(job)


def _no_job(job: str) -> Refused:
    return Refused(_Code.NOT_FOUND, f"there is no job {job!r}; `hotspare status` lists all jobs")


def _no_place(node: str) -> Refused:
    return Refused(
        _Code.FAILED_PRECONDITION,
        f"node {node!r} has no place in a job: only a node that has one can be replaced "
        "(`hotspare nodes` shows them); to keep it from getting one, cordon it",
    )


def _no_node(node: str) -> Refused:
    return Refused(
        _Code.NOT_FOUND,
        f"there is no node {node!r}: none of that name has registered; "
        "`hotspare nodes` lists all nodes",
    )
