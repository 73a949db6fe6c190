# SPDX-License-Identifier: Apache-2.0
"""A training script whose replicas span ranks without a wrapper: split.py STEPS

Each position holds a part of the hidden layer; one collective sums what they say. PACE, from the
environment: seconds that a step takes at least.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workerd.trainer import join

steps = int(sys.argv[1])
pace = float(os.environ.get("PACE", "0"))


class Summed(torch.autograd.Function):
    """The sum over the replica. All its ranks go on with the same, so the gradient is the same."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


with join() as job:
    torch.manual_seed(1 + job.mesh.get_local_rank())
    net = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8, bias=False))
    model = job.replicate(net.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    while job.step < steps:
        with job.attempt():
            time.sleep(pace)  # noqa: TID251 - stands for a longer computation
            data = torch.Generator().manual_seed(1000 * job.step + job.replica)
            inputs = torch.randn(16, 32, generator=data).to(job.device)
            said = Summed.apply(model(inputs))  # type: ignore[no-untyped-call]
            loss = (said - inputs[:, :8].sin()).square().mean()
            loss.backward()
            job.commit(optimizer)
            print(f"step {job.step} loss {loss.item():.6f}", flush=True)
