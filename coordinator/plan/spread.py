# SPDX-License-Identifier: Apache-2.0
"""Failure domains: which of the free nodes a slot is given.

A job names labels of nodes, the largest domain first: ``["switch", "rack"]``. Slots at the same
place in their blocks hold the same shard positions; so a slot is given the free node that has the
fewest owners at that place in its largest domain, then in the next smaller one; then the fewest of
the whole job. A node without a label is in the domain of all without it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from coordinator.model import ClusterView, JobSpec
from coordinator.plan.placement import Candidates

_Path: TypeAlias = tuple[str, ...]
"""A node's values of the labels: its smallest domain."""
_Key: TypeAlias = tuple[int, ...]
"""How crowded a domain is."""


@dataclass(slots=True)
class _Free:
    """Free nodes by their domain, each a heap by the order in which they were offered."""

    count: int = 0
    nodes: dict[_Path, list[tuple[int, str]]] = field(default_factory=dict)
    queues: dict[int, list[tuple[_Key, _Path]]] = field(default_factory=dict)
    """By place: domains, the least crowded first. What is taken makes domains more crowded than
    their entries say: who takes one looks."""


class Pool:
    """Free nodes, each of which is given to one slot. Hot ones first, wherever they are."""

    def __init__(
        self,
        view: ClusterView,
        spec: JobSpec,
        free: Candidates,
        owners: Mapping[int, str],
        spares: Iterable[str] = (),
    ) -> None:
        """``owners``: the nodes of the slots that have one; ``spares``: the job's other nodes."""
        self._view = view
        self._spec = spec
        self._hot, self._cold = _Free(), _Free()
        self._is_hot = frozenset(free.hot)
        self._order = {node: at for at, node in enumerate(free.all)}
        self._at_place: Counter[tuple[int, _Path]] = Counter()
        self._of_job: Counter[_Path] = Counter()
        self._given: dict[str, int | None] = {}
        for number, node in owners.items():
            self._count(number, node, 1)
        for node in spares:
            self._count(None, node, 1)
        for node in free.all:
            self._add(node)

    @property
    def hot(self) -> int:
        """How many hot nodes are left."""
        return self._hot.count

    def __len__(self) -> int:
        """How many nodes are left."""
        return self._hot.count + self._cold.count

    def take(self, number: int | None) -> str:
        """The node for a slot, None: for a spare. Raises LookupError when none is left."""
        free = self._hot if self._hot.count else self._cold
        if not free.count:
            raise LookupError(f"no node is left for slot {number}")
        place = self._place(number)
        if place not in free.queues:
            free.queues[place] = [(self._key(place, path), path) for path in free.nodes]
            heapq.heapify(free.queues[place])
        queue = free.queues[place]
        while True:
            key, path = queue[0]
            now = self._key(place, path)
            if not free.nodes[path]:
                heapq.heappop(queue)
            elif now != key:
                heapq.heapreplace(queue, (now, path))
            else:
                break
        free.count -= 1
        _, node = heapq.heappop(free.nodes[path])
        self._given[node] = number
        self._count(number, node, 1)
        return node

    def put_back(self, node: str) -> None:
        """A node that was taken is free after all."""
        self._count(self._given.pop(node), node, -1)
        self._add(node)

    def left(self) -> Candidates:
        """What hasn't been taken, in its order."""
        free = [node for node in self._order if node not in self._given]
        return Candidates(
            hot=tuple(node for node in free if node in self._is_hot),
            cold=tuple(node for node in free if node not in self._is_hot),
        )

    def _add(self, node: str) -> None:
        free = self._hot if node in self._is_hot else self._cold
        free.count += 1
        heapq.heappush(free.nodes.setdefault(self._path(node), []), (self._order[node], node))
        self._hot.queues.clear()
        self._cold.queues.clear()

    def _path(self, node: str) -> _Path:
        live = self._view.nodes.get(node)
        labels = dict(live.record.labels) if live is not None else {}
        return tuple(labels.get(one, "") for one in self._spec.spread)

    def _place(self, number: int | None) -> int:
        # A spare may come to stand for any slot: it only keeps clear of the job's other nodes.
        return -1 if number is None else number % self._spec.block_slots

    def _key(self, place: int, path: _Path) -> _Key:
        domains = [path[:length] for length in range(1, len(path) + 1)]
        same = [self._at_place[place, one] for one in domains] if place >= 0 else []
        return (*same, *(self._of_job[one] for one in domains))

    def _count(self, number: int | None, node: str, by: int) -> None:
        path, place = self._path(node), self._place(number)
        for length in range(1, len(path) + 1):
            self._at_place[place, path[:length]] += by
            self._of_job[path[:length]] += by
