# SPDX-License-Identifier: Apache-2.0
"""A script whose result doesn't depend on who shares its batch: global_batch.py STEPS OUT

Each step takes one batch, whose size no number of replicas above one divides. In double precision
and without random layers the weights can be compared with those of one process that takes the
whole batch. The first replica writes the final ones to OUT. From the environment: PACE, seconds
that a step takes at least, until the file GATE is there.
"""

import os
import sys
import time

import torch
from torch import nn

from workerd.trainer import join

BATCH = 13


def build() -> nn.Module:
    """The model, always the same."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a memory."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> torch.Tensor:
    """All samples of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """The mean over the samples."""
    loss: torch.Tensor = (model(samples) - samples[:, :2].sin()).square().mean()
    return loss


def train() -> None:
    """As a user's script does it."""
    steps, out, gate = int(sys.argv[1]), sys.argv[2], os.environ["GATE"]
    pace = float(os.environ["PACE"])
    with join() as job:
        model = job.replicate(build().to(job.device))
        optimizer = optimizer_of(model)
        job.track(model=model, optimizer=optimizer)
        while job.step < steps:
            with job.attempt():
                if not os.path.exists(gate):
                    time.sleep(pace)  # noqa: TID251 - stands for a longer computation
                share = job.share(BATCH)
                samples = batch(job.step)[share.start : share.stop]
                loss = loss_of(model, samples) * job.weight(BATCH)
                loss.backward()
                job.commit(optimizer)
                print(f"step {job.step} replica {job.replica} of {job.replicas}", flush=True)
        if job.replica == 0:
            torch.save([one.detach() for one in model.parameters()], out)


if __name__ == "__main__":
    train()
