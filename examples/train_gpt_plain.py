# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on the standard library's sources, without Hotspare."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt import GPT, Corpus

steps = int(sys.argv[1])
corpus = Corpus(batch=12)

dist.init_process_group()
torch.manual_seed(1)
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
model = DistributedDataParallel(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(steps):
    loss = model(corpus.batch(step, rank, ranks).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
