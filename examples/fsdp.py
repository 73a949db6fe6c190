# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT whose replicas are each sharded over several ranks, with Hotspare."""

import sys

import torch
from torch.distributed.fsdp import fully_shard

from gpt import GPT, Corpus
from workerd.trainer import join

steps = int(sys.argv[1])
corpus = Corpus(batch=12)

with join() as job:
    mesh = job.mesh  # the ranks of this replica
    model = GPT().to(job.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    job.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    job.track(model=model, optimizer=optimizer)
    while job.step < steps:
        with job.attempt():
            part = job.replica * mesh.size() + mesh.get_local_rank()
            texts = corpus.batch(job.step, part, job.replicas * mesh.size())
            loss = model(texts.to(job.device))
            loss.backward()
            job.commit(optimizer)
            if part == 0:
                print(f"step {job.step} loss {loss.item():.4f}", flush=True)
