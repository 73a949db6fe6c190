# SPDX-License-Identifier: Apache-2.0
"""A training script of the tests: a tiny model, and switches by environment variables."""

from __future__ import annotations

import logging
import os
import random
import sys

import torch
from torch import nn

from tests.integration.trainer import faults
from workerd.trainer import join

torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(message)s")

STEPS = int(os.environ.get("STEPS", "30"))
KIND = os.environ.get("MODEL", "plain")


class Counter:
    """A data position, as a script keeps it: changed before the commit."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def build() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(16, 64)]
    if KIND == "norm":
        layers.append(nn.BatchNorm1d(64))
    layers += [nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


def main() -> None:
    faults.install()
    with join() as job:
        model = job.replicate(build().to(job.device), bucket_cap_mb=0.002)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
        counter = Counter()
        job.track(model=model, optimizer=optimizer, schedule=schedule, counter=counter)

        def rehearsal() -> None:
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()

        if os.environ.get("REHEARSE"):
            job.rehearse(rehearsal)
        while job.step < STEPS:
            with job.attempt():
                data = torch.Generator().manual_seed(1000 * job.step + job.replica)
                inputs = torch.randn(8, 16, generator=data)
                faults.at("forward", job)
                loss = model(inputs).square().mean() + random.random() * 0.1
                counter.seen += 8
                loss = loss * (1 + torch.rand(()))
                loss.backward()
                faults.at("backward", job)
                job.commit(optimizer)
                faults.at("update", job)
                schedule.step()
        print("counter", counter.seen, "step", job.step, flush=True)


main()
