# SPDX-License-Identifier: Apache-2.0
"""A job's state in one word and one sentence."""

from __future__ import annotations

from dataclasses import replace

from coordinator.model import JobState, JobStatus, JobView, Phase, Settings
from coordinator.plan import recover
from coordinator.plan.actions import Transition, UpdateStatus, Wait

_ENDED = {
    Phase.FINISHED: JobState.FINISHED,
    Phase.STOPPED: JobState.STOPPED,
    Phase.FAILED: JobState.FAILED,
    Phase.LOST: JobState.LOST,
}


def of(job: JobView, wait: Wait | None, held: str = "") -> JobStatus:
    """The status of a job.

    ``wait`` is what the planner says that it waits for, if anything, ``held`` why some of its nodes
    that don't answer aren't declared dead.
    """
    generation = job.generation
    state, reason, replicas = _state(job, wait)
    if generation is None:
        return JobStatus(state, reason)
    step = recover.running_step(job)
    if job.status is not None:
        step = max(step, job.status.step)
    finished = generation.phase is Phase.FINISHED
    digests = recover.final_digests(job) if finished else ()
    held = "" if state.ended else held
    return JobStatus(state, reason, replicas, step, generation.generation, digests, held)


def _state(job: JobView, wait: Wait | None) -> tuple[JobState, str, int]:
    """The state, why, and how many replicas run."""
    generation, spec = job.generation, job.job.spec
    waits = wait.reason if wait is not None else ""
    if generation is None:
        return JobState.WAITING, waits or "to be placed", 0
    if generation.phase in _ENDED:
        return _ENDED[generation.phase], generation.reason, 0
    replicas = 0
    blocked = wait is not None and wait.blocked
    if generation.phase is Phase.RUNNING and not blocked:
        paused = job.job.recovery_paused
        notes = [f"automatic recovery is paused ({paused})"] if paused else [waits]
        state, reason = JobState.RUNNING, "; ".join(filter(None, [generation.reason, *notes]))
        replicas = spec.replicas - len(generation.absent_replicas)
    elif recover.open_slots(job) or blocked:
        state, reason = JobState.WAITING, waits or generation.reason
    elif not generation.last_running_generation:
        state, reason = JobState.STARTING, waits or generation.reason
    else:
        state, reason = JobState.RECOVERING, waits or generation.reason
    return state, reason, replicas


def told(job: JobView, end: Transition) -> Transition:
    """The job's end together with its status: the digests of the final state stand in what the
    nodes keep in etcd, which may be gone a moment later."""
    return replace(end, status=of(replace(job, generation=end.generation), None))


def update(
    job: JobView, wait: Wait | None, now: float, settings: Settings, held: str = ""
) -> UpdateStatus | None:
    """The status to write, if it differs: a change of state at once, the rest at its interval."""
    old = job.status
    state, _, _ = _state(job, wait)
    # an ended job's status stays: its digests came from keys that go with the nodes' leases
    if old is not None and old.state.ended and state.ended:
        return None
    number = job.generation.generation if job.generation is not None else 0
    same = old is not None and (old.state, old.generation) == (state, number)
    if same and now - job.status_at < settings.status:
        return None  # before the step is looked for among all ranks
    new = of(job, wait, held)
    if new == old:
        return None
    name = job.job.spec.name
    if not same:
        return UpdateStatus(name, new, f"{new.state.name}: {new.reason}")
    return UpdateStatus(name, new, f"step {new.step}")
