# SPDX-License-Identifier: Apache-2.0
"""What etcd may send, in any order that it may come, is put together without loss or repeat."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.store.assembly import Assembly
from coordinator.store.watch import _without_contained
from protos.etcd import kv_pb2


def event(revision: int, key: str) -> kv_pb2.Event:
    return kv_pb2.Event(kv=kv_pb2.KeyValue(key=key.encode(), mod_revision=revision))


def flat(taken: list[tuple[int, list[str]]]) -> list[tuple[int, str]]:
    return [(revision, key) for revision, keys in taken for key in keys]


def take(assembly: Assembly, revision: int | None = None) -> list[tuple[int, list[str]]]:
    return [(r, [e.kv.key.decode() for e in events]) for r, events in assembly.take(revision)]


def test_fragments_wait_for_the_last_one() -> None:
    assembly = Assembly(1)
    assembly.add(0, [event(5, "a")], more=True)
    assert take(assembly) == []
    assembly.add(0, [event(5, "b")], more=False)
    assert take(assembly) == [(5, ["a", "b"])]


def test_a_lost_fragment_is_asked_for_again() -> None:
    assembly = Assembly(1)
    assembly.reset(4)
    assembly.add(0, [event(5, "a")], more=True)
    assembly.drop_fragments()
    assert assembly.start_revision(0) == 5
    assembly.add(0, [event(5, "a"), event(5, "b")], more=False)
    assert take(assembly) == [(5, ["a", "b"])]


def test_one_revision_of_two_ranges_waits_until_both_are_there() -> None:
    assembly = Assembly(2)
    assembly.add(0, [event(5, "a"), event(6, "b")], more=False)
    assert take(assembly, 4) == []
    assembly.add(1, [event(5, "c")], more=False)
    assert take(assembly, 5) == [(5, ["a", "c"])]
    assert assembly.waiting
    assert take(assembly, 9) == [(6, ["b"])]
    assert not assembly.waiting


def test_progress_moves_the_start_but_never_back() -> None:
    assembly = Assembly(2)
    assembly.reset(10)
    assembly.advance(0, 20)
    assembly.advance(0, 15)
    assert (assembly.start_revision(0), assembly.start_revision(1)) == (21, 11)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, dict[int, list[tuple[int, str]]]]:
    """The number of ranges, and for each revision from 1 the changes: (range, key)."""
    ranges = draw(st.integers(1, 3))
    change = st.tuples(st.integers(0, ranges - 1), st.sampled_from("abcd"))
    many = st.lists(st.lists(change, max_size=4, unique=True), max_size=8)
    return ranges, dict(enumerate(draw(many), start=1))


@settings(deadline=None)
@given(histories(), st.data())
def test_nothing_is_lost_repeated_split_or_out_of_order(
    history: tuple[int, dict[int, list[tuple[int, str]]]], data: st.DataObject
) -> None:
    ranges, revisions = history
    last = len(revisions)
    assembly = Assembly(ranges)
    assembly.reset(0)
    taken: list[tuple[int, list[str]]] = []
    sent = [0] * ranges  # what etcd's watcher of each range has sent
    for _ in range(data.draw(st.integers(0, 12))):
        match data.draw(st.sampled_from(["send", "break", "progress"])):
            case "send":
                index = data.draw(st.integers(0, ranges - 1))
                upto = data.draw(st.integers(sent[index], last))
                send(assembly, revisions, index, sent[index] + 1, upto, data)
                sent[index] = upto
            case "break":
                # etcd starts each range again where the assembly asks for it.
                assembly.drop_fragments()
                sent = [assembly.start_revision(i) - 1 for i in range(ranges)]
            case "progress":
                taken += take(assembly, min(sent))
    for index in range(ranges):
        send(assembly, revisions, index, sent[index] + 1, last, data)
    taken += take(assembly, last)
    expected = {r: sorted(f"{i}{k}" for i, k in c) for r, c in revisions.items() if c}
    assert [r for r, _ in taken] == sorted(expected)
    assert {r: sorted(keys) for r, keys in taken} == expected


def send(
    assembly: Assembly,
    revisions: dict[int, list[tuple[int, str]]],
    index: int,
    first: int,
    last: int,
    data: st.DataObject,
) -> None:
    """Send a range's events of some revisions, in one message or in fragments."""
    events = [
        event(r, f"{i}{k}") for r in range(first, last + 1) for i, k in revisions[r] if i == index
    ]
    cut = data.draw(st.integers(0, len(events)))
    if cut:
        assembly.add(index, events[:cut], more=cut < len(events))
    if cut < len(events):
        assembly.add(index, events[cut:], more=False)


def test_a_range_inside_another_is_left_out() -> None:
    assert _without_contained(["a/", "a/b", "a/b/", "ab", "a/"]) == ["a/", "ab"]
    assert _without_contained(["a", "", "b/"]) == [""]
    assert _without_contained(["a", "ab", "b/c"]) == ["a", "ab", "b/c"]
