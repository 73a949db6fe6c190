# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import pytest

from coordinator.__main__ import main as coordinator_main
from coordinator.host import network
from workerd.__main__ import main as workerd_main


def insists(*arguments: str, **environment: str) -> bool | str:
    parser = argparse.ArgumentParser()
    network.add_flag(parser, environment)
    found: bool | str = parser.parse_args(arguments).insecure_network
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_insisting(host: str) -> None:
    assert network.refused({"--listen": host}, insists()) == ""


@pytest.mark.parametrize("host", ["10.0.0.5", "fd00::5", "[2001:db8::1]"])
def test_another_address_does(host: str) -> None:
    said = network.refused({"--data-address": host}, insists())
    assert said.startswith(f"--data-address: {host} is not a loopback address")
    assert "insist with --insecure-network" in said
    assert network.refused({"--data-address": host}, insists("--insecure-network")) == ""
    assert network.refused({"--data-address": host}, insists(HOTSPARE_INSECURE_NETWORK="yes")) == ""


def test_a_variable_that_says_neither_is_refused() -> None:
    assert insists(HOTSPARE_INSECURE_NETWORK="no") is False
    said = network.refused({}, insists(HOTSPARE_INSECURE_NETWORK="perhaps"))
    assert said == "HOTSPARE_INSECURE_NETWORK=perhaps: must be yes or no"


def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    assert "can't be resolved" in network.refused({"--listen": "no.such.invalid"}, insists())


@pytest.mark.parametrize("option", [["--listen", "10.0.0.5:0"], ["--data-address", "10.0.0.5"]])
def test_workerd_refuses(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        workerd_main(["--node", "n", *option])
    assert ended.value.code == 2
    assert "not a loopback address" in capsys.readouterr().err


def test_the_coordinator_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        coordinator_main(["--listen", "10.0.0.5:7400"])
    assert ended.value.code == 2
    assert "not a loopback address" in capsys.readouterr().err
