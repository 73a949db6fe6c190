# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a simulated cluster, when, and when it is well again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.model import TrainerExit
from tests.simulator.node import SimNode

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

DAY = 86_400.0
HOUR = 3_600.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: what it does, and how often it comes."""

    name: str
    effect: str
    per_day: float


class Faults:
    """Lets faults of some kinds happen, each at its own rate, independently of all others.

    ``repair`` scales the hours that a machine is away.
    """

    def __init__(self, cluster: Cluster, kinds: tuple[Kind, ...], repair: float = 1.0) -> None:
        self._cluster = cluster
        self._dice = random.Random(f"faults {cluster.seed}")
        self._repair = repair
        self._over = False
        self.hold = False
        """Whether nothing goes wrong for now."""
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self._effects: Mapping[str, Callable[[], str | None]] = {
            "trainer": self._trainer,
            "device": self._device,
            "machine": self._machine,
            "line": self._line,
            "hang": self._hang,
            "workerd": self._workerd,
            "etcd line": self._etcd_line,
            "leader": self._leader,
            "etcd leader": self._etcd_leader,
            "etcd": self._etcd,
            "leases": self._leases,
            "answer": self._answer,
        }
        for kind in kinds:
            if kind.per_day > 0:
                self._next(kind)

    def end(self) -> None:
        """Nothing more goes wrong; what is broken is mended in its time."""
        self._over = True

    def _next(self, kind: Kind) -> None:
        wait = self._dice.expovariate(kind.per_day / DAY)
        self._cluster.clock.after(wait, lambda: self._happen(kind))

    def _happen(self, kind: Kind) -> None:
        if self._over:
            return
        self._next(kind)
        if not self.hold:
            self.now(kind.effect, kind.name)

    def now(self, effect: str, name: str = "") -> bool:
        """Let it happen now; whether it could."""
        self._cluster.eventful()
        name = name or effect
        about = self._effects[effect]()
        if about is None:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        self.note(f"{name}: {about}")
        self._cluster.checks.fault(about.partition(" ")[0], name)
        return True

    def note(self, what: str) -> None:
        """For whoever reads what came before a failure."""
        self.log.append(f"{self._cluster.clock.now():.3f} {what}")

    # ---- on a node

    def _node(self, *, with_trainer: bool = False) -> SimNode | None:
        well = [
            one
            for one in self._cluster.nodes.values()
            if one.up and not one.mute and not one.isolated and (one.trainers or not with_trainer)
        ]
        return self._dice.choice(well) if well else None

    def _later(self, hours: float, run: Callable[[], None]) -> None:
        wait = hours * HOUR * self._repair * self._dice.uniform(0.5, 1.5)

        def due() -> None:
            self._cluster.eventful()
            run()

        self._cluster.clock.after(wait, due)

    def _trainer(self) -> str | None:
        node = self._node(with_trainer=True)
        if node is None:
            return None
        trainer = self._dice.choice(list(node.trainers.values()))
        trainer.end(TrainerExit(code=1, message="an exception"))
        return f"{node.name} {trainer.instance}"

    def _device(self) -> str | None:
        """The process ends by its device's error; the machine leaves to be mended."""
        node = self._node(with_trainer=True)
        if node is None:
            return None
        life = node.incarnation
        for trainer in list(node.trainers.values()):
            trainer.end(TrainerExit(code=1, message="a device error"))

        def leave() -> None:
            if node.up and node.incarnation == life:
                node.crash()
                self._later(2.0, node.boot)

        self._cluster.clock.after(self._dice.uniform(30.0, 90.0), leave)
        return node.name

    def _machine(self) -> str | None:
        node = self._node()
        if node is None:
            return None
        node.crash()
        self._later(1.0, node.boot)
        return node.name

    def _line(self) -> str | None:
        node = self._node()
        if node is None:
            return None
        node.isolate()
        self._later(0.3, lambda: node.mend() if node.isolated else None)
        return node.name

    def _hang(self) -> str | None:
        node = self._node(with_trainer=True)
        if node is None:
            return None
        trainer = self._dice.choice(list(node.trainers.values()))
        trainer.hang()
        return f"{node.name} {trainer.instance}"

    def _workerd(self) -> str | None:
        node = self._node()
        if node is None:
            return None
        node.hush()
        self._cluster.clock.after(
            self._dice.uniform(2.0, 60.0), lambda: node.mend() if node.mute else None
        )
        return node.name

    def _etcd_line(self) -> str | None:
        """One node reaches everybody but etcd."""
        node = self._node()
        if node is None:
            return None
        node.store.cut(after=1.5)
        self._cluster.clock.after(
            self._dice.uniform(2.0, 60.0),
            lambda: None if node.isolated or node.mute or not node.up else node.store.mend(),
        )
        return node.name

    # ---- on what decides

    def _leader(self) -> str | None:
        leader = self._cluster.leader
        if leader is None:
            return None
        leader.crash()
        self._cluster.clock.after(self._dice.uniform(5.0, 60.0), leader.start)
        return leader.name

    def _etcd_leader(self) -> str | None:
        if not self._cluster.etcd.up:
            return None
        self._cluster.etcd.change_leader()
        return "etcd"

    def _etcd(self) -> str | None:
        """Nobody reaches it, for seconds or for a minute."""
        etcd = self._cluster.etcd
        if not etcd.up:
            return None
        if self._dice.random() < 0.5:
            etcd.kill()
            back = etcd.start
        else:
            etcd.freeze()
            back = etcd.thaw
        seconds = self._dice.uniform(1.0, 60.0)
        self._cluster.clock.after(seconds, back)
        return f"etcd for {seconds:.0f} s"

    def _leases(self) -> str | None:
        """The nodes can't reach etcd for longer than their leases live; everybody else can."""
        seconds = self._dice.uniform(1.0, 5.0) + self._cluster.settings.lease_ttl
        nodes = [one for one in self._cluster.nodes.values() if one.up and not one.mute]
        stores = [one.store for one in nodes if not one.isolated]
        for store in stores:
            store.cut(after=1.5)

        def back() -> None:
            for store in stores:
                store.mend()

        self._cluster.clock.after(seconds, back)
        return f"{len(stores)} nodes for {seconds:.0f} s"

    def _answer(self) -> str | None:
        """The leader's next write is carried out, and it doesn't get to know."""
        leader = self._cluster.leader
        if leader is None:
            return None
        leader.store.answers_to_lose += 1
        return leader.name
