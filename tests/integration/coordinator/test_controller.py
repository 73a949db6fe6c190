# SPDX-License-Identifier: Apache-2.0
"""Coordinators lead a job through its life, and survive everything that happens to them."""

from __future__ import annotations

import queue
import random
import signal
import time
from functools import partial

import pytest

from coordinator.controller import records
from coordinator.model import JobSpec, JobState, Phase
from coordinator.store import Changed, KeyKind, KeyValue, Listed, Watch, WatchEvent, keys
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


def test_a_job_starts_runs_and_finishes(cluster: Cluster) -> None:
    (coordinator,) = cluster.launch("c1")
    cluster.submit(DEMO, coordinator)
    cluster.wait(lambda: "needs 2 nodes" in cluster.status().reason, "it says what it waits for")
    assert cluster.status().state is JobState.WAITING
    cluster.add_nodes("n0", "n1", "n2")
    assert cluster.runs().generation == 1
    cluster.wait(lambda: cluster.status().state is JobState.RUNNING, "the status", play=True)
    cluster.wait(lambda: cluster.load(keys.spare("n2")), "n2 is a spare", play=True)
    cluster.wait(lambda: cluster.status().step > 3, "the step is in the status", play=True)
    cluster.finish()
    cluster.wait(lambda: cluster.generation().phase is Phase.FINISHED, "the end")
    cluster.wait(lambda: cluster.status().digests == ("final",), "the digest")
    cluster.wait(
        lambda: not cluster.store.list(keys.ASSIGNMENTS).items, "places are freed", play=True
    )
    cluster.wait(lambda: not cluster.store.list(keys.SPARES).items, "the spare is freed", play=True)


def test_a_dead_node_is_replaced_by_the_spare(cluster: Cluster) -> None:
    (coordinator,) = cluster.launch("c1")
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, coordinator)
    before = cluster.runs()
    cluster.wait(lambda: cluster.nodes["n2"].record.warm, "n2 is hot", play=True)
    lost = cluster.slot(1)
    cluster.nodes[lost.node].kill()
    after = cluster.runs(after=before.generation)
    assert cluster.slot(1).node == "n2"
    assert cluster.load(keys.flags(lost.node)).is_dead(lost.incarnation)
    assert cluster.load(keys.assignment(lost.node)) is None
    assert after.resume_step >= before.resume_step
    cluster.wait(lambda: cluster.incidents()[0].closed, "the incident is closed", play=True)
    (incident,) = cluster.incidents()
    phases = [mark.phase for mark in incident.marks]
    assert phases == ["detected", "paused", "pulled", "regrouped", "first_step"]
    times = [mark.time_ns for mark in incident.marks]
    assert times == sorted(times)
    assert times[0] > 0


def test_a_suspect_that_answers_is_not_given_up(cluster: Cluster) -> None:
    """Its lease is gone but it answers probes; it registers again and nothing has happened."""
    (coordinator,) = cluster.launch("c1", flags=["--probe", "0.3"])
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, coordinator)
    before = cluster.runs()
    node = cluster.nodes[cluster.slot(0).node]
    node.lose_lease()
    log = coordinator.log
    cluster.wait(
        lambda: log.read_text().count(f"probe of {node.name} ({node.incarnation}): ALIVE") > 2,
        "it is asked again and again",
    )
    assert cluster.generation().generation == before.generation
    node.register()
    cluster.wait(lambda: cluster.status().step > 5, "the job goes on", play=True)
    assert cluster.generation().generation == before.generation
    assert cluster.load(keys.flags(node.name)) is None


def test_a_node_that_misses_the_pause_s_deadline_is_replaced(cluster: Cluster) -> None:
    (coordinator,) = cluster.launch("c1", flags=["--pause", "1"])
    cluster.add_nodes("n0", "n1", "n2", "n3")
    cluster.submit(DEMO, coordinator)
    before = cluster.runs()
    lost, stuck = cluster.slot(0), cluster.slot(1)
    cluster.nodes[stuck.node].stuck = True
    cluster.nodes[lost.node].kill()
    cluster.wait(lambda: cluster.generation().generation > before.generation, "a pause", play=True)
    cluster.wait(
        lambda: (
            "the last holder" in cluster.status().reason
            or "nobody else is known to hold" in cluster.status().reason
        ),
        "it is not given up, for it holds the last state",
        play=True,
    )
    cluster.nodes[stuck.node].stuck = False
    after = cluster.runs(after=before.generation)
    assert cluster.slot(1) == stuck
    assert after.phase is Phase.RUNNING


def test_a_trainer_that_ends_too_often_fails_the_job(cluster: Cluster) -> None:
    (coordinator,) = cluster.launch("c1")
    cluster.add_nodes("n0", "n1")
    cluster.submit(DEMO, coordinator)
    generation = cluster.runs()
    for _ in range(DEMO.restarts):
        slot = cluster.slot(1)
        rank = slot.ranks[0]
        cluster.nodes[slot.node].end_trainer(rank.instance, "demo", rank.since)
        generation = cluster.runs(after=generation.generation)
        assert cluster.slot(1).ranks[0].since == generation.generation
    slot = cluster.slot(1)
    rank = slot.ranks[0]
    cluster.nodes[slot.node].end_trainer(rank.instance, "demo", rank.since)
    cluster.wait(lambda: cluster.generation().phase is Phase.FAILED, "the job has failed")
    cluster.wait(lambda: "boom" in cluster.status().reason, "why")


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


def test_a_record_that_can_t_be_read_is_named_and_harms_nobody_else(cluster: Cluster) -> None:
    from coordinator.store import Put

    (coordinator,) = cluster.launch("c1")
    cluster.add_nodes("n0", "n1", "n2")
    cluster.store.commit([], [Put(keys.node("bad"), b"{nonsense"), Put("jobs/bad/spec", b"[]")])
    cluster.submit(DEMO, coordinator)
    cluster.runs()
    log = coordinator.log.read_text()
    assert "nodes/bad" in log
    assert "jobs/bad/spec" in log


def test_a_stopped_job_ends_and_frees_its_nodes(cluster: Cluster) -> None:
    from protos import admin_pb2

    (coordinator,) = cluster.launch("c1")
    cluster.add_nodes("n0", "n1", "n2")
    cluster.submit(DEMO, coordinator)
    cluster.runs()
    with coordinator.stub() as stub:
        stub.StopJob(admin_pb2.StopJobRequest(job="demo", reason="enough"), timeout=20)
    cluster.wait(lambda: cluster.generation().phase is Phase.STOPPED, "it is stopped")
    cluster.wait(lambda: "enough" in cluster.status().reason, "why")
    cluster.wait(
        lambda: not cluster.store.list(keys.ASSIGNMENTS).items, "places are freed", play=True
    )


def test_more_nodes_than_one_transaction_takes(cluster: Cluster) -> None:
    (coordinator,) = cluster.launch("c1")
    count = 70
    spec = JobSpec(name="demo", command=("train",), replicas=count)
    lease = cluster.store.grant(60)[0]
    from coordinator.controller import records
    from coordinator.model import Device, DeviceKind, Node
    from coordinator.store import Put

    for number in range(count):
        record = Node(
            node=f"n{number}",
            incarnation=f"i{number}",
            control_address="127.0.0.1:9",
            devices=(Device(DeviceKind.CPU),),
        )
        key = keys.node(f"n{number}")
        cluster.store.commit([], [Put(key, records.dump(record), lease)])
    cluster.submit(spec, coordinator)
    cluster.wait(lambda: cluster.generation().phase is Phase.PAUSE, "it starts")
    assert len(cluster.store.list(keys.slots_prefix("demo")).items) == count
    assert len(cluster.store.list(keys.ASSIGNMENTS).items) == count
    cluster.store.revoke(lease)
