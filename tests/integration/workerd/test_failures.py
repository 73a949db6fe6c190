# SPDX-License-Identifier: Apache-2.0
"""What breaks on a node, and what workerd makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.model import Phase, StepPhase, Trainer, TrainerState
from coordinator.store import Store, keys
from protos import trainer_pb2
from tests.integration.workerd.support import (
    Leader,
    Workerd,
    alive,
    marked,
    pid_of,
    wait_for,
)
from workerd.protocol import link

StartWorkerd = Callable[..., Workerd]
MakeLeader = Callable[..., Leader]


def ended(lead: Leader, node: str) -> Trainer:
    """Wait for an ended trainer in the node's record."""

    def found() -> Trainer | None:
        over = lead.trainers(node, TrainerState.ENDED)
        return over[0] if over else None

    return wait_for(found, f"{node} says that a trainer has ended")


def test_a_killed_trainer_is_told_with_its_place_and_its_children_go(
    workerd: StartWorkerd, leader: MakeLeader, prefix: str
) -> None:
    one = workerd("n0")
    one.listening()
    lead = leader(environment={"FAKE_CHILDREN": "2", "TEST_MARK": prefix})
    instance = lead.run("n0")["n0"].ranks[0].instance
    lead.steps_on("n0")
    assert len(marked(f"TEST_MARK={prefix}")) == 3
    os.kill(pid_of(one, instance), signal.SIGKILL)
    over = ended(lead, "n0")
    assert (over.instance, over.since) == (instance, 1)
    assert over.exit is not None
    assert (over.exit.code, over.exit.signal, over.exit.message) == (0, 9, "to stderr")
    wait_for(lambda: not marked(f"TEST_MARK={prefix}"), "its children are gone")
    # Nothing starts in its place by itself: the leader says what is next.
    progress = lead.progress("n0")
    assert progress is not None
    assert progress.ranks[0].step > 0, "what its page said last"

    acks = lead.run("n0", reset=("n0",))
    again = acks["n0"].ranks[0]
    assert again.instance != instance
    assert again.phase is StepPhase.EMPTY
    assert lead.trainers("n0", TrainerState.ENDED) == []


def test_a_script_that_fails_leaves_its_traceback(
    workerd: StartWorkerd, leader: MakeLeader, folder: Path
) -> None:
    workerd("n0").listening()
    lead = leader()
    lead.run("n0")
    (folder / "fail").touch()
    over = ended(lead, "n0").exit
    assert over is not None
    assert (over.code, over.signal, over.traceback) == (3, 0, "it was told to")
    assert over.message == "to stderr"


@pytest.mark.parametrize("what", ["command", "folder"])
def test_a_trainer_that_cannot_start_is_one_that_has_ended(
    workerd: StartWorkerd, leader: MakeLeader, what: str
) -> None:
    workerd("n0").listening()
    spec: dict[str, object] = {"command": ("/no/such/command",)}
    if what == "folder":
        spec = {"working_directory": "/no/such/folder"}
    lead = leader(**spec)
    lead.pause("n0")
    over = ended(lead, "n0").exit
    assert over is not None
    assert "/no/such/" in over.cause
    assert over.code in (126, 127)


def test_a_broken_group_is_told_at_once_and_mended(
    workerd: StartWorkerd, leader: MakeLeader, folder: Path
) -> None:
    workerd("n0").listening()
    lead = leader()
    lead.run("n0")
    lead.steps_on("n0")
    (folder / "break").touch()

    def broken() -> tuple[int, str] | None:
        progress = lead.progress("n0")
        if progress is None or not progress.ranks[0].broken:
            return None
        return progress.ranks[0].broken_generation, progress.ranks[0].broken

    assert wait_for(broken, "the group is broken") == (1, "torn")
    (folder / "break").unlink()
    lead.run("n0")
    lead.steps_on("n0")
    assert broken() in (None, (1, "torn")), "nothing is said of the new generation"


def test_workerds_sigkill_leaves_nothing(
    workerd: StartWorkerd, leader: MakeLeader, prefix: str
) -> None:
    one = workerd("n0", ttl=1)
    one.listening()
    lead = leader(environment={"FAKE_CHILDREN": "2", "TEST_MARK": prefix})
    instance = lead.run("n0")["n0"].ranks[0].instance
    pid = pid_of(one, instance)
    everything = [*marked(f"TEST_MARK={prefix}"), *children(one.process.pid)]
    assert pid in everything
    assert len(everything) >= 4
    one.process.kill()
    wait_for(lambda: not any(alive(pid) for pid in everything), "all of it is gone")

    # The same folder and node id serve again once the lease has ended.
    two = workerd("n0", ttl=1)
    two.listening()
    record = lead.node("n0")
    assert record is not None
    assert record.trainers == ()


def children(pid: int) -> list[int]:
    """The processes that one process has started: a guardian, say."""
    found = []
    for name in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        if name.isdecimal() and int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(name))
    return found


def test_the_guardian_is_replaced(workerd: StartWorkerd, leader: MakeLeader, prefix: str) -> None:
    one = workerd("n0")
    one.listening()
    lead = leader(environment={"FAKE_CHILDREN": "2", "TEST_MARK": prefix})
    (guardian,) = children(one.process.pid)
    lead.run("n0")
    trainers = set(children(one.process.pid)) - {guardian}
    os.kill(guardian, signal.SIGKILL)
    wait_for(lambda: set(children(one.process.pid)) - {guardian, *trainers}, "another one is there")
    one.process.kill()
    wait_for(lambda: not marked(f"TEST_MARK={prefix}"), "the new one has cleaned up")


def test_a_stop_of_workerd_ends_all_and_gives_the_lease_back(
    workerd: StartWorkerd, leader: MakeLeader, prefix: str
) -> None:
    one = workerd("n0", ttl=60)
    one.listening()
    lead = leader(environment={"FAKE_CHILDREN": "2", "TEST_MARK": prefix})
    lead.run("n0")
    assert one.stop() == 0
    assert marked(f"TEST_MARK={prefix}") == []
    assert lead.node("n0") is None
    assert lead.progress("n0") is None


def test_a_trainer_that_ignores_sigterm_is_killed(
    workerd: StartWorkerd, leader: MakeLeader, prefix: str
) -> None:
    workerd("n0").listening()
    lead = leader(environment={"TEST_MARK": prefix, "FAKE_DEAF": "1"})
    lead.run("n0")
    lead.phase(Phase.STOPPED)
    wait_for(lambda: not marked(f"TEST_MARK={prefix}"), "it is gone")


def test_a_trainer_that_the_slot_does_not_mean_is_ended(
    workerd: StartWorkerd, leader: MakeLeader
) -> None:
    """Rule 1: another instance holds no state, whatever is in its memory."""
    one = workerd("n0")
    one.listening()
    lead = leader()
    first = lead.run("n0")["n0"].ranks[0].instance
    lead.steps_on("n0")
    pid = pid_of(one, first)
    acks = lead.run("n0", reset=("n0",))
    assert acks["n0"].ranks[0].instance != first
    assert acks["n0"].ranks[0].phase is StepPhase.EMPTY
    assert not alive(pid)


def test_a_foreign_process_is_no_trainer(
    workerd: StartWorkerd, leader: MakeLeader, folder: Path
) -> None:
    workerd("n0").listening()
    lead = leader()
    instance = lead.run("n0")["n0"].ranks[0].instance
    for claimed in (instance, "nobody"):
        end = link.connect(folder / "n0" / "sock")
        end.send(trainer_pb2.Hello(instance=claimed, pid=os.getpid()))
        with pytest.raises(link.LinkClosed):
            end.receive(10)
        end.close()
    lead.steps_on("n0")


def test_a_spare_that_keeps_ending_is_started_ever_more_slowly(
    workerd: StartWorkerd, leader: MakeLeader
) -> None:
    one = workerd("n0")
    one.listening()
    lead = leader(command=("/bin/false",))
    lead.keep_warm("n0")
    wait_for(lambda: one.logged().count("StartTrainer") >= 3, "it is started again")
    assert one.logged().count("StartTrainer") <= 4, "1, 2, 4, ... seconds apart"


# ---- the lease


def test_a_lost_lease_stops_no_training(
    workerd: StartWorkerd, leader: MakeLeader, store: Store
) -> None:
    """Rule 13: it registers again, with the same incarnation."""
    workerd("n0").listening()
    lead = leader()
    before = lead.node("n0")
    assert before is not None
    instance = lead.run("n0")["n0"].ranks[0].instance
    kv = store.get(keys.node("n0"))
    assert kv is not None
    store.revoke(kv.lease)

    def back() -> bool:
        now = store.get(keys.node("n0"))
        return now is not None and now.lease != kv.lease

    wait_for(back, "it is registered again")
    record = lead.node("n0")
    assert record is not None
    assert record.incarnation == before.incarnation
    lead.steps_on("n0")
    acks = lead.run("n0")
    assert acks["n0"].ranks[0].instance == instance


def test_an_ack_that_went_with_the_lease_is_given_again(
    workerd: StartWorkerd, leader: MakeLeader, store: Store
) -> None:
    workerd("n0").listening()
    lead = leader()
    lead.pause("n0")
    first = wait_for(lambda: lead.ack("n0"), "it acknowledges")
    kv = store.get(keys.node("n0"))
    assert kv is not None
    store.revoke(kv.lease)
    assert wait_for(lambda: lead.ack("n0"), "it acknowledges again") == first
    lead.restore("n0")
    lead.joined("n0")


def test_a_node_declared_dead_starts_anew(
    workerd: StartWorkerd, leader: MakeLeader, store: Store, prefix: str
) -> None:
    one = workerd("n0")
    one.listening()
    lead = leader(environment={"TEST_MARK": prefix, "FAKE_CHILDREN": "2"})
    before = lead.node("n0")
    assert before is not None
    lead.run("n0")
    old = marked(f"TEST_MARK={prefix}")
    lead.declare_dead("n0", before.incarnation)
    kv = store.get(keys.node("n0"))
    if kv is not None:
        store.revoke(kv.lease)

    def anew() -> bool:
        record = lead.node("n0")
        return record is not None and record.incarnation != before.incarnation

    wait_for(anew, "it registers as another incarnation")
    assert not any(alive(pid) for pid in old), "everything of the dead one ended before"
    assert one.process.poll() is None
    acks = lead.run("n0")
    assert acks["n0"].ranks[0].phase is StepPhase.EMPTY


def test_a_second_workerd_with_the_same_id_is_refused(
    workerd: StartWorkerd, leader: MakeLeader
) -> None:
    workerd("n0", ttl=2).listening()
    lead = leader()
    before = lead.node("n0")
    assert before is not None
    second = workerd("n0", ttl=2, name="other")
    assert second.process.wait(60) == 1
    assert "node id n0 is taken" in second.logged()
    assert before.incarnation in second.logged()
    after = lead.node("n0")
    assert after is not None
    assert after.incarnation == before.incarnation


def test_a_runtime_folder_has_one_workerd(workerd: StartWorkerd) -> None:
    workerd("n0").listening()
    second = workerd("n1", name="n0")
    assert second.process.wait(60) == 1
    assert "another workerd is using it" in second.logged()
