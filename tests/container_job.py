# SPDX-License-Identifier: Apache-2.0
"""What is trained in containers, where this file is all that there is of the tests.

container_job.py STEPS; PACE in the environment: the seconds that a step takes at least.
"""

import os
import sys
import time

import torch
from torch import nn

from workerd.trainer import join

steps, pace = int(sys.argv[1]), float(os.environ["PACE"])

with join() as job:
    net = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8)
    )
    model = job.replicate(net.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    while job.step < steps:
        with job.attempt():
            time.sleep(pace)  # noqa: TID251 - stands for a longer computation
            data = torch.Generator().manual_seed(1000 * job.step + job.replica)
            inputs = torch.randn(16, 32, generator=data).to(job.device)
            loss = (model(inputs) - inputs[:, :8].sin()).square().mean()
            loss.backward()
            job.commit(optimizer)
            print(f"step {job.step} loss {loss.item():.6f}", flush=True)
