# SPDX-License-Identifier: Apache-2.0
"""A coordinator leads a job through its life."""

from __future__ import annotations

from coordinator.controller import records
from coordinator.model import Assignment, JobSpec, JobState, Phase, Slot, SlotRank
from coordinator.store import (
    Put,
    keys,
)
from tests.integration.coordinator.cluster import Cluster
from tests.integration.coordinator.processes import Coordinator

DEMO = JobSpec(name="demo", command=("train",), replicas=2, spares=1, restarts=1)


def logged(coordinator: Coordinator, text: str) -> bool:
    return text in coordinator.log.read_text()


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


def test_a_start_that_its_leader_only_staged_begins_anew(cluster: Cluster) -> None:
    cluster.add_nodes("n0", "n1")
    for number, name in enumerate(("n1", "n0")):
        node = cluster.nodes[name]
        slot = Slot(number, name, node.incarnation, (SlotRank("", 1),), 1)
        place = Assignment(name, node.incarnation, "demo", number, 1)
        cluster.store.commit(
            [],
            [
                Put(keys.slot("demo", number), records.dump(slot)),
                Put(keys.assignment(name), records.dump(place)),
            ],
        )
    (coordinator,) = cluster.launch("c1")
    cluster.submit(DEMO, coordinator)
    cluster.runs()
    assert [cluster.slot(number).node for number in (0, 1)] == ["n0", "n1"]
