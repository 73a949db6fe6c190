# SPDX-License-Identifier: Apache-2.0
"""Builds the group of one generation: every rank meets all those that it has to do with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from workerd.trainer.barrier import Barrier
from workerd.trainer.errors import ReplicasDiffer
from workerd.trainer.group import DATA, HOST, Group, GroupPlan, drop, inner_key

dist: Any = torch.distributed  # its stubs leave most of this out

BUILD_TIMEOUT: Final = timedelta(seconds=60)
# A peer may rightly be slow (it writes a file, compiles): who is stuck is judged elsewhere.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


def _gloo(store: Any, rank: int, size: int, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    # An explicit device: the default one is found by the host's name.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = BUILD_TIMEOUT
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend._set_default_timeout(COLLECTIVE_TIMEOUT)
    return backend


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    # torch's watchdog must not end the process for an error that a regroup repairs.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    if torch.cuda.nccl.version() >= (2, 18):
        options.config.blocking = 0  # with it an abort does not wait for the peers
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend


def build(plan: GroupPlan, on_broken: Callable[[int, str], None]) -> Group:
    """Meets the other ranks; returns when all have come, which is the generation's barrier.

    Blocks up to BUILD_TIMEOUT when a peer does not come: call it from a thread that may be left
    alone. Raises ReplicasDiffer, and RuntimeError (or torch's subclasses) when it fails.
    """
    store = dist.PrefixStore(
        f"{plan.job}/{plan.generation}/{plan.nonce}/",
        dist.TCPStore(
            plan.store_host,
            plan.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=BUILD_TIMEOUT,
        ),
    )
    place = f"position{plan.position}"
    store.set(f"{place}/facts/{plan.replica}", json.dumps(dict(plan.facts)))
    built: dict[str, Any] = {}
    barrier = None
    try:
        at = dist.PrefixStore(f"{place}/", store)
        built[HOST] = _gloo(at, plan.replica, plan.replicas, plan.data_address)
        built[DATA] = built[HOST]
        if plan.device.type == "cuda":
            reducing = dist.PrefixStore("nccl/", at)
            built[DATA] = _nccl(reducing, plan.replica, plan.replicas, plan.device)
        if plan.positions > 1:
            _build_inner(plan, dist.PrefixStore(f"replica{plan.replica}/", store), built)
        barrier = Barrier(
            dist.PrefixStore("agreement/", store),
            plan.replica * plan.positions + plan.position,
            plan.replicas * plan.positions,
            plan.data_address,
            build=BUILD_TIMEOUT,
            wait=COLLECTIVE_TIMEOUT,
        )
        first = json.loads(store.get(f"{place}/facts/0"))
        for name, value in plan.facts.items():
            if first.get(name) != value:
                raise ReplicasDiffer(
                    f"{name} of replica {plan.replica} is not that of replica 0 "
                    f"({value} here, {first.get(name)} there)"
                )
    except BaseException:
        backends = list(set(built.values()))
        built.clear()  # the exception holds on to this frame
        if barrier is not None:
            barrier.end()
        drop(backends, barrier)
        raise
    return Group(plan, built, barrier, on_broken)


def _build_inner(plan: GroupPlan, store: Any, built: dict[str, Any]) -> None:
    for name, members in plan.inner.items():
        among = "-".join(map(str, members))
        at = dist.PrefixStore(f"{name}/{among}/", store)
        rank, size = members.index(plan.position), len(members)
        built[inner_key(name, False)] = _gloo(at, rank, size, plan.data_address)
        if plan.device.type == "cuda":
            reducing = dist.PrefixStore("nccl/", at)
            built[inner_key(name, True)] = _nccl(reducing, rank, size, plan.device)
