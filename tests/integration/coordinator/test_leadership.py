# SPDX-License-Identifier: Apache-2.0
"""Who leads, and what happens when that ends at any moment."""

from __future__ import annotations

import queue
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from coordinator.controller import records
from coordinator.model import JobSpec, JobState, Phase
from coordinator.store import (
    Changed,
    Delete,
    KeyKind,
    KeyValue,
    Listed,
    Watch,
    WatchEvent,
    keys,
)
from tests.integration.coordinator.cluster import Cluster
from tests.integration.coordinator.processes import Coordinator

DEMO = JobSpec(name="demo", command=("train",), replicas=2, spares=1, restarts=1)


def logged(coordinator: Coordinator, text: str) -> bool:
    return text in coordinator.log.read_text()


def placed(cluster: Cluster, node: str) -> bool:
    return cluster.load(keys.assignment(node)) is not None


def hot(cluster: Cluster, node: str) -> bool:
    return cluster.nodes[node].record.warm is not None


def replaced(cluster: Cluster, node: str) -> bool:
    return cluster.load(keys.flags(node)) is not None and not placed(cluster, node)


def passed(moment: float) -> bool:
    return time.monotonic() > moment


class History:
    """Everything that was ever written, to be judged in the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._events: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
        self._watch = Watch(cluster.store, [""], self._events.put)
        self._watch.start()

    def check(self) -> None:
        """Generation and phase only rise; a slot's owner is dead before another comes."""
        self._watch.close()
        state: dict[str, KeyValue] = {}
        latest = (0, Phase.PHASE_UNSPECIFIED)
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Listed):
                state.update(event.items)
            if not isinstance(event, Changed):
                continue
            for change in event.changes:
                if change.kv is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change.kv
            record = state.get(keys.generation("demo"))
            if record is not None:
                generation = records.load(KeyKind.GENERATION, record)
                now = (generation.generation, generation.phase)
                assert now >= latest
                latest = now
            owners = [
                records.load(KeyKind.SLOT, value)
                for key, value in state.items()
                if keys.parse(key).kind is KeyKind.SLOT
            ]
            nodes = [slot.node for slot in owners if slot.node]
            assert len(nodes) == len(set(nodes))
            for change in event.changes:
                if keys.parse(change.key).kind is KeyKind.SLOT and change.previous is not None:
                    before = records.load(KeyKind.SLOT, change.previous)
                    after = records.load(KeyKind.SLOT, state[change.key])
                    if before.node and before.node != after.node:
                        flags = records.load(KeyKind.FLAGS, state[keys.flags(before.node)])
                        assert flags.is_dead(before.incarnation)
        assert latest[1] is Phase.FINISHED


def test_a_killed_leader_s_work_is_taken_over_at_every_phase(cluster: Cluster) -> None:
    """A job starts and recovers; after each record the leader that wrote it is killed."""
    cluster.launch("c0", "c1")
    cluster.add_nodes("n0", "n1", "n2")
    leader = cluster.leader()
    cluster.submit(DEMO, leader)
    seen: list[tuple[int, Phase]] = []
    cluster.answered = seen
    wanted = [
        (generation, phase)
        for generation in (1, 2)
        for phase in (Phase.PAUSE, Phase.RESTORE, Phase.RUNNING)
    ]
    for now in wanted:

        def reached(number: int = now[0], phase: Phase = now[1]) -> bool:
            record = cluster.generation()
            return (record.generation, record.phase) == (number, phase)

        cluster.wait(reached, f"{now} is written", play=True)
        leader.kill()
        cluster.launch(f"c{len(seen) + 2}")
        leader = cluster.leader(besides=leader.name)
        seen.append(now)
        if now == (1, Phase.RUNNING):
            cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
            cluster.nodes[cluster.slot(0).node].kill()
    assert cluster.slot(0).node == "n2"
    cluster.wait(lambda: cluster.incidents()[0].closed, "the incident is closed", play=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_leader_is_killed_at_arbitrary_moments(cluster: Cluster, seed: int) -> None:
    """Together with a node each time: what is in etcd only ever goes forward."""
    chance = random.Random(seed)
    cluster.launch("c0", "c1")
    cluster.add_nodes("n0", "n1", "n2")
    history = History(cluster)
    leader = cluster.leader()
    cluster.submit(DEMO, leader)
    last = cluster.runs().generation
    for round_ in range(3):
        spare = next(name for name in cluster.nodes if not placed(cluster, name))
        cluster.wait(partial(hot, cluster, spare), "the spare is hot", play=True)
        lost = cluster.slot(chance.randrange(2)).node
        cluster.nodes[lost].kill()
        # its lease ends somewhere in the middle of this
        moment = time.monotonic() + chance.uniform(1.0, 3.5)
        cluster.wait(partial(passed, moment), "the moment has come", play=True)
        leader.kill()
        cluster.launch(f"c{round_ + 2}")
        leader = cluster.leader(besides=leader.name)
        cluster.wait(partial(replaced, cluster, lost), "the node is replaced", play=True)
        last = cluster.runs(after=last).generation
        cluster.nodes[lost].start()
    cluster.finish()
    cluster.wait(lambda: cluster.status().state is JobState.FINISHED, "the end", play=True)
    history.check()


def test_a_node_that_lives_is_not_given_up_by_a_leader_that_never_saw_it(
    cluster: Cluster,
) -> None:
    """The leader dies, then a node loses its lease: the next one still knows where to ask."""
    cluster.launch("c0", flags=["--probe", "0.3"])
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, cluster.leader())
    before = cluster.runs()
    cluster.coordinators["c0"].kill()
    node = cluster.nodes[cluster.slot(0).node]
    node.lose_lease()
    (coordinator,) = cluster.launch("c1", flags=["--probe", "0.3"])
    cluster.wait(
        partial(logged, coordinator, f"probe of {node.name} ({node.incarnation}): ALIVE"),
        "it is asked",
    )
    node.register()
    step = cluster.status().step
    cluster.wait(lambda: cluster.status().step > step + 2, "the job goes on", play=True)
    assert cluster.generation().generation == before.generation


def test_a_frozen_leader_can_t_write_when_it_wakes(cluster: Cluster) -> None:
    cluster.launch("c0", "c1")
    cluster.add_nodes("n0", "n1", "n2")
    frozen = cluster.leader()
    cluster.submit(DEMO, frozen)
    before = cluster.runs()
    frozen.signal(signal.SIGSTOP)
    lost = cluster.slot(0)
    cluster.nodes[lost.node].kill()
    cluster.leader(besides=frozen.name)
    after = cluster.runs(after=before.generation)
    frozen.signal(signal.SIGCONT)
    cluster.wait(
        lambda: "deposed" in frozen.log.read_text(), "it learns that it doesn't lead any more"
    )
    cluster.wait(
        lambda: frozen.log.read_text().count("standing for election") == 2, "it stands again"
    )
    assert cluster.generation() == after
    # and it is a good candidate again
    cluster.leader(besides=frozen.name).kill()
    cluster.wait(
        lambda: frozen.log.read_text().count(f"{frozen.name} leads") == 2, "it leads again"
    )
    step = cluster.status().step
    cluster.wait(lambda: cluster.status().step > step + 2, "the job goes on", play=True)


def test_sigterm_hands_over_at_once_and_exits_0(cluster: Cluster) -> None:
    cluster.launch("c0", "c1", flags=["--lease-ttl", "60"])
    leader = cluster.leader()
    assert leader.terminate() == 0
    assert cluster.leader(besides=leader.name).name != leader.name
    assert cluster.store.get(keys.election(leader.name)) is None


def test_an_outage_of_etcd_is_waited_out(own_etcd: Cluster) -> None:
    cluster = own_etcd
    cluster.launch("c0", "c1")
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, cluster.leader())
    before = cluster.runs()
    cluster.etcd.kill()
    for one in cluster.coordinators.values():
        cluster.wait(partial(logged, one, "try"), "it notices")
        assert one.process.poll() is None
    cluster.etcd.start()
    cluster.etcd.await_ready()
    step = cluster.status().step
    cluster.wait(lambda: cluster.status().step > step + 2, "the job goes on", play=True)
    assert cluster.generation().generation == before.generation
    lost = cluster.slot(0)
    cluster.nodes[lost.node].kill()
    cluster.runs(after=before.generation)


def test_sigterm_without_etcd_exits_0(own_etcd: Cluster) -> None:
    (coordinator,) = own_etcd.launch("c0")
    own_etcd.leader()
    own_etcd.etcd.kill()
    assert coordinator.terminate() == 0


def test_it_starts_without_etcd_and_leads_when_it_comes(own_etcd: Cluster) -> None:
    own_etcd.etcd.kill()
    (coordinator,) = own_etcd.launch("c0")
    own_etcd.wait(lambda: "no lease" in coordinator.log.read_text(), "it says so")
    own_etcd.etcd.start()
    assert own_etcd.leader() is coordinator


def test_a_leader_that_is_deposed_again_and_again_keeps_nothing(cluster: Cluster) -> None:
    """Its key is taken away 15 times; threads and descriptors don't grow."""
    (coordinator,) = cluster.launch("c1")
    proc = Path(f"/proc/{coordinator.process.pid}")

    def terms() -> int:
        return coordinator.log.read_text().count("records at revision")

    def held() -> tuple[int, int]:
        return len(list((proc / "task").iterdir())), len(list((proc / "fd").iterdir()))

    cluster.wait(lambda: terms() == 1, "it leads")
    counts = [held()]
    for term in range(2, 17):
        cluster.store.commit([], [Delete(keys.election("c1"))])
        cluster.wait(partial(leads_for, terms, term), f"it leads for the {term}th time")
        counts.append(held())
    cluster.wait(
        lambda: (
            held()[0] <= max(one[0] for one in counts[:5]) + 2
            and held()[1] <= max(one[1] for one in counts[:5]) + 2
        ),
        f"nothing is kept: {counts}",
    )


def leads_for(terms: Callable[[], int], count: int) -> bool:
    return terms() >= count
