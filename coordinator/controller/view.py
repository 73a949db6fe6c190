# SPDX-License-Identifier: Apache-2.0
"""Keeps the leader's view of the cluster, from one list and then from every change.

It knows no clock, no thread and no etcd: events and their time go in, immutable views come out.
A record that can't be read is reported by its key and stops nothing else:

- a node's own (registration, acknowledgement, progress) keeps its last readable value;
- of a job (spec, generation, slot): the whole job is left alone until it can be read;
- flags: the node takes no slot; an assignment: the node counts as taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from coordinator.controller import records
from coordinator.model import (
    Ack,
    Assignment,
    ClusterView,
    Generation,
    Incident,
    Job,
    JobStatus,
    JobView,
    LiveNode,
    Node,
    NodeFlags,
    Progress,
    Slot,
    SpareAssignment,
    Suspect,
    Verdict,
)
from coordinator.store import KeyKind, KeyValue, ParsedKey, RecordError, keys

K = TypeVar("K")
V = TypeVar("V")

_OF_JOB = frozenset(
    {
        KeyKind.JOB_SPEC,
        KeyKind.JOB_STATUS,
        KeyKind.GENERATION,
        KeyKind.SLOT,
        KeyKind.ACK,
        KeyKind.PROGRESS,
    }
)
_ASSIGNED = ("", -1)
"""The place that an assignment names, beside (job, slot)."""
_JOB_STANDS_STILL = frozenset({KeyKind.JOB_SPEC, KeyKind.GENERATION, KeyKind.SLOT})
_REVISIONS_KEPT = frozenset({KeyKind.GENERATION, KeyKind.FLAGS})
# Progress that counts as movement; the rate and what was pulled are no progress.
_Place = tuple[int, int, int, int, str]


class _Table(Generic[K, V]):
    """A dict that hands out copies, the same one until something changes."""

    __slots__ = ("_frozen", "live")

    def __init__(self) -> None:
        self.live: dict[K, V] = {}
        self._frozen: Mapping[K, V] | None = None

    def set(self, key: K, value: V | None) -> None:
        if value is None:
            self.live.pop(key, None)
        else:
            self.live[key] = value
        self._frozen = None

    def frozen(self) -> Mapping[K, V]:
        if self._frozen is None:
            self._frozen = dict(self.live)
        return self._frozen


@dataclass(slots=True)
class _Job:
    """What is known of one job, while it grows."""

    job: Job | None = None
    status: JobStatus | None = None
    generation: Generation | None = None
    slots: _Table[int, Slot] = field(default_factory=_Table)
    acks: _Table[str, Ack] = field(default_factory=_Table)
    progress: _Table[str, Progress] = field(default_factory=_Table)
    unreadable: set[str] = field(default_factory=set)
    phase_at: float = 0.0
    progress_at: float = 0.0
    broken_at: float | None = None
    status_at: float = float("-inf")
    created: int = 0
    view: JobView | None = None

    @property
    def ended(self) -> bool:
        """Whether its slots hold nobody any more."""
        return self.generation is not None and self.generation.phase.ended

    def set_generation(self, value: Generation | None, now: float) -> None:
        before, self.generation = self.generation, value
        if value is None:
            return
        if before is None or before.generation != value.generation:
            self.broken_at = None
            if any(self._broken(one) for one in self.progress.live.values()):
                self.broken_at = now
        elif before.phase == value.phase:
            return
        self.phase_at = self.progress_at = now

    def set_progress(self, node: str, value: Progress | None, now: float) -> None:
        before = self.progress.live.get(node)
        self.progress.set(node, value)
        if value is None:
            return
        if _places(value) != _places(before):
            self.progress_at = now
        if self.broken_at is None and self._broken(value):
            self.broken_at = now

    def _broken(self, progress: Progress) -> bool:
        number = self.generation.generation if self.generation is not None else 0
        return any(one.broken_generation == number > 0 for one in progress.ranks)

    def frozen(self, incidents: Mapping[str, Incident]) -> JobView | None:
        if self.view is None and self.job is not None and not self.unreadable:
            named = self.generation.incident if self.generation is not None else ""
            self.view = JobView(
                job=self.job,
                status=self.status,
                generation=self.generation,
                slots=self.slots.frozen(),
                acks=self.acks.frozen(),
                progress=self.progress.frozen(),
                incident=incidents.get(named),
                phase_at=self.phase_at,
                progress_at=self.progress_at,
                broken_at=self.broken_at,
                status_at=self.status_at,
                created=self.created,
            )
        return self.view


def _places(progress: Progress | None) -> frozenset[tuple[int, _Place]]:
    if progress is None:
        return frozenset()
    return frozenset(
        (one.rank, (one.generation, int(one.phase), one.step, one.restored, one.digest))
        for one in progress.ranks
    )


class Observer:
    """The one who keeps the view. Owned by one thread."""

    def __init__(self) -> None:
        self.revision = 0
        """Of etcd: everything up to here is in the view."""
        self.unreadable: dict[str, str] = {}
        """Why a record can't be read, by key."""
        self._mod_revisions: dict[str, int] = {}
        self._nodes: _Table[str, LiveNode] = _Table()
        self._flags: _Table[str, NodeFlags] = _Table()
        self._assignments: _Table[str, Assignment] = _Table()
        self._spares: _Table[str, SpareAssignment] = _Table()
        self._incidents: dict[str, Incident] = {}
        self._jobs: dict[str, _Job] = {}
        self._last_incarnation: dict[str, str] = {}
        self._addresses: dict[tuple[str, str], str] = {}
        self._verdicts: dict[tuple[str, str], tuple[Verdict, str]] = {}
        self._suspects: Mapping[tuple[str, str], Suspect] | None = None
        # Kept up with every change, since a look at all places of a large cluster takes long.
        self._holds: dict[str, dict[tuple[str, int], str]] = {}
        self._gone: dict[str, set[str]] = {}

    def mod_revision(self, key: str) -> int:
        """The revision of the last change of a generation or flags key; 0 while it's absent."""
        return self._mod_revisions.get(key, 0)

    def wrote(self, key: str, revision: int) -> None:
        """An own write has changed a generation or flags key, ahead of the watch."""
        if keys.parse(key).kind in _REVISIONS_KEPT:
            self._mod_revisions[key] = revision

    def list(self, items: Mapping[str, KeyValue], revision: int, now: float) -> None:
        """All keys as they stood at a revision: the view begins with them."""
        for key, value in items.items():
            self._take(key, value, now, first=True)
        self.revision = revision

    def change(self, key: str, value: KeyValue | None, now: float) -> None:
        """A key has changed; None: it is gone. Seconds of the monotonic clock."""
        self._take(key, value, now, first=False)

    def verdict(self, node: str, incarnation: str, verdict: Verdict, detail: str) -> None:
        """What a direct probe said; forgotten when the incarnation is no suspect any more."""
        # Not by suspects(): it would be made anew for each of thousands of verdicts.
        if incarnation in self._gone.get(node, ()):
            self._verdicts[node, incarnation] = (verdict, detail)
            self._suspects = None

    def forget_verdicts(self) -> None:
        """As if no suspect had been asked yet."""
        if self._verdicts:
            self._verdicts = {}
            self._suspects = None

    def view(self, no_eviction_before: float = float("-inf")) -> ClusterView:
        """The view at :attr:`revision`."""
        jobs = {}
        for name, job in self._jobs.items():
            frozen = job.frozen(self._incidents)
            if frozen is not None:
                jobs[name] = frozen
        return ClusterView(
            nodes=self._nodes.frozen(),
            flags=self._flags.frozen(),
            assignments=self._assignments.frozen(),
            spares=self._spares.frozen(),
            jobs=jobs,
            suspects=self.suspects(),
            no_eviction_before=no_eviction_before,
        )

    # ---- changes

    def _take(self, key: str, value: KeyValue | None, now: float, *, first: bool) -> None:
        parsed = keys.parse(key)
        if parsed.kind in _REVISIONS_KEPT:
            if value is None:
                self._mod_revisions.pop(key, None)
            else:
                self._mod_revisions[key] = value.mod_revision
        record, readable = None, True
        if value is not None:
            try:
                record = records.load(parsed.kind, value)
            except RecordError as error:
                self.unreadable[key] = str(error)
                readable = False
        if readable:
            self.unreadable.pop(key, None)
        if parsed.kind in _OF_JOB:
            created = value.create_revision if value is not None else 0
            self._take_of_job(
                parsed, key, record, created=created, readable=readable, now=now, first=first
            )
        elif parsed.kind is KeyKind.INCIDENT:
            self._take_incident(parsed.name, record)
        elif value is not None and not readable:
            self._take_unreadable(parsed, key)
        else:
            self._take_of_node(parsed, value, record)

    def _take_of_node(self, parsed: ParsedKey, value: KeyValue | None, record: Any) -> None:
        node = parsed.node
        match parsed.kind:
            case KeyKind.NODE:
                live = None
                if isinstance(record, Node) and value is not None:
                    live = LiveNode(record, value.lease, value.create_revision)
                    self._last_incarnation[node] = record.incarnation
                    self._addresses[node, record.incarnation] = record.control_address
                self._nodes.set(node, live)
            case KeyKind.FLAGS:
                self._flags.set(node, record)
            case KeyKind.ASSIGNMENT:
                self._assignments.set(node, record)
                self._hold(node, _ASSIGNED, record.incarnation if record is not None else "")
            case KeyKind.SPARE:
                self._spares.set(node, record)
            case _:
                return
        self._review(node)

    def _take_unreadable(self, parsed: ParsedKey, key: str) -> None:
        node = parsed.node
        if parsed.kind is KeyKind.FLAGS:
            known = self._flags.live.get(node, NodeFlags())
            self._flags.set(node, replace(known, quarantined=f"the record {key} can't be read"))
        elif parsed.kind is KeyKind.ASSIGNMENT and node not in self._assignments.live:
            self._assignments.set(node, Assignment(node=node, slot=-1))

    def _take_incident(self, name: str, record: Incident | None) -> None:
        if record is None:
            self._incidents.pop(name, None)
        else:
            self._incidents[name] = record
        for job in self._jobs.values():
            if job.generation is not None and job.generation.incident == name:
                job.view = None

    def _take_of_job(
        self,
        parsed: ParsedKey,
        key: str,
        record: Any,
        *,
        created: int,
        readable: bool,
        now: float,
        first: bool,
    ) -> None:
        job = self._jobs.setdefault(parsed.job, _Job())
        job.view = None
        job.unreadable.discard(key)
        if not readable:
            if parsed.kind in _JOB_STANDS_STILL:
                job.unreadable.add(key)
            return
        match parsed.kind:
            case KeyKind.JOB_SPEC:
                job.job = record
                job.created = created
            case KeyKind.JOB_STATUS:
                job.status = record
                job.status_at = float("-inf") if first else now
            case KeyKind.GENERATION:
                ended = job.ended
                job.set_generation(record, now)
                if job.ended != ended:
                    for number, slot in job.slots.live.items():
                        self._hold_slot(parsed.job, number, slot, None if job.ended else slot)
            case KeyKind.SLOT:
                before = job.slots.live.get(parsed.number)
                job.slots.set(parsed.number, record)
                self._hold_slot(parsed.job, parsed.number, before, None if job.ended else record)
            case KeyKind.ACK:
                job.acks.set(parsed.node, record)
            case KeyKind.PROGRESS:
                job.set_progress(parsed.node, record, now)

    # ---- suspects

    def suspects(self) -> Mapping[tuple[str, str], Suspect]:
        """Every incarnation that has a place and no lease, and isn't recorded dead."""
        if self._suspects is None:
            missing = {(node, one) for node, gone in self._gone.items() for one in gone}
            self._verdicts = {who: one for who, one in self._verdicts.items() if who in missing}
            self._suspects = {who: self._suspect(*who) for who in missing}
            self._forget_addresses(missing)
        return self._suspects

    def _hold(self, node: str, place: tuple[str, int], incarnation: str) -> None:
        """An incarnation of a node has a place from now on; "": no more."""
        holds = self._holds.setdefault(node, {})
        if incarnation:
            holds[place] = incarnation
        else:
            holds.pop(place, None)
            if not holds:
                del self._holds[node]

    def _hold_slot(self, job: str, number: int, before: Slot | None, after: Slot | None) -> None:
        if before is not None and before.node:
            self._hold(before.node, (job, number), "")
            self._review(before.node)
        if after is not None and after.node:
            self._hold(after.node, (job, number), after.incarnation)
            self._review(after.node)

    def _review(self, node: str) -> None:
        """Find out which incarnations of a node have a place and no lease."""
        placed = set(self._holds.get(node, {}).values())
        if node in self._spares.live and node in self._last_incarnation:
            placed.add(self._last_incarnation[node])
        gone = {one for one in placed if self._missing(node, one)}
        if gone != self._gone.get(node, set()):
            self._suspects = None
            self._gone[node] = gone
            if not gone:
                del self._gone[node]

    def _missing(self, node: str, incarnation: str) -> bool:
        live = self._nodes.live.get(node)
        if live is not None and live.record.incarnation == incarnation:
            return False
        flags = self._flags.live.get(node)
        return flags is None or not flags.is_dead(incarnation)

    def _suspect(self, node: str, incarnation: str) -> Suspect:
        verdict, detail = self._verdicts.get((node, incarnation), (Verdict.UNKNOWN, ""))
        held = self._assignments.live.get(node)
        # A leader that came after its record was gone knows it by its place alone.
        placed = held.control_address if held and held.incarnation == incarnation else ""
        address = self._addresses.get((node, incarnation), placed)
        return Suspect(node, incarnation, address, verdict, detail)

    def _forget_addresses(self, missing: set[tuple[str, str]]) -> None:
        """Of incarnations that nobody can ask for any more: each restart of a node brings one."""
        if len(self._addresses) > 2 * len(self._nodes.live) + 1000:
            self._addresses = {
                (node, incarnation): address
                for (node, incarnation), address in self._addresses.items()
                if (node, incarnation) in missing or self._last_incarnation.get(node) == incarnation
            }
