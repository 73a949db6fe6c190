# SPDX-License-Identifier: Apache-2.0
"""The tests' training script: train.py STEPS WIDTH

It has what makes a recovery hard to get right: state besides the parameters (a scheduler, running
statistics), random draws in the forward pass, and an optimizer with a memory. From the environment:
PACE, seconds that a step takes at least; GATE, a file whose coming the replica LATE awaits after
its last step; RAISE_AT, a step at which every replica raises, or RAISE_REPLICA alone;
HANG, how replica 1 stands still at step 20, once: HUNG is the file that says that it has.
"""

import os
import sys
import time

import torch
from torch import nn

from tests.cluster.hanging import hang
from workerd.trainer import join

steps, width = int(sys.argv[1]), int(sys.argv[2])
pace = float(os.environ.get("PACE", "0"))
gate, late = os.environ.get("GATE"), int(os.environ.get("LATE", "-1"))
raise_at, raising = int(os.environ.get("RAISE_AT", "-1")), os.environ.get("RAISE_REPLICA")

with join() as job:
    net = nn.Sequential(
        nn.Linear(32, width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 8),
    )
    model = job.replicate(net.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    while job.step < steps:
        with job.attempt():
            if job.step == raise_at and raising in (None, str(job.replica)):
                raise ValueError(f"no data for step {job.step}")
            if job.step == 20 and job.replica == 1:
                hang(job)
            time.sleep(pace)  # noqa: TID251 - stands for a longer computation
            data = torch.Generator().manual_seed(1000 * job.step + job.replica)
            inputs = torch.randn(16, 32, generator=data).to(job.device)
            loss = (model(inputs) - inputs[:, :8].sin()).square().mean()
            loss.backward()
            job.commit(optimizer)
            scheduler.step()
            print(f"step {job.step} loss {loss.item():.6f}", flush=True)
    if gate and job.replica == late:
        print("late", flush=True)
        while not os.path.exists(gate):
            time.sleep(0.02)  # noqa: TID251 - for the test's file
