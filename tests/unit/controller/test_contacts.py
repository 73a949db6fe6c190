# SPDX-License-Identifier: Apache-2.0
"""Who is watched, and what is kept of how they answer."""

from __future__ import annotations

from dataclasses import replace

from coordinator.controller.contacts import Contacts
from coordinator.model import (
    Answer,
    Assignment,
    ClusterView,
    Contact,
    DeadIncarnation,
    Line,
    LiveNode,
    Node,
    NodeFlags,
    SpareAssignment,
    Statement,
)
from coordinator.prober import Contacted, Witnessed
from coordinator.store import keys

KEEP = 5.0


def live(name: str, data: str = "") -> LiveNode:
    return LiveNode(Node(name, "a", control_address=f"{name}:1", data_address=data))


VIEW = ClusterView(
    nodes={"n0": live("n0"), "n1": live("n1", "fast1"), "n2": live("n2"), "n3": live("n3")},
    assignments={one: Assignment(one, "a", "j", 0, 1) for one in ("n0", "n1", "gone")},
    spares={"n2": SpareAssignment("n2", "j", 1)},
)


def watching(view: ClusterView = VIEW) -> Contacts:
    contacts = Contacts(KEEP)
    contacts.targets(view)
    return contacts


def told(contacts: Contacts, line: Line, now: float, node: str = "n1") -> None:
    contacts.contacted(Contacted(node, "a", line, line.name), now)


def of(contacts: Contacts, now: float = 0.0, view: ClusterView = VIEW) -> Contact:
    return contacts.at(view, now).contacts["n1", "a"]


def test_who_has_a_lease_is_watched() -> None:
    contacts = Contacts(KEEP)
    assert contacts.targets(VIEW) == {(one, "a"): f"{one}:1" for one in ("n0", "n1", "n2", "n3")}
    assert contacts.targets(VIEW) is None
    assert contacts.targets(replace(VIEW, nodes=dict(VIEW.nodes))) is None
    dead = {"n0": NodeFlags(dead=(DeadIncarnation("a"),))}
    assert contacts.targets(replace(VIEW, flags=dead)) == {
        (one, "a"): f"{one}:1" for one in ("n1", "n2", "n3")
    }


def test_witnesses_try_both_networks() -> None:
    contacts = watching()
    told(contacts, Line.ANSWERS, 1.0)
    assert of(contacts).addresses == ("n1:1", "fast1:1")


def test_a_try_goes_from_one_loss_to_the_next() -> None:
    contacts = watching()
    told(contacts, Line.ANSWERS, 1.0)
    told(contacts, Line.LOST, 2.0)
    assert (of(contacts).since, of(contacts).tried) == (2.0, 2.0)
    contacts.witnessed(Witnessed("n1", "a", 2.0, Statement("n0", Answer.SILENT)))
    told(contacts, Line.SILENT, 3.0)
    assert (of(contacts).tried, of(contacts).said) == (2.0, (Statement("n0", Answer.SILENT),))
    told(contacts, Line.LOST, 4.0)
    contacts.witnessed(Witnessed("n1", "a", 2.0, Statement("n2", Answer.SILENT)))
    assert (of(contacts).since, of(contacts).tried, of(contacts).said) == (2.0, 4.0, ())
    told(contacts, Line.ANSWERS, 5.0)
    told(contacts, Line.SILENT, 6.0)
    assert (of(contacts).since, of(contacts).tried) == (6.0, 6.0)


def test_what_a_silent_node_writes_is_seen() -> None:
    contacts = watching()
    told(contacts, Line.ANSWERS, 1.0)
    contacts.wrote(keys.progress("j", "n1"), 2.0)
    assert of(contacts).wrote < 0
    told(contacts, Line.SILENT, 3.0)
    contacts.wrote(keys.progress("j", "n0"), 4.0)
    contacts.wrote(keys.assignment("n1"), 4.0)
    assert of(contacts).wrote < 0
    contacts.wrote(keys.progress("j", "n1"), 5.0)
    assert of(contacts).wrote == 5.0


def test_who_has_just_died_still_counts_and_who_has_left_does_not() -> None:
    contacts = watching()
    told(contacts, Line.ANSWERS, 1.0)
    told(contacts, Line.REFUSED, 2.0)
    dead = replace(VIEW, flags={"n1": NodeFlags(dead=(DeadIncarnation("a"),))})
    contacts.targets(dead)
    assert of(contacts, 2.0 + KEEP - 0.1, dead).line is Line.REFUSED
    assert not contacts.at(dead, 2.0 + KEEP).contacts
    contacts = watching()
    told(contacts, Line.ANSWERS, 1.0)
    left = replace(VIEW, nodes={"n0": live("n0")})
    contacts.targets(left)
    assert not contacts.at(left, 2.0).contacts
    told(contacts, Line.REFUSED, 3.0)
    assert not contacts.at(left, 3.0).contacts
