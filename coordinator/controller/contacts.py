# SPDX-License-Identifier: Apache-2.0
"""Keeps how the nodes with a place answer, as the prober tells it. Owned by one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.model import ClusterView, Contact, Line
from coordinator.prober import Contacted, Witnessed
from coordinator.store import KeyKind, keys

Who = tuple[str, str]
_ITS_OWN = frozenset({KeyKind.NODE, KeyKind.ACK, KeyKind.PROGRESS})


class Contacts:
    """``keep``: for so many seconds who has died still counts among those that don't answer."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._known: dict[Who, Contact] = {}
        self._lost: set[str] = set()
        """The nodes that don't answer."""
        self._targets: dict[Who, tuple[str, ...]] = {}
        self._of: tuple[object, ...] = ()
        self._frozen: Mapping[Who, Contact] | None = None

    def targets(self, view: ClusterView) -> Mapping[Who, str] | None:
        """Who is to be watched, and at which address; None when that hasn't changed.

        Everybody with a lease: also whoever may be needed is to be known, and who can be a witness.
        """
        of = (view.nodes, view.flags)
        if all(one is other for one, other in zip(of, self._of, strict=False)) and self._of:
            return None
        self._of = of
        found: dict[Who, tuple[str, ...]] = {}
        for node, live in view.nodes.items():
            if not live.record.control_address:
                continue
            who = (node, live.record.incarnation)
            if view.alive(*who):
                control = live.record.control_address
                port = control.rpartition(":")[2]
                data = f"{live.record.data_address}:{port}" if live.record.data_address else control
                found[who] = tuple(dict.fromkeys((control, data)))
        if found == self._targets:
            return None
        self._targets = found
        return {who: addresses[0] for who, addresses in found.items()}

    def contacted(self, said: Contacted, now: float) -> None:
        """A connection stands otherwise than before. Seconds of the monotonic clock."""
        who = (said.node, said.incarnation)
        if who not in self._targets:
            return
        before = self._known.get(who)
        held = before is None or before.line is Line.ANSWERS
        since = now if before is None or held else before.since
        # Each try begins with LOST; what was said of the one before counts no more.
        again = before is None or held or said.line is Line.LOST
        self._put(
            replace(
                before or Contact(*who),
                addresses=self._targets[who],
                line=said.line,
                detail=said.detail,
                since=since,
                tried=now if again or before is None else before.tried,
                said=() if again or before is None else before.said,
            )
        )

    def witnessed(self, said: Witnessed) -> None:
        """Another node has tried."""
        known = self._known.get((said.node, said.incarnation))
        if known is not None and known.tried == said.tried and known.line is not Line.ANSWERS:
            self._put(replace(known, said=(*known.said, said.statement)))

    def wrote(self, key: str, now: float) -> None:
        """Something of a node's own has been written."""
        if not self._lost:
            return
        parsed = keys.parse(key)
        if parsed.kind in _ITS_OWN and parsed.node in self._lost:
            for who, known in list(self._known.items()):
                if who[0] == parsed.node and known.line is not Line.ANSWERS:
                    self._put(replace(known, wrote=now))

    def at(self, view: ClusterView, now: float) -> ClusterView:
        """The view with the contacts as they stand."""
        over = [
            who
            for who, known in self._known.items()
            if who not in self._targets
            and not (view.flags_of(who[0]).is_dead(who[1]) and now - known.since < self._keep)
        ]
        for who in over:
            self._drop(who)
        if self._frozen is None:
            self._frozen = dict(self._known)
        return replace(view, contacts=self._frozen)

    def _put(self, contact: Contact) -> None:
        self._known[contact.node, contact.incarnation] = contact
        self._frozen = None
        if contact.line is Line.ANSWERS:
            self._lost.discard(contact.node)
        else:
            self._lost.add(contact.node)

    def _drop(self, who: Who) -> None:
        del self._known[who]
        self._lost.discard(who[0])
        self._frozen = None
