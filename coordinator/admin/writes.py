# SPDX-License-Identifier: Apache-2.0
"""What operators change: done by the leader, fenced by its election key."""

from __future__ import annotations

from dataclasses import replace

import grpc

from coordinator.admin.jobfile import validate
from coordinator.admin.refusal import Refused
from coordinator.controller import records
from coordinator.model import Job, JobSpec, JobStatus, from_record
from coordinator.store import (
    Absent,
    Created,
    Delete,
    Guard,
    GuardFailed,
    KeyKind,
    KeyValue,
    Put,
    Store,
    Unchanged,
    keys,
)
from protos import admin_pb2

_Code = grpc.StatusCode

_FIRST_SPEC = 1
_MESSAGE = 2000
"""Characters of a status message: gRPC carries it in a header, and headers are limited."""
TRIES = 5
"""How often a change is tried anew when somebody else has just made another one."""
_TEXT = 1000
"""Characters of a reason or a request id."""

NO_REASON = "an operator asked for it"


def submit(
    store: Store, leading: Created, request: admin_pb2.SubmitJobRequest, wall_ns: int
) -> admin_pb2.SubmitJobResponse:
    """Record a job. The same request again is answered as the first time.

    Raises :class:`Refused` with INVALID_ARGUMENT (everything that is wrong) or ALREADY_EXISTS,
    and store errors.
    """
    spec = from_record(JobSpec, request.spec)
    problems = [str(one) for one in validate(spec)]
    problems += _too_long("request_id", request.request_id)
    if problems:
        raise Refused(_Code.INVALID_ARGUMENT, _lines(problems))
    job = Job(
        spec=spec,
        spec_revision=_FIRST_SPEC,
        submitted_ns=wall_ns,
        request_id=request.request_id,
    )
    key = keys.job_spec(spec.name)
    try:
        revision = store.commit([leading, Absent(key)], [Put(key, records.dump(job))])
    except GuardFailed as failed:
        there = failed.current[key]
        if there is None or leading in failed.failed:
            raise deposed() from failed
        revision = _submitted_before(spec, request.request_id, there)
    return admin_pb2.SubmitJobResponse(job=spec.name, revision=revision)


def _submitted_before(spec: JobSpec, request_id: str, there: KeyValue) -> int:
    """The revision of this very submission. Raises :class:`Refused` when it was another one."""
    job: Job = records.load(KeyKind.JOB_SPEC, there)
    if not request_id or job.request_id != request_id:
        raise Refused(
            _Code.ALREADY_EXISTS,
            f"name = {spec.name!r}: there is a job of that name; choose another name",
        )
    if job.spec != spec:
        raise Refused(
            _Code.ALREADY_EXISTS,
            f"request_id = {request_id!r}: has submitted job {spec.name!r} with another content",
        )
    return there.create_revision


def stop(
    store: Store, leading: Created, request: admin_pb2.StopJobRequest
) -> admin_pb2.StopJobResponse:
    """Record that a job is to end. Again is no error, and keeps the first reason.

    Raises :class:`Refused` with NOT_FOUND, or FAILED_PRECONDITION when the job has ended by
    itself, and store errors.
    """
    refuse_too_long("reason", request.reason)
    key, status_key = keys.job_spec(request.job), keys.job_status(request.job)
    for _ in range(TRIES):
        found = store.read([key, status_key]).items
        there = found.get(key)
        if there is None:
            raise Refused(_Code.NOT_FOUND, f"there is no job {request.job!r}")
        job: Job = records.load(KeyKind.JOB_SPEC, there)
        if job.stop:
            return admin_pb2.StopJobResponse(revision=there.mod_revision)
        if status_key in found:
            status: JobStatus = records.load(KeyKind.JOB_STATUS, found[status_key])
            if status.state.ended:
                raise Refused(
                    _Code.FAILED_PRECONDITION,
                    f"job {request.job!r} has ended already: {status.state.name}, {status.reason}",
                )
        wanted = replace(job, stop=request.reason or NO_REASON)
        guards: list[Guard] = [leading, Unchanged(key, there.mod_revision)]
        writes: list[Put | Delete] = [Put(key, records.dump(wanted))]
        try:
            return admin_pb2.StopJobResponse(revision=store.commit(guards, writes))
        except GuardFailed as failed:
            if leading in failed.failed:
                raise deposed() from failed
    raise Refused(_Code.ABORTED, f"job {request.job!r} is being changed by others; try again")


def _too_long(field: str, text: str) -> list[str]:
    if len(text) <= _TEXT:
        return []
    return [f"{field}: has {len(text)} characters, at most {_TEXT} are allowed"]


def refuse_too_long(field: str, text: str) -> None:
    """Raises :class:`Refused` for a text that is longer than records are to hold."""
    problems = _too_long(field, text)
    if problems:
        raise Refused(_Code.INVALID_ARGUMENT, _lines(problems))


def deposed() -> Refused:
    """What a call gets whose leader has just lost the leadership."""
    return Refused(_Code.UNAVAILABLE, "the leadership has just changed hands; try again")


def _lines(lines: list[str]) -> str:
    """The lines, as many as a status message holds, and how many more there are."""
    taken: list[str] = []
    length = 0
    for line in lines:
        length += len(line.encode()) + 1
        if taken and length > _MESSAGE:
            taken.append(f"and {len(lines) - len(taken)} more")
            break
        taken.append(line)
    return "\n".join(taken)
