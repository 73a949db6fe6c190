# SPDX-License-Identifier: Apache-2.0
"""``workerd``: the daemon of one node."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.host import logs, network
from coordinator.host.notify import Notifier

_DESCRIPTION = """\
The daemon of one node: registers it in etcd, starts its trainers and keeps spares' trainers hot,
watches the node's own place, and acknowledges for it. Prints 'listening on HOST:PORT' once the
node is registered. Ends its trainers and gives its lease back on SIGTERM."""

_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?")
_LEVELS = ("debug", "info", "warning", "error")
_WILDCARDS = ("", "0.0.0.0", "[::]", "*")  # noqa: S104 - refused, that is


def _default_folder(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_RUNTIME_DIR")
    return f"{base}/hotspare" if base and os.getuid() != 0 else "/run/hotspare"


def _address(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: must be HOST:PORT, with port 0 for a free one")
    if host in _WILDCARDS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must name the address that coordinators reach this node at"
        )
    return text


def _host(text: str) -> str:
    if text in _WILDCARDS or re.fullmatch(r"[A-Za-z0-9.:_-]+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be the address that peers reach")
    return text


def _node(text: str) -> str:
    from coordinator.store import InvalidKey
    from coordinator.store.keys import check_name

    try:
        return check_name(text, "node")
    except InvalidKey as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _ttl(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1 to 3600 seconds")
    return seconds


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or _LABEL.fullmatch(name) is None or len(value) > 256:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be NAME=VALUE; the name of letters, digits and - _ . /, "
            "the value of at most 256 characters"
        )
    return name, value


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r}: must be one of {', '.join(_LEVELS)}")
    return text


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workerd",
        description=_DESCRIPTION,
        epilog="Each option but --label may be given in the environment too, as in "
        "HOTSPARE_LEASE_TTL=5; the command line comes first.",
    )

    def option(name: str, default: str | None, **more: object) -> None:
        variable = "HOTSPARE_" + name.upper().replace("-", "_")
        value = environment.get(variable, default)
        parser.add_argument(f"--{name}", default=value, required=value is None, **more)  # type: ignore[arg-type]

    option(
        "etcd",
        "127.0.0.1:2379",
        metavar="HOST:PORT[,...]",
        help="etcd's endpoints (default %(default)s)",
    )
    option(
        "prefix",
        "/hotspare/default",
        help="the cluster's prefix in etcd (default %(default)s)",
    )
    option(
        "node",
        None,
        type=_node,
        help="this node's id: lower-case letters, digits and - _ . (required)",
    )
    option(
        "listen",
        "127.0.0.1:0",
        type=_address,
        metavar="HOST:PORT",
        help="where coordinators reach this node; port 0 takes a free one (default %(default)s)",
    )
    option(
        "data-address",
        "127.0.0.1",
        type=_host,
        metavar="HOST",
        help="where other nodes' trainers reach those of this node (default %(default)s)",
    )
    option(
        "devices",
        "auto",
        metavar="auto|cuda|cpu:K",
        help="one trainer runs on each: all GPUs, else one CPU device; or K CPU devices "
        "(default %(default)s)",
    )
    option(
        "lease-ttl",
        "5",
        type=_ttl,
        metavar="SECONDS",
        help="how long etcd keeps the node after its last sign of life (default %(default)s)",
    )
    option(
        "runtime-dir",
        _default_folder(environment),
        type=Path,
        metavar="DIR",
        help="socket, pages and the trainers' output, of this workerd alone (default %(default)s)",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        type=_label,
        metavar="NAME=VALUE",
        help="where the node is, as in rack=r1; may be repeated",
    )
    option(
        "log-level",
        "info",
        type=_level,
        metavar="|".join(_LEVELS),
        help="what is written to stderr (default %(default)s)",
    )
    network.add_flag(parser, environment)
    parser.add_argument("--version", action="version", version=f"workerd {_version()}")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("hotspare")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run workerd; the exit status: 0 after a signal, 1 if it could not run, 2 for bad options."""
    parser = _parser(os.environ)
    options = parser.parse_args(arguments)
    hosts = {"--listen": options.listen.rpartition(":")[0], "--data-address": options.data_address}
    if refusal := network.refused(hosts, options.insecure_network):
        parser.error(refusal)
    logs.configure(
        "workerd",
        options.log_level,
        f"%(asctime)s %(levelname).1s workerd {options.node} %(message)s",
        options.node,
    )

    from coordinator.model import Node
    from coordinator.store import Store, StoreError
    from protos.node_pb2 import ProbeReply
    from workerd.agent.agent import Agent, draw_incarnation
    from workerd.agent.probe import ListenError, ProbeServer
    from workerd.health import devices
    from workerd.supervisor.runtime import RuntimeFolder, RuntimeFolderError

    # An unexpected error in a thread must not leave a daemon that looks alive.
    threading.excepthook = _thread_failed
    try:
        found = devices.find(options.devices)
        store = Store(options.etcd.split(","), prefix=options.prefix)
    except (ValueError, devices.DeviceError, StoreError) as error:
        parser.error(str(error))
    try:
        folder = RuntimeFolder(options.runtime_dir)
        probe = ProbeServer(options.listen, ProbeReply())
    except (RuntimeFolderError, ListenError) as error:
        print(f"workerd: {error}", file=sys.stderr)  # noqa: T201
        return 1
    template = Node(
        node=options.node,
        incarnation=draw_incarnation(),
        boot_id=_boot_id(),
        version=_version(),
        control_address=probe.address,
        data_address=options.data_address,
        devices=found,
        labels=tuple(sorted(dict(options.label).items())),
    )

    notifier = Notifier(os.environ)

    def ready() -> None:
        print(f"listening on {probe.address}", flush=True)  # noqa: T201
        notifier.ready()

    agent = Agent(store, template, options.lease_ttl, folder, probe, ready, alive=notifier.alive)
    try:
        return agent.run()
    finally:
        store.close()


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "a thread"
    logging.getLogger("workerd").critical(
        "%s failed; workerd ends, and its trainers with it",
        name,
        exc_info=(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback),
    )
    # The parent-death signal and the guardian end the trainers.
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
