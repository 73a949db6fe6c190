# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on the standard library's sources, with Hotspare."""

import sys

import torch

from gpt import GPT, Corpus
from workerd.trainer import join

steps = int(sys.argv[1])
corpus = Corpus(batch=12)

with join() as job:
    model = job.replicate(GPT().to(job.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    job.track(model=model, optimizer=optimizer)
    while job.step < steps:
        with job.attempt():
            loss = model(corpus.batch(job.step, job.replica, job.replicas).to(job.device))
            loss.backward()
            job.commit(optimizer)
            if job.replica == 0:
                print(f"step {job.step} loss {loss.item():.4f}", flush=True)
