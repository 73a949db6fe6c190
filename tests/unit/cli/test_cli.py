# SPDX-License-Identifier: Apache-2.0
"""Flags, help and exit codes of the two commands, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from coordinator import cli
from coordinator.__main__ import main as coordinator_main
from coordinator.model import Settings


def usage(run: object, *arguments: str) -> int:
    assert callable(run)
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


COMMANDS = ["submit", "status", "nodes", "events", "stop", "demo", "explain"]
COMMANDS += ["scale", "drain", "replace", "cordon", "uncordon", "pause-recovery", "resume-recovery"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(cli.main, "--help") == 0
    assert command in capsys.readouterr().out
    assert usage(cli.main, command, "--help") == 0
    assert f"hotspare {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("unknown",),
        ("submit",),
        ("stop",),
        ("explain",),
        ("cordon", "--dry-run"),
        ("scale", "demo"),
        ("scale", "demo", "many"),
        ("uncordon", "n0", "--reason", "none is taken"),
        ("status", "--output", "xml"),
        ("status", "--coordinator", "nowhere"),
        ("status", "--coordinator", "a:0"),
        ("status", "--coordinator", ","),
        ("status", "--timeout", "0"),
        ("status", "--timeout", "nan"),
        ("events", "--from-revision", "-1"),
        ("events", "--from-revision", "x"),
        ("status", "--out", "json"),
    ],
)
def test_wrong_usage_exits_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage(cli.main, *arguments) == 2
    assert capsys.readouterr().err.startswith("usage: ")


def test_the_environment_s_coordinator_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSPARE_COORDINATOR", "nonsense")
    assert usage(cli.main, "status") == 2
    assert "'nonsense': must be HOST:PORT" in capsys.readouterr().err


def test_a_wrong_job_file_needs_no_coordinator(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    file = tmp_path / "job.toml"
    file.write_text("name = 1\n")
    assert cli.main(["submit", str(file), "--coordinator", "127.0.0.1:1"]) == 1
    assert "name = 1: must be a string" in capsys.readouterr().err
    file.write_bytes(b"\xff")
    assert cli.main(["submit", str(file)]) == 1


def test_help_is_quick_and_loads_no_grpc() -> None:
    code = (
        "import sys\n"
        "from coordinator.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "assert 'grpc' not in sys.modules, 'grpc was loaded'\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


# ---- coordinator


def test_the_coordinator_s_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(coordinator_main, "--help") == 0
    text = capsys.readouterr().out
    for field in fields(Settings):
        kind = "SHARE" if field.name == "disruption" else "SECONDS"
        assert f"--{field.name.replace('_', '-')} {kind}" in text
        assert f"$HOTSPARE_{field.name.upper()}" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen", "nowhere"), "must be HOST:PORT"),
        (("--listen", "127.0.0.1:70000"), "must be HOST:PORT"),
        (("--listen", "0.0.0.0:0"), "other coordinators must reach this address"),
        (("--lease-ttl", "0"), "must be a number of seconds above 0"),
        (("--lease-ttl", "inf"), "must be a number of seconds above 0"),
        (("--lease-ttl", "x"), "invalid"),
        (("--log-level", "loud"), "must be one of debug"),
        (("--etcd", ","), "must be HOST:PORT"),
    ],
)
def test_wrong_flags_of_the_coordinator(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage(coordinator_main, *arguments) == 2
    assert says in capsys.readouterr().err


def test_a_wrong_variable_is_refused_like_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSPARE_PROBE", "-1")
    assert usage(coordinator_main) == 2
    assert "--probe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--id", "Not A Name"), "--id"),
        (("--prefix", "/"), "prefix"),
        (("--etcd", "http://"), "endpoint"),
        (("--listen", "192.0.2.1:1", "--insecure-network"), "can't listen on 192.0.2.1:1"),
    ],
)
def test_what_keeps_a_coordinator_from_beginning_exits_1(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coordinator_main(["--etcd", "127.0.0.1:1", "--listen", "127.0.0.1:0", *arguments]) == 1
    assert says in capsys.readouterr().err
