# SPDX-License-Identifier: Apache-2.0
"""A job's state in one word and one sentence."""

from __future__ import annotations

from coordinator.model import JobState, JobStatus, JobView, Phase, Settings
from coordinator.plan import recover
from coordinator.plan.actions import UpdateStatus, Wait

_ENDED = {
    Phase.FINISHED: JobState.FINISHED,
    Phase.STOPPED: JobState.STOPPED,
    Phase.FAILED: JobState.FAILED,
    Phase.LOST: JobState.LOST,
}


def of(job: JobView, wait: Wait | None) -> JobStatus:
    """The status of a job; ``wait`` is what the planner says that it waits for, if anything."""
    generation, spec = job.generation, job.job.spec
    waits = wait.reason if wait is not None else ""
    if generation is None:
        return JobStatus(JobState.WAITING, waits or "to be placed")
    step = recover.running_step(job)
    if job.status is not None:
        step = max(step, job.status.step)
    if generation.phase in _ENDED:
        finished = generation.phase is Phase.FINISHED
        return JobStatus(
            state=_ENDED[generation.phase],
            reason=generation.reason,
            step=step,
            generation=generation.generation,
            digests=recover.final_digests(job) if finished else (),
        )
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
    return JobStatus(state, reason, replicas, step, generation.generation)


def update(job: JobView, wait: Wait | None, now: float, settings: Settings) -> UpdateStatus | None:
    """The status to write, if it differs: a change of state at once, the rest at its interval."""
    new, old = of(job, wait), job.status
    # an ended job's status stays: its digests came from keys that go with the nodes' leases
    if new == old or (old is not None and old.state.ended and new.state.ended):
        return None
    name = job.job.spec.name
    if old is None or (old.state, old.generation) != (new.state, new.generation):
        return UpdateStatus(name, new, f"{new.state.name}: {new.reason}")
    if now - job.status_at < settings.status:
        return None
    return UpdateStatus(name, new, f"step {new.step}")
