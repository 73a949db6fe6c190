# SPDX-License-Identifier: Apache-2.0
"""The command ``coordinator``: one of any number; one of them leads."""

from __future__ import annotations

import argparse
import logging
import math
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import FrameType

from coordinator.admin import DEFAULT_ADDRESS
from coordinator.host import logs, network
from coordinator.host.notify import Notifier
from coordinator.model import Settings

log = logging.getLogger("coordinator")

_LEVELS = ("debug", "info", "warning", "error")

_GRACE = 2.0
"""Seconds that calls in progress get when the coordinator ends."""

_ABOUT = """\
Decides for a Hotspare cluster: which node has which place in which job, who is dead, when a job
pauses, from which step and from whom it goes on. Run as many as you like: one leads, the others
answer operators and stand by. All state is in etcd; killing a coordinator loses nothing.

Every flag can also be set by the environment variable that its help names; a flag comes first.
"""

_SETTINGS: Mapping[str, str] = {
    "lease_ttl": "lease of a node and of the leader; after an outage of etcd nobody is declared "
    "dead for this long and --election-timeout",
    "election_timeout": "etcd's own election timeout",
    "probe": "how long a suspected node may take to answer a direct probe",
    "ping": "between two pings of a node with a place, and how long it may take to answer one",
    "disruption": "the disruption budget: at most this share of the nodes, though at least one, is "
    "declared dead within --lease-ttl before their leases end",
    "start": "how long a node may take to start the trainers of its place",
    "pause": "how long a node that holds state may take to acknowledge a pause",
    "restore": "how long a node may take to hold the resume step's state and join",
    "progress": "a running job that commits no step for this long is paused",
    "hang": "a running job that stands still for this long, and for ten of its usual steps, is "
    "hung: the rank that the others wait for is replaced",
    "hang_max": "upper bound of those ten steps, and what counts until the usual step is known",
    "regroup": "how long a broken group waits for a culprit to show before it is rebuilt with "
    "everybody; doubled for each time in a row",
    "regroup_max": "upper bound of that doubling",
    "restart": "before an ended trainer is started again on its node, from an incident's second "
    "try on; doubled for each further one",
    "restart_max": "upper bound of that doubling",
    "status": "the least time between two writes of a job's step into its status",
}


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a share, from 0 to 1")
    return value


def _listen(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: must be HOST:PORT, port 0 for a free one")
    if host in ("0.0.0.0", "[::]"):  # noqa: S104 - refused here
        raise argparse.ArgumentTypeError(
            f"{text!r}: other coordinators must reach this address, so name one of this machine's"
        )
    return text


def _endpoints(text: str) -> tuple[str, ...]:
    found = tuple(one.strip() for one in text.split(",") if one.strip())
    if not found:
        raise argparse.ArgumentTypeError("must be HOST:PORT, several separated by commas")
    return found


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(_LEVELS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coordinator",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(
        group: argparse._ArgumentGroup,
        flag: str,
        kind: Callable[[str], object],
        default: object,
        text: str,
        metavar: str,
    ) -> None:
        variable = "HOTSPARE_" + flag.lstrip("-").replace("-", "_").upper()
        # A default that is text goes through the flag's type, so a variable is checked alike.
        group.add_argument(
            flag,
            type=kind,
            default=os.environ.get(variable, default),
            metavar=metavar,
            help=f"{text} (${variable}{f'; default {default}' if default else ''})",
        )

    main = parser.add_argument_group("where it is")
    add(main, "--etcd", _endpoints, "127.0.0.1:2379", "etcd's members", "HOST:PORT[,HOST:PORT]")
    add(main, "--prefix", str, "/hotspare/default", "the cluster's prefix in etcd", "PREFIX")
    add(main, "--id", str, "", "its name, unlike any other's; without one, one is drawn", "NAME")
    add(
        main,
        "--listen",
        _listen,
        DEFAULT_ADDRESS,
        "where operators and the other coordinators reach it",
        "HOST:PORT",
    )
    network.add_flag(main, os.environ)
    add(main, "--log-level", _level, "info", f"one of {', '.join(_LEVELS)}", "LEVEL")
    times = parser.add_argument_group("times, in seconds")
    budget = parser.add_argument_group("limits")
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "disruption":
            add(budget, flag, _share, field.default, _SETTINGS[field.name], "SHARE")
        else:
            add(times, flag, _seconds, field.default, _SETTINGS[field.name], "SECONDS")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code: 0, or 1 when it can't begin."""
    parser = _parser()
    given = parser.parse_args(arguments)
    host = given.listen.rpartition(":")[0]
    if refusal := network.refused({"--listen": host}, given.insecure_network):
        parser.error(refusal)
    logs.configure(
        "coordinator",
        given.log_level,
        "%(asctime)s %(levelname)-7s %(threadName)s %(name)s: %(message)s",
    )
    # A connection to every node; what the system allows at first is often 1,024 descriptors.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
    name = given.id or f"c-{secrets.token_hex(4)}"
    return _run(given.etcd, given.prefix, name, given.listen, settings)


def _run(endpoints: Sequence[str], prefix: str, name: str, listen: str, settings: Settings) -> int:
    from coordinator.admin.reads import election_value
    from coordinator.admin.server import AdminServer, CannotListen
    from coordinator.controller.loop import Controller, Leadership
    from coordinator.store import InvalidKey, Store, StoreError, keys

    try:
        keys.election(name)
        store = Store(endpoints, prefix=prefix)
    except InvalidKey as error:
        print(f"coordinator: --id: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except StoreError as error:
        print(f"coordinator: {error}", file=sys.stderr)  # noqa: T201
        return 1
    with store:
        leading = Leadership()
        try:
            server = AdminServer(store, leading, listen)
        except CannotListen as error:
            print(f"coordinator: {error}", file=sys.stderr)  # noqa: T201
            return 1
        value = election_value(name, server.address)
        notifier = Notifier(os.environ)

        def passed() -> None:
            notifier.alive("leads" if leading.guard is not None else "stands by")

        controller = Controller(store, name, value, settings, leading, passed=passed)

        def end(number: int, frame: FrameType | None) -> None:
            controller.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        server.start()
        print(f"listening on {server.address}", flush=True)  # noqa: T201
        notifier.ready()
        try:
            controller.run()
        finally:
            server.stop(_GRACE)
    log.info("%s has ended", name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
