# SPDX-License-Identifier: Apache-2.0
"""A job on four containers lives through all that is done to them, and ends with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.compose.support import MEMBERS, STEPS, Cluster, cluster
from tests.containers import wait_for

JOB = "disturbed"


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    with cluster() as running:
        running.submit(JOB, spares=2, pace=0.2)
        running.await_steps(JOB)
        yield running


def await_spares(site: Cluster, *names: str) -> None:
    """Both nodes without a place are warm; these are among them."""
    wait_for(lambda: len(warm := site.warm(JOB)) == 2 and warm >= set(names), "two spares are warm")


def test_a_killed_container(site: Cluster) -> None:
    await_spares(site)
    victim = site.owners(JOB)[1]
    site.do("kill", victim)
    wait_for(lambda: victim not in site.owners(JOB), "its place is given away")
    site.await_steps(JOB)
    site.do("start", victim)
    await_spares(site, victim)


def test_a_paused_container_is_replaced_and_starts_anew_when_it_goes_on(site: Cluster) -> None:
    victim = site.owners(JOB)[2]
    site.do("pause", victim)
    try:
        wait_for(lambda: victim not in site.owners(JOB), "its place is given away")
        site.await_steps(JOB)
    finally:
        site.do("unpause", victim)
    await_spares(site, victim)


def test_a_container_that_is_cut_off(site: Cluster) -> None:
    victim = site.owners(JOB)[0]
    site.cut(victim)
    try:
        wait_for(lambda: victim not in site.owners(JOB), "its place is given away")
        site.await_steps(JOB)
    finally:
        site.connect(victim)
    await_spares(site, victim)


def test_etcd_s_members_start_again_one_by_one(site: Cluster) -> None:
    incidents = len(site.job(JOB)["incidents"])

    def is_well(member: str) -> bool:
        site.inside(member, "etcdctl", "endpoint", "health")  # fails where it isn't
        return True

    for member in MEMBERS:
        site.do("restart", member)
        wait_for(partial(is_well, member), f"{member} is well")
        site.await_steps(JOB)
    assert len(site.job(JOB)["incidents"]) == incidents
    await_spares(site)


def test_the_leading_coordinator_is_killed(site: Cluster) -> None:
    incidents = len(site.job(JOB)["incidents"])
    leader = site.leader()
    site.do("kill", leader)
    wait_for(lambda: site.leader() != leader, "the other one leads")
    site.await_steps(JOB)
    assert len(site.job(JOB)["incidents"]) == incidents
    # It decides, too.
    victim = site.owners(JOB)[3]
    site.do("kill", victim)
    wait_for(lambda: victim not in site.owners(JOB), "its place is given away")
    site.await_steps(JOB)
    site.do("start", leader)
    site.do("start", victim)
    await_spares(site, victim)


def test_the_final_state_is_that_of_an_undisturbed_run(site: Cluster) -> None:
    job = site.job(JOB)
    assert len(job["incidents"]) >= 4
    assert int(job["status"]["step"]) < STEPS  # all of it has happened to a running job
    disturbed = site.digests(JOB)
    site.submit("undisturbed", spares=0, pace=0)
    undisturbed = site.digests("undisturbed")
    assert disturbed
    assert disturbed == undisturbed
    assert site.job("undisturbed")["incidents"] == []
