# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a generation's owners, and generations that change nobody's place."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from coordinator.model import (
    Cause,
    ClusterView,
    FailureClass,
    Generation,
    JobView,
    Phase,
    RankExit,
    Settings,
    TrainerExit,
)
from coordinator.plan import holders, incidents
from coordinator.plan.actions import Transition, Wait
from coordinator.plan.builder import Builder
from coordinator.plan.hang import Hang
from coordinator.plan.placement import candidates, refusal
from coordinator.plan.spread import Pool


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the owners of a generation."""

    lost: tuple[int, ...] = ()
    """Slots whose owner is dead."""
    ended: tuple[tuple[int, int, TrainerExit], ...] = ()
    """(slot, local rank, exit) of ended trainers on living nodes."""
    staged: tuple[int, ...] = ()
    """Slots that an earlier leader wrote for the next generation, without coming to its record."""
    hung: bool = False
    """Whether the ended ones are trainers that hang, and are to be ended."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.ended or self.staged)


def find(view: ClusterView, job: JobView, hung: Hang | None = None) -> Faults:
    """The faults of the current generation's owners, or else who holds up the job.

    An owner whose lease is gone is only suspect, not lost, until it is recorded dead.
    """
    lost: list[int] = []
    over: list[tuple[int, int, TrainerExit]] = []
    staged = tuple(sorted(holders.staged(job)))
    for slot in holders.members(job):
        flags = view.flags.get(slot.node)
        if flags is not None and flags.is_dead(slot.incarnation):
            lost.append(slot.slot)
        elif slot.slot not in staged:
            ended = holders.ended(view, job, slot)
            if ended:
                over.extend((slot.slot, local, ended[local]) for local in sorted(ended))
    faults = Faults(tuple(lost), tuple(over), staged)
    if faults or hung is None:
        return faults
    blamed = {number for number, _, _ in hung.culprits}
    # Rule 8: a hung trainer may be cured yet, but not one that was ended.
    if any(not holders.held_elsewhere(view, job, job.slots[one], blamed) for one in blamed):
        return faults
    return Faults(ended=hung.exits(), hung=bool(blamed))


def first(view: ClusterView, job: JobView, taken: Set[str]) -> Transition | Wait:
    """Generation 1: a node for every slot, all of them at once.

    Nodes that an earlier leader had placed before it got to the record keep their place.
    """
    spec = job.job.spec
    found = candidates(view, job.job, taken)
    kept = {
        one.slot: one.node for one in holders.owners(job) if view.alive(one.node, one.incarnation)
    }
    count = job.job.wanted // spec.block_replicas * spec.block_slots
    open_slots = [number for number in range(count) if number not in kept]
    pool = Pool(view, spec, found, kept)
    if len(pool) < len(open_slots):
        refused = [
            f"{node}: {why}" for node in sorted(view.nodes) if (why := refusal(view, node, spec))
        ]
        return Wait(
            spec.name,
            f"needs {len(open_slots)} nodes, {len(pool)} are free"
            + (f" ({'; '.join(refused[:5])})" if refused else ""),
        )
    build = Builder(view, job, 1)
    for number in open_slots:
        if number in job.slots:
            build.free(job.slots[number])
        build.place(number, pool.take(number))
    for number in range(count, spec.slots):
        if number in kept:
            build.free(job.slots[number])
        build.empty(number)
    absent = tuple(range(job.job.wanted, spec.replicas))
    return build.transition(None, f"start on {count} nodes", absent=absent)


def regroup(view: ClusterView, job: JobView, cause: Cause, why: str) -> Transition:
    """A generation that changes nobody: the group is rebuilt, with another store."""
    current = job.current
    build = Builder(view, job, current.generation + 1)
    return build.transition((cause, ()), why, regroups=regroups(job) + 1)


def restart_ranks(view: ClusterView, job: JobView, ranks: Set[int], why: str) -> Transition:
    """A generation in which some ranks start afresh where they are."""
    current = job.current
    spec = job.job.spec
    build = Builder(view, job, current.generation + 1)
    for slot in holders.members(job):
        local = frozenset(
            one for one in range(len(slot.ranks)) if spec.rank(slot.slot, one) in ranks
        )
        if local:
            build.restart(slot, local)
    return build.transition((Cause.TRAINER_ENDED, ()), why, regroups=regroups(job) + 1)


def regroup_delay(job: JobView, settings: Settings) -> float:
    """How long a broken group waits for a culprit, in seconds."""
    return float(min(settings.regroup * 2 ** min(regroups(job), 16), settings.regroup_max))


def regroups(job: JobView) -> int:
    """Generations in a row that changed nobody; a committed step ends the row."""
    current = job.current
    if job.incident is not None and job.incident.closed:
        return 0
    return current.regroups


def failed(job: JobView, faults: Faults, restarts: int) -> Transition | None:
    """The job's own script ends it: by the same error twice, or by too many ended trainers."""
    spec = job.job.spec
    again = repeated(job, faults)
    if again is not None:
        number, local, exit_ = again
        why = f"for the second time, and would again; its state was that of step {exit_.step}"
    elif restarts > spec.restarts:
        number, local, exit_ = faults.ended[-1]
        why = f"{restarts} trainers have ended, restarts allows {spec.restarts}"
    else:
        return None
    said = exit_.traceback or exit_.message
    who = f"rank {spec.rank(number, local)} on {job.slots[number].node} {describe(exit_)}; {why}"
    return ended(job, Phase.FAILED, f"{who}\n{said}" if said else who)


def repeated(job: JobView, faults: Faults) -> tuple[int, int, TrainerExit] | None:
    """An ended trainer whose script has raised what it raised before, with no step in between.

    The same rank, step and place in the script: it had the same input, since every rank draws its
    batch and its random numbers by the step.
    """
    incident = job.incident
    if incident is None or incident.closed:
        return None
    for number, local, exit_ in faults.ended:
        rank, now = job.job.spec.rank(number, local), raised(exit_)
        if now and any(one.rank == rank and raised(one.exit) == now for one in incident.exits):
            return number, local, exit_
    return None


def raised(exit_: TrainerExit) -> tuple[int, str, str] | None:
    """The step, the exception's type and where it was raised; None for another kind of end."""
    if exit_.failure_class is not FailureClass.SOFTWARE or not exit_.traceback:
        return None
    frames = [line for line in exit_.traceback.splitlines() if line.startswith("  File ")]
    return exit_.step, exit_.cause.partition(":")[0], frames[-1] if frames else ""


def exits(job: JobView, faults: Faults) -> tuple[RankExit, ...]:
    """The ended trainers, as an incident keeps them."""
    found = []
    for number, local, exit_ in faults.ended:
        slot = job.slots[number]
        rank = job.job.spec.rank(number, local)
        found.append(RankExit(rank, slot.node, slot.ranks[local].instance, exit_))
    return tuple(found)


def ended(job: JobView, phase: Phase, why: str) -> Transition:
    """The job's last record."""
    spec = job.job.spec
    current = job.generation or Generation(
        job=spec.name, generation=1, spec_revision=job.job.spec_revision
    )
    incident = incidents.marked(job, phase.name.lower(), why)
    if incident is not None:
        incident = replace(incident, closed=True)
    return Transition(replace(current, phase=phase, reason=why), why, incident=incident)


def some(numbers: tuple[int, ...]) -> str:
    """Numbers for people, not too many of them."""
    shown = ", ".join(str(one) for one in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def describe(exit_: TrainerExit) -> str:
    """How a trainer ended, in a few words."""
    how = (
        f"was ended by signal {exit_.signal}" if exit_.signal else f"exited with code {exit_.code}"
    )
    if exit_.failure_class is FailureClass.CLASS_UNSPECIFIED:
        return how
    return f"{how} ({exit_.failure_class.name.lower()}: {exit_.cause})"
