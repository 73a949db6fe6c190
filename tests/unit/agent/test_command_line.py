# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workerd.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HOTSPARE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--node"),
        (["--node", "Upper"], "node 'Upper': must be"),
        (["--node", "n", "--listen", "here"], "'here': must be HOST:PORT"),
        (["--node", "n", "--listen", "127.0.0.1:70000"], "must be HOST:PORT"),
        (["--node", "n", "--listen", "0.0.0.0:0"], "must name the address"),
        (["--node", "n", "--data-address", "0.0.0.0"], "must be the address that peers reach"),
        (["--node", "n", "--devices", "cpu:0"], "devices 'cpu:0': must be auto, cuda or cpu:K"),
        (["--node", "n", "--devices", "tpu"], "devices 'tpu'"),
        (["--node", "n", "--lease-ttl", "soon"], "'soon': must be 1 to 3600 seconds"),
        (["--node", "n", "--lease-ttl", "0.5"], "must be 1 to 3600 seconds"),
        (["--node", "n", "--label", "rack"], "'rack': must be NAME=VALUE"),
        (["--node", "n", "--log-level", "loud"], "must be one of debug, info"),
        (["--node", "n", "--etcd", "127.0.0.1:port"], "127.0.0.1:port"),
        (["--node", "n", "--prefix", "/"], "prefix is empty"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_wrong_variable_is_as_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSPARE_NODE", "n")
    monkeypatch.setenv("HOTSPARE_LEASE_TTL", "long")
    with pytest.raises(SystemExit):
        main([])
    assert "'long': must be 1 to 3600 seconds" in capsys.readouterr().err


def test_a_runtime_folder_that_is_too_long_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("x" * 100)
    assert main(["--node", "n", "--devices", "cpu:1", "--runtime-dir", str(folder)]) == 1
    assert "too long for the Unix socket" in capsys.readouterr().err


def test_an_address_that_is_taken_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--node", "n", "--devices", "cpu:1", "--listen", address]
        assert main([*options, "--runtime-dir", str(tmp_path / "r")]) == 1
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_the_daemon_imports_no_torch() -> None:
    code = (
        "import sys, workerd.__main__, workerd.agent.agent; "
        "bad = [one for one in sys.modules if one.partition('.')[0] == 'torch' "
        "or one.startswith(('workerd.trainer', 'workerd.shards'))]; "
        "sys.exit(repr(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
