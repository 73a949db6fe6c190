# SPDX-License-Identifier: Apache-2.0
"""What is over: states that differ by nothing else are one.

Two states may be taken as one if nothing that can happen later, and no invariant, can tell them
apart. Here that is so for four kinds of things, each by what only ever rises:

- An acknowledgement of a generation before the record's, once the job has run. Generations only
  rise, so it is never of the current one again. It is replaced by one that can't be read: a
  planner that looks into it is caught at once, whatever it would have made of it.
- A report that the group of a generation before the record's is broken: what such reports are
  for is the next generation, and that is there.
- What a trainer has said of a generation before the one that its workerd follows: that it has
  stopped, that its group is broken. workerd doesn't go back to an older record. It lets go of this
  only once it is at rest, so that it has decided with it in hand, and writes its progress anew.
- A group of a generation before the record's, in which no rank can take a step and into which none
  can come any more: only a step of a rank in it could change that. See ``Groups.still``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from coordinator.model import Ack, Generation, Phase, RankProgress
from tests.modelcheck.values import JOB, Key, Machine, Process, Violation
from workerd.agent.state import Stopped, TrainerFacts

OVER = Stopped(generation=0)
"""What a trainer has said of an older generation."""


class Unread(tuple[Any, ...]):
    """The ranks of an acknowledgement that is void."""

    __slots__ = ()

    def _read(self, *_: object) -> NoReturn:
        raise Violation("an acknowledgement of another generation is read")

    __iter__ = __getitem__ = __len__ = _read


UNREAD = Unread()


def key(held: Key, record: Generation | None) -> Key:
    """A node's keys under a record. Until the job has run once, all acknowledgements count."""
    if record is None or not record.last_running_generation:
        return held
    ack, progress, generation = held.ack, held.progress, record.generation
    if ack is not None and ack.generation < generation:
        ack = Ack(0, ack.incarnation, UNREAD)
    if progress is not None:
        ranks = tuple(_rank(one, generation) for one in progress.ranks)
        progress = replace(progress, ranks=ranks)
    return held._replace(ack=ack, progress=progress)


def _rank(rank: RankProgress, generation: int) -> RankProgress:
    if 0 < rank.broken_generation < generation:
        return replace(rank, broken_generation=0, broken="")
    return rank


def machine(there: Machine) -> Machine:
    """A machine at rest; nothing it writes is held up."""
    job = None if there.orders is None else there.orders.jobs.get(JOB)
    if job is None or job.generation is None or there.slow or there.outbox or not there.connected:
        return there
    number, runs = job.generation.generation, job.generation.phase >= Phase.RUNNING
    local = there.local
    trainers = tuple(_facts(one, number, runs) for one in local.trainers)
    local = replace(local, trainers=trainers)
    if local.acked is not None and local.acked[1] < number:
        local = replace(local, acked=None, ack_held=False)
    processes = tuple(_process(one) for one in there.processes)
    return there._replace(local=local, processes=processes)


def _facts(facts: TrainerFacts, number: int, runs: bool) -> TrainerFacts:
    if 0 < facts.broken_generation < number:
        facts = replace(facts, broken_generation=0, broken="")
    if facts.stopped is not None and facts.stopped.generation < number + runs:
        facts = replace(facts, stopped=OVER)
    return facts


def _process(process: Process) -> Process:
    standing = process.standing
    newest = max(standing.joined, standing.stopped)
    return process._replace(broken=0) if 0 < process.broken < newest else process
