# SPDX-License-Identifier: Apache-2.0
"""The job that is killed again and again: soak_job.py STEPS HURRY

A step takes at least 50 ms until the file HURRY is there.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from workerd.trainer import join

steps, hurry = int(sys.argv[1]), sys.argv[2]

with join() as job:
    net = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)
    )
    model = job.replicate(net.to(job.device))
    optimizer = torch.optim.AdamW(model.parameters())
    job.track(model=model, optimizer=optimizer)
    while job.step < steps:
        with job.attempt():
            if not os.path.exists(hurry):
                time.sleep(0.05)  # noqa: TID251 - stands for a longer computation
            data = torch.Generator().manual_seed(1000 * job.step + job.replica)
            inputs = torch.randn(32, 64, generator=data).to(job.device)
            (model(inputs) - inputs.sin()).square().mean().backward()
            job.commit(optimizer)
