# SPDX-License-Identifier: Apache-2.0
"""etcd is killed and comes back: training goes on, and so does the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from coordinator.model import StepPhase
from coordinator.store import StoreError
from tests.etcd import Etcd
from tests.integration.workerd.support import Leader, Workerd, wait_for
from workerd.protocol.page import ProgressPage


@pytest.fixture
def etcd() -> Iterator[Etcd]:
    """One of its own: it is killed."""
    with Etcd() as running:
        yield running


@pytest.mark.parametrize("longer_than_the_lease", [False, True])
def test_an_outage_stops_no_training(
    workerd: Callable[..., Workerd],
    leader: Callable[..., Leader],
    etcd: Etcd,
    longer_than_the_lease: bool,
) -> None:
    ttl = 2.0 if longer_than_the_lease else 30.0
    one = workerd("n0", ttl=ttl)
    one.listening()
    lead = leader()
    before = lead.node("n0")
    assert before is not None
    instance = lead.run("n0")["n0"].ranks[0].instance
    lead.steps_on("n0")
    etcd.kill()

    page = ProgressPage.open(one.folder / "trainers" / instance / "page")
    start = page.read()
    if longer_than_the_lease:
        wait_for(lambda: "no renewal of the lease in time" in one.logged(), "its time is over")
    beat = page.read().heartbeat_ns
    wait_for(lambda: page.read().heartbeat_ns > beat, "workerd's heartbeat goes on")
    assert page.read().step > start.step
    page.close()

    etcd.start()
    etcd.await_ready()

    def goes_on() -> bool:
        try:
            progress = lead.progress("n0")
        except StoreError:
            return False
        return progress is not None and progress.ranks[0].step > start.step

    wait_for(goes_on, "progress is written again")
    after = lead.node("n0")
    assert after is not None
    assert after.incarnation == before.incarnation
    acks = lead.run("n0")
    rank = acks["n0"].ranks[0]
    assert (rank.instance, rank.phase) == (instance, StepPhase.COMPUTING)


def test_workerd_waits_for_an_etcd_that_is_not_there_yet(
    workerd: Callable[..., Workerd], etcd: Etcd
) -> None:
    etcd.kill()
    one = workerd("n0")
    wait_for(lambda: "register fails, it is tried again" in one.logged(), "it tries")
    assert one.process.poll() is None
    etcd.start()
    one.listening()
    assert one.stop() == 0


def test_workerd_ends_while_etcd_is_away(
    workerd: Callable[..., Workerd], leader: Callable[..., Leader], etcd: Etcd
) -> None:
    one = workerd("n0")
    one.listening()
    leader().run("n0")
    etcd.kill()
    assert one.stop() == 0
