# SPDX-License-Identifier: Apache-2.0
"""Who is dead. There is one way to die: the fenced record of the dead incarnation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from coordinator.model import (
    ClusterView,
    JobView,
    Line,
    Phase,
    Settings,
    Slot,
    StepPhase,
    Verdict,
)
from coordinator.plan import evidence, holders
from coordinator.plan.actions import Action, AskWitnesses, DeclareDead, HoldBack, Probe, Wait
from coordinator.plan.evidence import Judgement, Weighed, Who

_GONE = frozenset({Verdict.DEAD, Verdict.SILENT})
_NAMED = 3
"""How many nodes a status names: it must not grow with what doesn't answer."""


def doubt(view: ClusterView, settings: Settings) -> str:
    """Why a leader doesn't trust the silence of nodes without a lease; empty while it does.

    When most are silent at once, it is rather the leader that is cut off, and etcd with it.
    """
    verdicts = [
        one.verdict
        for who, one in view.suspects.items()
        if not view.flags_of(who[0]).is_dead(who[1])
    ]
    silent = verdicts.count(Verdict.SILENT)
    heard = verdicts.count(Verdict.ALIVE) + verdicts.count(Verdict.DEAD)
    heard += sum(one.line is Line.ANSWERS for one in view.contacts.values()) if silent else 0
    if silent <= max(0.5, settings.disruption) * (silent + heard):
        return ""
    return (
        f"{silent} nodes without a lease are silent and only {heard} can be heard: "
        "this coordinator may be the one that is cut off"
    )


def of_suspects(view: ClusterView, now: float, settings: Settings) -> Iterator[Action]:
    """Probe every incarnation whose lease is gone; declare dead who doesn't answer."""
    doubted = doubt(view, settings)
    for (node, incarnation), suspect in sorted(view.suspects.items()):
        if view.flags_of(node).is_dead(incarnation):
            continue
        live = view.nodes.get(node)
        if live is not None and live.record.incarnation != incarnation:
            yield DeclareDead(
                node, incarnation, f"the node came back as incarnation {live.record.incarnation}"
            )
        elif suspect.verdict is Verdict.SILENT and doubted:
            yield HoldBack(node, incarnation, f"its lease is gone; but {doubted}", True)
            yield Probe(node, incarnation, suspect.control_address, "its lease is gone")
        elif suspect.verdict in _GONE and now >= view.no_eviction_before:
            yield DeclareDead(
                node, incarnation, f"its lease is gone and a direct probe says: {suspect.detail}"
            )
        elif suspect.verdict not in _GONE:
            yield Probe(node, incarnation, suspect.control_address, "its lease is gone")


def of_contacts(view: ClusterView, judged: Mapping[Who, Weighed]) -> Iterator[Action]:
    """Who doesn't answer, before its lease ends: declare it dead where that is plain.

    Otherwise others are asked to try; and the owners are asked at once that have said nothing of a
    group which others say is broken.
    """
    for (node, incarnation), weighed in judged.items():
        contact = view.contacts[node, incarnation]
        if weighed.judgement is Judgement.DEAD:
            yield DeclareDead(node, incarnation, f"it does not answer: {weighed.reason}")
        elif weighed.judgement is Judgement.HELD:
            yield HoldBack(node, incarnation, weighed.reason, weighed.over_budget)
        elif weighed.judgement is Judgement.OPEN and not contact.said:
            asked = evidence.witnesses(view, node, incarnation)
            if asked:
                yield AskWitnesses(
                    node, incarnation, contact.tried, contact.addresses, asked, weighed.reason
                )
    for job in view.jobs.values():
        if job.broken_at is None or job.generation is None or job.generation.phase.ended:
            continue
        for slot in holders.members(job):
            who = (slot.node, slot.incarnation)
            known = view.contacts.get(who)
            if known is None or known.line is not Line.ANSWERS or not view.alive(*who):
                continue
            if evidence.silent_in_broken(job, who):
                yield Probe(*who, known.addresses[0], "its group is broken, it has not said so")


def undecided(
    view: ClusterView,
    job: JobView,
    now: float,
    settings: Settings,
    judged: Mapping[Who, Weighed],
) -> list[Slot]:
    """The other members whose end is to be known in a moment.

    They are being asked, which a probe's deadline bounds, or are just declared dead. What fails
    together is then mended together: each generation has to be acknowledged by everybody.
    """
    soon = {Verdict.UNKNOWN}
    if now >= view.no_eviction_before:
        soon |= {Verdict.DEAD} if doubt(view, settings) else _GONE
    who = {who for who, one in view.suspects.items() if one.verdict in soon}
    return [
        one for one in (holders.members(job) if who else ()) if (one.node, one.incarnation) in who
    ] + soon_known(job, judged)


def held(job: JobView, back: Mapping[Who, HoldBack]) -> str:
    """The members on which no verdict is given for now, and why; in the order of their slots."""
    said = []
    for slot in holders.members(job) if back else ():
        one = back.get((slot.node, slot.incarnation))
        if one is not None:
            said.append(f"{slot.node}: {one.reason}")
    more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return "; ".join(said[:_NAMED]) + more


def soon_known(job: JobView, judged: Mapping[Who, Weighed]) -> list[Slot]:
    """The members with a lease that don't answer, of whom more is known in a moment."""
    soon = (Judgement.OPEN, Judgement.DEAD)
    who = {who for who, one in judged.items() if one.judgement in soon}
    return [
        one for one in (holders.members(job) if who else ()) if (one.node, one.incarnation) in who
    ]


def of_deadlines(
    view: ClusterView,
    job: JobView,
    now: float,
    settings: Settings,
    judged: Mapping[Who, Weighed],
) -> Iterator[Action]:
    """Who misses the deadline of a phase is lost itself (rule 7), but never as a last holder.

    Nobody counts on those that don't answer; a verdict on them may be on its way already.
    """
    generation = job.generation
    if generation is None or now < view.no_eviction_before:
        return
    waited = now - job.phase_at
    late: list[tuple[Slot, str]] = []
    if generation.phase is Phase.PAUSE and waited >= min(settings.pause, settings.start):
        for slot in holders.members(job):
            limit = _pause_limit(slot, settings)
            if waited >= limit and holders.acks(job, slot) is None:
                late.append((slot, f"it has not acknowledged PAUSE within {limit:g} s"))
    elif generation.phase is Phase.RESTORE and waited >= settings.restore:
        for slot in holders.members(job):
            for local in range(len(slot.ranks)):
                seen = holders.progress(job, slot, local)
                if seen is None or seen.restored < generation.generation:
                    late.append((slot, f"it has not restored within {settings.restore:g} s"))
                    break
    numbers = {slot.slot for slot, _ in late}
    numbers |= {
        one.slot
        for one in (holders.owners(job) if judged and late else ())
        if (one.node, one.incarnation) in judged
    }
    nodes = {slot.node for slot, _ in late}
    for slot, why in late:
        if view.flags_of(slot.node).is_dead(slot.incarnation) or _is_kept(job, slot, nodes):
            continue
        known = judged.get((slot.node, slot.incarnation))
        if known is not None and known.judgement is Judgement.DEAD:
            continue
        # before the first step there is nothing to lose: all begin anew
        if not holders.has_run(job) or holders.held_elsewhere(view, job, slot, numbers):
            yield DeclareDead(slot.node, slot.incarnation, why)
        else:
            yield Wait(
                job.job.spec.name,
                f"node {slot.node}: {why}; nobody else is known to hold its shard position, "
                "so it is not given up while it may still answer",
                blocked=True,
            )


def _is_kept(job: JobView, slot: Slot, late: Set[str]) -> bool:
    """Whether a late owner has only late ones to pull from: they are to blame, not it."""
    spec = job.job.spec
    serving: dict[int, set[str]] = {}
    for source in job.current.sources:
        serving.setdefault(source.shard_position, set()).add(source.node)
    for local in range(len(slot.ranks)):
        sources = serving.get(spec.shard_position(spec.rank(slot.slot, local)), set())
        if sources and sources <= late and slot.node not in sources:
            return True
    return False


def doubted(view: ClusterView, job: JobView, now: float, settings: Settings) -> tuple[int, ...]:
    """The ranks that miss RESTORE's deadline although they could pull from one node alone.

    Either of the two may hang, and none of what they say tells which: that node has restored, and
    may have stopped serving since.
    """
    generation = job.current
    if generation.phase is not Phase.RESTORE or now < view.no_eviction_before:
        return ()
    if now - job.phase_at < settings.restore:
        return ()
    late = [
        (slot, local)
        for slot in holders.members(job)
        for local in range(len(slot.ranks))
        if (seen := holders.progress(job, slot, local)) is None
        or seen.restored < generation.generation
    ]
    nodes = {slot.node for slot, _ in late}
    found = []
    for slot, local in late:
        rank = job.job.spec.rank(slot.slot, local)
        position = job.job.spec.shard_position(rank)
        serving = {one.node for one in generation.sources if one.shard_position == position}
        given = holders.acks(job, slot)
        pulls = given is not None and given[local].phase is StepPhase.EMPTY
        if pulls and len(serving) == 1 and not serving & nodes:
            found.append(rank)
    return tuple(found)


def _pause_limit(slot: Slot, settings: Settings) -> float:
    """An owner whose trainers exist must answer soon; one that may still start them gets longer.

    No RESTORE has named its trainers yet then, however many generations that has taken.
    """
    starting = any(not rank.instance for rank in slot.ranks)
    return settings.start if starting else settings.pause
