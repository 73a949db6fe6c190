# SPDX-License-Identifier: Apache-2.0
"""``hotspare``: the operator's command."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from coordinator.admin import DEFAULT_ADDRESS

_PATIENCE = 15.0
_INTERRUPTED = 128 + signal.SIGINT

_ABOUT = """\
Submit training jobs to a Hotspare cluster, see how they and the nodes stand and why, plan changes
of both. Any coordinator of the cluster will do.

Exit codes: 0 done, 1 refused or failed (the reason is on the error output), 2 wrong usage.
"""


def _addresses(text: str) -> tuple[str, ...]:
    found = tuple(one.strip() for one in text.split(",") if one.strip())
    for one in found:
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(f"{one!r}: must be HOST:PORT")
    if not found:
        raise argparse.ArgumentTypeError("must be HOST:PORT, several separated by commas")
    return found


def _patience(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


def _revision(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 (from now on) or a revision")
    return value


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--coordinator",
        type=_addresses,
        metavar="HOST:PORT[,HOST:PORT]",
        default=os.environ.get("HOTSPARE_COORDINATOR", DEFAULT_ADDRESS),
        help=f"where to ask, in this order ($HOTSPARE_COORDINATOR; default {DEFAULT_ADDRESS})",
    )
    common.add_argument(
        "--timeout",
        type=_patience,
        metavar="SECONDS",
        default=_PATIENCE,
        help=f"how long to try while no coordinator answers or leads (default {_PATIENCE:g})",
    )
    common.add_argument(
        "--output",
        choices=("text", "json"),
        default="text",
        help="text for people (default), or JSON, of events one object a line",
    )
    return common


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hotspare",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = _common()

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, parents=[common], help=text, description=text, allow_abbrev=False
        )

    submit = add("submit", "submit the job that a TOML file describes")
    submit.add_argument("file", type=Path, metavar="FILE", help="the job file; - for the input")

    status = add("status", "show all jobs, or all that is known of one")
    status.add_argument("job", nargs="?", metavar="JOB")

    add("nodes", "show all nodes: how they stand and what they are used for")

    events = add("events", "show what happened, and with --follow what happens")
    events.add_argument("--job", metavar="JOB", help="only what concerns this job")
    events.add_argument(
        "--from-revision",
        type=_revision,
        metavar="REVISION",
        help="begin with this revision; default: with the oldest that is kept, "
        "with --follow from now on",
    )
    events.add_argument("--follow", action="store_true", help="go on until interrupted")

    stop = add("stop", "stop a job: its trainers are ended, it is not started again")
    stop.add_argument("job", metavar="JOB")
    stop.add_argument(
        "--reason", metavar="TEXT", default="", help="why; shown with the job and its events"
    )

    explain = add("explain", "show what is done for a job now, or why it isn't")
    explain.add_argument("job", metavar="JOB")
    _add_changes(add)

    text = "see a node of a small training job die and be replaced, on this machine alone"
    commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    return parser


_CHANGES: tuple[tuple[str, str, bool, str], ...] = (
    ("cordon", "NODE", True, "let a node take no new place; what it has it keeps"),
    ("uncordon", "NODE", False, "let a node take places again; calls its drain off, too"),
    (
        "drain",
        "NODE",
        True,
        "let a node take no new place, and give its own to another one at a step's boundary",
    ),
    ("replace", "NODE", True, "as drain, but the node is free again as soon as it is replaced"),
    (
        "pause-recovery",
        "JOB",
        True,
        "let nothing be decided for a job but its end: nobody is declared dead or replaced",
    ),
    (
        "scale",
        "JOB",
        False,
        "let a job run with so many replicas, from a step's boundary on; from its min_replicas to "
        "what it was submitted with",
    ),
    ("resume-recovery", "JOB", False, "let everything be decided for a job again"),
)


def _add_changes(add: Callable[[str, str], argparse.ArgumentParser]) -> None:
    for name, of, has_reason, text in _CHANGES:
        command = add(name, text)
        command.add_argument(of.lower(), metavar=of)
        if name == "scale":
            command.add_argument("replicas", type=int, metavar="REPLICAS")
        if has_reason:
            command.add_argument(
                "--reason", metavar="TEXT", default="", help=f"why; shown with the {of.lower()}"
            )
        command.add_argument(
            "--dry-run", action="store_true", help="change nothing, show what would be done and why"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (wrong usage raises SystemExit(2))."""
    given = _parser().parse_args(arguments)
    if given.command == "demo":
        from coordinator.cli import demo

        return demo.run()
    with _ended_by_interrupt():
        return _operate(given)


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends the process, wherever it is.

    A KeyboardInterrupt is lost where it comes while a callback runs whose errors nobody takes, and
    what is running here leaves nothing to put in order.
    """
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _operate(given: argparse.Namespace) -> int:
    # What follows takes gRPC, which --help and a wrong usage need not wait for.
    from coordinator.cli import changes, commands
    from coordinator.cli.client import CallFailed

    name = given.command.replace("-", "_")
    run = getattr(changes if hasattr(changes, name) else commands, name)
    try:
        return int(run(given))
    except CallFailed as failed:
        print(f"hotspare: {failed.code.name}: {failed}", file=sys.stderr)
        return commands.FAILED
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain at its own end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return commands.OK
