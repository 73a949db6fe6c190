# SPDX-License-Identifier: Apache-2.0
"""A training script of the tests: a tiny model, and switches by environment variables."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.integration.trainer import faults
from workerd.trainer import join

torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")

dist: Any = torch.distributed

STEPS = int(os.environ.get("STEPS", "30"))
OWN = int(os.environ.get("OWN", "0"))
KIND = os.environ.get("MODEL", "plain")


class Counter:
    """A data position, as a script keeps it: changed before the commit."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Branches(nn.Module):
    """Every replica uses a part of its own, and one part is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.parts = nn.ModuleList(nn.Linear(64, 4) for _ in range(4))
        self.part = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parts[self.part](self.first(inputs).relu())
        return result


class Split(nn.Module):
    """Every position holds a part of the hidden layer; what it says is summed over the replica."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        self.own, self.all = mesh.get_local_rank(), mesh.size()
        torch.manual_seed(100 + self.own)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(())  # of the rank's own stream
        dist.broadcast(noise, 0, group=self.group)
        shared = torch.empty(self.all)
        dist.all_gather_into_tensor(shared, noise.view(1) * (1 + self.own), group=self.group)
        aside = torch.empty(())
        works = [
            dist.isend(noise * self.own, (self.own + 1) % self.all),
            dist.irecv(aside, (self.own - 1) % self.all),
        ]
        for work in works:
            work.wait()
        partial = self.second(self.first(inputs).relu())
        total: torch.Tensor = Summed.apply(partial, self.group)  # type: ignore[no-untyped-call]
        return total * (1 + shared.sum() + aside)


class Summed(torch.autograd.Function):
    """The sum over a group; every rank goes on with the same, and so has the same gradient."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: Any) -> torch.Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class Grid(nn.Module):
    """Positions of two rows and two columns, which tell each other where they are."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.whole = mesh
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        self.told = {"row": torch.empty(2), "column": torch.empty(2)}
        self.layer = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        here = torch.tensor([float(self.whole.get_local_rank())])
        for name in self.told:
            dist.all_gather_into_tensor(self.told[name], here, group=self.mesh.get_group(name))
        result: torch.Tensor = self.layer(inputs)
        return result

    def check(self) -> None:
        own = self.whole.get_local_rank()
        told = {name: heard.tolist() for name, heard in self.told.items()}
        wanted = {"row": [own % 2, own % 2 + 2], "column": [own - own % 2, own - own % 2 + 1]}
        assert told == wanted, f"position {own} hears {told}"


def build_tensor_parallel() -> nn.Module:
    """A layer in two parts; the dimension that FSDP2 has is of one rank."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["data"])
    return model


def build_sharded(mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over the replica; of three rows two positions hold unequal parts."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 3)]
    model = nn.Sequential(*layers)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build() -> nn.Module:
    torch.manual_seed(int(os.environ.get("INITIAL", "0")))
    if KIND == "branches":
        return Branches()
    layers: list[nn.Module] = [nn.Linear(16, 64)]
    if KIND == "norm":
        layers.append(nn.BatchNorm1d(64))
    layers += [nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Input by index, made in a data loader's worker."""

    def __init__(self, start: int, count: int, replica: int) -> None:
        self.start, self.count, self.replica = start, count, replica

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(1000 * (self.start + index) + self.replica)
        return torch.randn(8, 16, generator=drawn)


class Plain:
    """Batches by step, without data loaders."""

    def batch(self, step: int, replica: int) -> torch.Tensor:
        return Numbers(step, 1, replica)[0]


class Feed:
    """Batches by step, from data loaders with two workers that live for EPOCH steps."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.at = -1
        self.batches: Iterator[torch.Tensor] = iter(())
        self.last = torch.empty(0)

    def batch(self, step: int, replica: int) -> torch.Tensor:
        if step == self.at:  # a repeated step
            return self.last
        if step != self.at + 1 or step % self.epoch == 0:
            end = step - step % self.epoch + self.epoch
            numbers = Numbers(step, end - step, replica)
            loader = torch.utils.data.DataLoader(
                numbers,
                batch_size=None,
                num_workers=2,
                multiprocessing_context="fork",
                # A loader draws its workers' seed when it is iterated. From the step's own stream
                # it would take a number that a repeated step does not take again.
                generator=torch.Generator(),
            )
            self.batches = iter(loader)
        self.at = step
        self.last = next(self.batches)
        return self.last


def main() -> None:
    faults.install()
    with join() as job:
        layout = {
            "bucket_cap_mb": float(os.environ.get("BUCKET", "0.0001")),
            "find_unused_parameters": KIND == "branches",
        }
        if KIND in ("sharded", "tensor"):
            mesh = job.mesh
            model = job.replicate(
                build_sharded(mesh) if KIND == "sharded" else build_tensor_parallel()
            )
        else:
            kinds = {"split": Split, "grid": Grid}
            net = kinds[KIND](job.mesh) if KIND in kinds else build()
            model = job.replicate(net.to(job.device), **layout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        counter = Counter()
        job.track(model=model, optimizer=optimizer, schedule=schedule, counter=counter)

        def rehearsal() -> None:
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()

        if os.environ.get("REHEARSE"):
            job.rehearse(rehearsal)
        epoch = int(os.environ.get("LOADER", "0"))
        feed: Feed | Plain = Feed(epoch) if epoch else Plain()
        if os.environ.get("OUTSIDE"):
            dist.barrier()
        while job.step < STEPS:
            with job.attempt():
                # Positions of a sharded module take each their own part of the data.
                inputs = feed.batch(job.step, job.rank if KIND == "sharded" else job.replica)
                if isinstance(net := getattr(model, "module", model), Branches):
                    net.part = (job.step + job.replica) % 3
                faults.at("forward", job)
                loss = model(inputs).square().mean() + random.random() * 0.1
                faults.at("loss", job)
                counter.seen += 8 + OWN * job.replica
                loss = loss * (1 + torch.rand(()))
                loss.backward()
                faults.at("backward", job)
                if KIND in ("sharded", "tensor"):  # over the replica by DTensor's collectives
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                job.commit(optimizer)
                if isinstance(net := getattr(model, "module", model), Grid):
                    net.check()  # here it is known that no collective has failed
                faults.at("update", job)
                schedule.step()
        print("counter", counter.seen, "step", job.step, flush=True)


main()
