# SPDX-License-Identifier: Apache-2.0
"""The units under a real systemd: five machines, a job that runs all the while.

One machine has etcd and a coordinator, the others a workerd each. The tests go on from one to the
next, in the order in which they stand here.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.containers import DockerError, docker, wait_for
from tests.systemd.machines import BASE, ROOT, WORKERD, Cluster, Machine

COORDINATOR = "hotspare-coordinator.service"
NODES = ("n1", "n2", "n3", "n4")
WATCHDOG = {COORDINATOR: 30, "hotspare-workerd@.service": 6}
OUTAGE = 40
"""Seconds, more than a watchdog waits."""
JOB = """\
name = "long"
command = ["python", "/jobs/train.py", "1000000"]
replicas = 3
spares = 1
seed = 1
restarts = 100

[environment]
OMP_NUM_THREADS = "1"
PACE = "0.05"
"""


@dataclass(frozen=True)
class Site:
    """The machines, and whom to ask."""

    head: Machine
    nodes: dict[str, Machine]
    cluster: Cluster

    def step(self) -> int:
        return int(self.cluster.job("long")["status"]["step"])

    def await_steps(self) -> None:
        """Wait until the job has got on, and is whole."""
        before = self.step()
        wait_for(lambda: self.runs() and self.step() > before + 5, f"it goes on from {before}")

    def runs(self) -> bool:
        job = self.cluster.job("long")
        return bool(
            "RUNNING" in job["status"]["state"]
            and len(job["slots"]) == 3
            and all(one["node"] in self.cluster.nodes() for one in job["slots"])
        )

    def spare(self) -> str:
        """The node without a place, once it is warm."""

        def warm() -> str:
            owners = self.cluster.owners("long")
            for name, one in self.cluster.nodes().items():
                if name not in owners and one["node"].get("warm", {}).get("job") == "long":
                    return name
            return ""

        return wait_for(warm, "a spare is warm")

    def incidents(self) -> list[Any]:
        return list(self.cluster.job("long")["incidents"])


def installed(machine: Machine) -> None:
    machine.copy_sources()
    machine.shell("cd /src && WHEELS=/wheels make install")


def settings(machine: Machine, head: Machine) -> None:
    """What docs/install.md says of several machines."""
    common = f"HOTSPARE_ETCD={head.address}:2379\nHOTSPARE_INSECURE_NETWORK=yes\n"
    machine.write(
        "/etc/hotspare/workerd.env",
        f"{common}HOTSPARE_LISTEN={machine.address}:0\nHOTSPARE_DATA_ADDRESS={machine.address}\n"
        "WORKERD_OPTIONS=--label rack=r1\n",
    )
    machine.write(
        "/etc/hotspare/coordinator.env", f"{common}HOTSPARE_LISTEN={machine.address}:7400\n"
    )
    for unit, seconds in WATCHDOG.items():
        machine.write(
            f"/etc/systemd/system/{unit}.d/quick.conf", f"[Service]\nWatchdogSec={seconds}\n"
        )
    machine.run("systemctl", "daemon-reload")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    tag = uuid.uuid4().hex[:6]
    network, image = f"hs-{tag}", f"hotspare-systemd-{tag}"
    subnet = f"10.213.{os.getpid() % 200 + 20}"
    docker("network", "create", "--subnet", f"{subnet}.0/24", network)
    machines: list[Machine] = []

    def boot(name: str, image: str, *options: str) -> Machine:
        address = f"{subnet}.{len(machines) + 10}"
        machines.append(Machine(f"hs-{tag}-{name}", image, network, address, *options))
        return machines[-1]

    try:
        head = boot("head", BASE, "-v", f"{ROOT}/build/wheels:/wheels:ro")
        head.run("systemctl", "disable", "--now", "etcd")
        installed(head)
        head.write("/jobs/train.py", (ROOT / "tests/container_job.py").read_text())
        docker("commit", head.name, image)
        nodes = {name: boot(name, image) for name in NODES}
        for one in machines:
            settings(one, head)
        head.write("/jobs/job.toml", JOB)
        head.write(
            "/etc/default/etcd",
            f"ETCD_LISTEN_CLIENT_URLS=http://{head.address}:2379\n"
            f"ETCD_ADVERTISE_CLIENT_URLS=http://{head.address}:2379\n",
        )
        head.run("systemctl", "enable", "--now", "etcd")
        yield Site(head, nodes, Cluster(head))
    finally:
        for one in machines:
            print(f"---- {one.name}", one.shell("journalctl -q -n 60 -u 'hotspare-*' || true"))
            one.remove()
        docker("network", "rm", network)
        docker("image", "rm", "--force", image)


def test_a_started_unit_is_a_registered_node(site: Site) -> None:
    site.head.run("systemctl", "enable", "--now", COORDINATOR)
    wait_for(lambda: site.head.show(COORDINATOR, "StatusText") == "leads", "it leads")
    for name, machine in site.nodes.items():
        machine.run("systemctl", "enable", "--now", WORKERD.format(name))
        # Ready means registered: nothing to wait for.
        assert name in site.cluster.nodes()
        assert machine.show(WORKERD.format(name), "StatusText").startswith("registered")
    site.cluster.ask("submit", "/jobs/job.toml")
    site.await_steps()
    assert site.spare()


def test_the_journal_finds_what_is_said_of_a_job_and_of_a_node(site: Site) -> None:
    owner = site.cluster.owners("long")[0]
    for machine, unit in ((site.head, COORDINATOR), (site.nodes[owner], WORKERD.format(owner))):
        said = machine.run("journalctl", "-q", "-o", "cat", "-u", unit, "HOTSPARE_JOB=long")
        assert "generation" in said, said
    of_node = site.nodes[owner].run(
        "journalctl", "-q", "-o", "cat", f"HOTSPARE_NODE={owner}", "-p", "info"
    )
    assert "registered as incarnation" in of_node


def test_the_devices_can_be_reached_and_wrong_settings_are_not_tried_again(site: Site) -> None:
    machine, unit = site.nodes["n1"], WORKERD.format("n9")
    machine.shell("mknod -m 666 /dev/accelerator0 c 1 5")  # reads zeros
    # As the same user, behind the same walls as workerd and its trainers.
    look = "head -c 1 /dev/accelerator0 | od -An -tx1; id -un"
    machine.write(
        f"/etc/systemd/system/{unit}.d/look.conf", f"[Service]\nExecStartPre=/bin/sh -c '{look}'\n"
    )
    machine.write("/etc/hotspare/workerd-n9.env", "HOTSPARE_LEASE_TTL=soon\n")
    machine.run("systemctl", "daemon-reload")
    with pytest.raises(DockerError):
        machine.run("systemctl", "start", unit)
    said = machine.run("journalctl", "-q", "-o", "cat", "-u", unit)
    assert {"00", "hotspare"} <= {line.strip() for line in said.splitlines()}, said
    assert "'soon': must be 1 to 3600 seconds" in said
    assert machine.show(unit, "ActiveState") == "failed"
    assert machine.show(unit, "NRestarts") == "0"
    machine.run("systemctl", "reset-failed", unit)  # else the machine counts as degraded


def test_a_killed_workerd_comes_back_and_leaves_nothing(site: Site) -> None:
    victim = site.cluster.owners("long")[1]
    machine, unit = site.nodes[victim], WORKERD.format(victim)
    old = machine.main_pid(unit)
    left = set(machine.trainers())
    assert left
    site.spare()
    machine.run("kill", "-KILL", str(old))
    wait_for(lambda: machine.main_pid(unit) not in (0, old), "systemd starts it again")
    wait_for(lambda: not left & set(machine.trainers()), "its trainers are gone")
    site.await_steps()
    assert site.spare() == victim


def test_a_workerd_that_hangs_is_ended_by_the_watchdog(site: Site) -> None:
    victim = site.cluster.owners("long")[0]
    machine, unit = site.nodes[victim], WORKERD.format(victim)
    old = machine.main_pid(unit)
    left = set(machine.trainers())
    machine.run("kill", "-STOP", str(old))
    wait_for(lambda: machine.main_pid(unit) not in (0, old), "systemd starts it again")
    said = machine.run("journalctl", "-q", "-o", "cat", "-u", unit)
    assert "Watchdog timeout" in said
    assert "Fatal Python error: Aborted" in said  # with the stacks of all threads
    wait_for(lambda: not left & set(machine.trainers()), "its trainers are gone")
    site.await_steps()
    assert site.spare() == victim


def test_a_coordinator_that_hangs_is_ended_by_the_watchdog(site: Site) -> None:
    old = site.head.main_pid(COORDINATOR)
    site.head.run("kill", "-STOP", str(old))
    wait_for(lambda: site.head.main_pid(COORDINATOR) not in (0, old), "systemd starts it again")
    wait_for(lambda: site.head.show(COORDINATOR, "StatusText") == "leads", "it leads again")
    site.await_steps()


def test_an_outage_of_etcd_starts_no_daemon_again(site: Site) -> None:
    units = [(site.head, COORDINATOR)]
    units += [(machine, WORKERD.format(name)) for name, machine in site.nodes.items()]
    before = [machine.main_pid(unit) for machine, unit in units]
    incidents = len(site.incidents())
    page = "cat /run/hotspare/*/trainers/*/stdout | tail -n 1"
    owner = site.nodes[site.cluster.owners("long")[0]]
    site.head.run("systemctl", "stop", "etcd")
    owner.run("sleep", str(OUTAGE))  # the time is what is being tested
    last = owner.shell(page)
    wait_for(lambda: owner.shell(page) != last, "training goes on without etcd")
    site.head.run("systemctl", "start", "etcd")
    wait_for(lambda: len(site.cluster.nodes()) == len(NODES), "all nodes are there again")
    site.await_steps()
    assert [machine.main_pid(unit) for machine, unit in units] == before
    assert len(site.incidents()) == incidents


def test_a_restart_of_workerd_ends_its_trainers_and_a_spare_takes_over(site: Site) -> None:
    victim = site.cluster.owners("long")[2]
    machine, unit = site.nodes[victim], WORKERD.format(victim)
    site.spare()
    left = set(machine.trainers())
    machine.run("systemctl", "restart", unit)
    assert not left & set(machine.trainers())
    site.await_steps()
    assert victim not in site.cluster.owners("long")
    assert site.spare() == victim


def test_a_machine_that_reboots_is_a_spare_again(site: Site) -> None:
    victim = site.cluster.owners("long")[0]
    machine = site.nodes[victim]
    docker("kill", machine.name)
    site.await_steps()
    assert victim not in site.cluster.owners("long")
    docker("start", machine.name)
    machine.await_boot()
    assert site.spare() == victim


def test_a_stop_leaves_nothing_running(site: Site) -> None:
    victim = site.cluster.owners("long")[1]
    machine, unit = site.nodes[victim], WORKERD.format(victim)
    assert len(machine.processes(unit)) >= 3  # workerd, its guardian, a trainer
    machine.run("systemctl", "stop", unit)
    assert machine.processes(unit) == []
    assert machine.trainers() == []
    assert machine.show(unit, "Result") == "success"
    assert machine.show(unit, "ActiveState") == "inactive"
    assert machine.shell("ls -A /run/hotspare || true") == ""
    site.await_steps()


def test_an_uninstalled_machine_has_nothing_left(site: Site) -> None:
    machine = site.nodes[site.cluster.owners("long")[0]]
    machine.shell("cd /src && make uninstall")
    assert machine.trainers() == []
    elsewhere = "-path /src -o -path /proc -o -path /sys"
    found = f"find / /run -xdev \\( {elsewhere} \\) -prune -o -iname '*hotspare*' -print"
    assert machine.shell(found) == ""
    assert machine.shell("getent passwd hotspare || true") == ""
    assert machine.shell("systemctl list-units --all --no-legend 'hotspare-*'") == ""
