# SPDX-License-Identifier: Apache-2.0
"""What a failure costs with many nodes: a real etcd and coordinator, and nodes without trainers.

Each node holds a real lease, watches its keys, and acknowledges and reports what the agent's
production code tells it to (see :mod:`benchmarks.scale.node` for what is played). All of it shares
this machine: what real nodes would do on machines of their own, the processes that play them do
here, so their CPU time stands in the table too.

The clock of a failure starts when the victims' leases are revoked, and their ports refuse. Times
by phase: ``detect`` until PAUSE is written, ``tell`` until the last node has read it and its
trainer has stopped, ``ack`` until its acknowledgement is written, ``restore`` until the leader has
written RESTORE, ``join`` until the last node has joined, ``run`` until RUNNING is written,
``step`` until the incident is closed. ``acknowledged`` is all of it from the leases' end to the
last acknowledgement.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.jobs import pause
from benchmarks.scale.bed import Bed, Usage
from benchmarks.scale.follow import Follow
from benchmarks.table import Row
from coordinator.controller import records
from coordinator.model import JobSpec, Node, Phase, Slot
from coordinator.store import KeyKind, keys

_JOB: Final = "scale"
_SPARES: Final = 16
_SINGLES: Final = 3
_TOGETHER: Final = 8
_IDLE: Final = 10.0
_TARGET: Final = 3.0
_PER_PROCESS: Final = 5120
_PHASES: Final = ("detect", "tell", "ack", "restore", "join", "run", "step")


@dataclass(frozen=True, slots=True)
class _Failure:
    """One measured failure."""

    spans: dict[str, float]
    total: float
    acknowledged: float
    acknowledged_cpu: dict[str, float]
    """Seconds of CPU until RESTORE is written."""
    used: Usage
    writes: Counter[str]
    bytes: Counter[str]


def of(nodes: int) -> Callable[[], list[Row]]:
    """The benchmark with so many nodes."""
    return lambda: _Measured(nodes).rows()


def _ttl(nodes: int) -> int:
    """Seconds of a lease: at most some 250 renewals a second, for all nodes together.

    And enough for a machine that does much else: a failure here begins with a revocation.
    """
    return max(60, nodes * 3 // 250)


def _patience(nodes: int) -> float:
    """Seconds that anything may take, also on a machine that does much else."""
    return max(300.0, nodes / 10)


class _Measured:
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._patience = _patience(nodes)
        self._name = f"scale.{nodes}"
        self._chance = random.Random(1)  # noqa: S311 - victims, not secrets

    def rows(self) -> list[Row]:
        processes = -(-self._nodes // _PER_PROCESS)
        with Bed(_ttl(self._nodes), processes) as bed:
            self._bed = bed
            self._start()
            self._follow = Follow(bed.store, _JOB, bed.cpu)
            try:
                return self._measure()
            finally:
                self._follow.close()

    def _start(self) -> None:
        names = [f"n{number}" for number in range(self._nodes)]
        self._player = {}
        count = len(self._bed.players)
        for number, player in enumerate(self._bed.players):
            mine = names[number::count]
            player.send("start", mine)
            self._player.update(dict.fromkeys(mine, player))
        for player in self._bed.players:
            player.answer()

    def _measure(self) -> list[Row]:
        self._spec = JobSpec(
            name=_JOB,
            command=("true",),
            replicas=self._nodes - _SPARES,
            spares=_SPARES,
        )
        started = time.monotonic()
        self._bed.admin.submit(self._spec, timeout=60.0)
        self._follow.wait(
            lambda: self._follow.latest.phase is Phase.RUNNING, self._patience, "the job runs"
        )
        start = time.monotonic() - started
        self._await_spares()
        idle = self._idle()
        singles = [self._fail(1) for _ in range(_SINGLES)]
        together = self._fail(_TOGETHER)
        memory = self._bed.memory()
        return [
            Row.of(f"{self._name}.start", [start], "s"),
            *self._idle_rows(idle),
            *self._failure_rows("one", singles),
            *self._failure_rows("eight", [together]),
            *(Row.of(f"{self._name}.memory.{name}", [mb], "MB") for name, mb in memory.items()),
        ]

    def _idle(self) -> Usage:
        before = self._bed.usage()
        pause(_IDLE)
        return self._bed.usage().since(before)

    # ---- a failure

    def _await_spares(self) -> None:
        """Wait until every spare that there is is warm."""
        deadline = time.monotonic() + self._patience
        while True:
            slots, spares = self._owners()
            found = self._bed.store.read([keys.node(one) for one in spares]).items.values()
            kept: list[Node] = [records.load(KeyKind.NODE, one) for one in found]
            if len(spares) + len(slots) == len(self._player) and all(one.warm for one in kept):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(spares)} spares, not all of them warm")
            pause(0.2)

    def _owners(self) -> tuple[dict[int, str], list[str]]:
        """The nodes that have slots, by slot, and the spares."""
        found = self._bed.store.list(keys.slots_prefix(_JOB)).items.values()
        slots: list[Slot] = [records.load(KeyKind.SLOT, one) for one in found]
        kept = self._bed.store.list(keys.SPARES).items
        return {one.slot: one.node for one in slots if one.node}, [
            keys.parse(one).node for one in kept
        ]

    def _fail(self, count: int) -> _Failure:
        self._await_spares()
        follow, store = self._follow, self._bed.store
        owners, _ = self._owners()
        before = follow.latest
        # Who offers a store is asked for more than the others.
        others = sorted(owners.keys() - set(before.rendezvous_slots))
        victims = [owners[one] for one in self._chance.sample(others, count)]
        leases = []
        at = time.monotonic()
        for player in self._bed.players:
            player.ask("stop", at, before.generation)
        for name in victims:
            leases += self._player.pop(name).ask("kill", [name])["leases"]
        follow.writes.clear()
        follow.bytes.clear()
        used = before_it = self._bed.usage()
        began = time.monotonic()
        for lease in leases:
            store.revoke(lease)

        def recovered() -> bool:
            latest = follow.latest
            return (
                latest.generation > before.generation
                and latest.phase is Phase.RUNNING
                and latest.incident in follow.closed
            )

        while True:
            follow.wait(recovered, self._patience, f"recovered from the loss of {victims}")
            owners, _ = self._owners()
            if len(owners) == self._spec.slots and not set(owners.values()) & set(victims):
                break
            before = follow.latest  # some were declared dead later: another generation comes
        used = self._bed.usage().since(used)
        return self._failure(began, before_it.cpu, used)

    def _failure(self, began: float, cpu: dict[str, float], used: Usage) -> _Failure:
        follow = self._follow
        latest = follow.latest
        number = latest.generation
        marks = self._marks(number)
        ends = {
            "detect": follow.phases[number, Phase.PAUSE],
            "tell": marks["stopped"],
            "ack": marks["acked"],
            "restore": follow.phases[number, Phase.RESTORE],
            "join": marks["joined"],
            "run": follow.phases[number, Phase.RUNNING],
            "step": follow.closed[latest.incident],
        }
        spans, at = {}, began
        for name in _PHASES:
            spans[name] = ends[name] - at
            at = ends[name]
        return _Failure(
            spans=spans,
            total=ends["step"] - began,
            acknowledged=ends["ack"] - began,
            acknowledged_cpu={
                name: value - cpu[name]
                for name, value in follow.used[number, Phase.RESTORE].items()
            },
            used=used,
            writes=Counter(follow.writes),
            bytes=Counter(follow.bytes),
        )

    def _marks(self, generation: int) -> dict[str, float]:
        """When the last node did something in a generation. Raises RuntimeError if not all did."""
        last: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for player in self._bed.players:
            marks: dict[str, Any] = player.ask("marks").get(str(generation), {})
            for what, (_, latest, count) in marks.items():
                last[what] = max(latest, last.get(what, latest))
                counts[what] += count
        for what in ("stopped", "acked", "restored", "joined"):
            if counts[what] != self._spec.ranks:
                raise RuntimeError(f"{counts[what]} of {self._spec.ranks} nodes have {what}")
        return last

    # ---- rows

    def _idle_rows(self, idle: Usage) -> list[Row]:
        name = f"{self._name}.idle"
        return [
            *(Row.of(f"{name}.cpu.{one}", [s / _IDLE], "cores") for one, s in idle.cpu.items()),
            *(Row.of(f"{name}.etcd.{one}", [n / _IDLE], "/s") for one, n in idle.etcd.items()),
        ]

    def _failure_rows(self, which: str, seen: Sequence[_Failure]) -> list[Row]:
        name = f"{self._name}.{which}"
        rows = [
            Row.of(
                f"{name}.acknowledged",
                [one.acknowledged for one in seen],
                "s",
                versus=f"target of {_TARGET:g} s",
                against=_TARGET,
            ),
            Row.of(f"{name}.total", [one.total for one in seen], "s"),
        ]
        for phase in _PHASES:
            rows.append(Row.of(f"{name}.{phase}", [one.spans[phase] for one in seen], "s"))
        for what in ("writes", "bytes"):
            counts: list[Counter[str]] = [getattr(one, what) for one in seen]
            status = KeyKind.JOB_STATUS.value
            # The status is written by the clock, not by the failure.
            taken = [float(one.total() - one[status]) for one in counts]
            rows.append(Row.of(f"{name}.leader.{what}", taken, ""))
            rows.append(
                Row.of(f"{name}.leader.status.{what}", [float(one[status]) for one in counts], "")
            )
        for one in seen[0].acknowledged_cpu:
            spent = [each.acknowledged_cpu[one] for each in seen]
            rows.append(Row.of(f"{name}.acknowledged.cpu.{one}", spent, "s"))
        for one in seen[0].used.cpu:
            rows.append(Row.of(f"{name}.cpu.{one}", [each.used.cpu[one] for each in seen], "s"))
        for one in seen[0].used.etcd:
            rows.append(Row.of(f"{name}.etcd.{one}", [each.used.etcd[one] for each in seen], ""))
        return rows
