# SPDX-License-Identifier: Apache-2.0
"""The job that measures what Hotspare costs a step: overhead_job.py PAIRS STEPS RENDEZVOUS RESULT

Two equal models train in turn, in the same processes: a block of steps with plain
DistributedDataParallel, a block with Hotspare. Rank 0 writes JSON to RESULT.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workerd.trainer import join

# About 50 ms a step on one core. Rows for each parameter as where tokens are meant: a rank takes
# thousands of them a step. With few rows the copy of the gradients that Gloo works on shows more.
BATCH, WIDTH, LAYERS = 1408, 256, 8


def _model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def _loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def main() -> None:
    pairs, steps = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, result = sys.argv[3:5]
    inputs = torch.randn(BATCH, WIDTH)
    with join() as job:
        model = job.replicate(_model().to(job.device))
        optimizer = torch.optim.AdamW(model.parameters())
        job.track(model=model, optimizer=optimizer)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=job.rank, world_size=job.replicas
        )
        plain = DistributedDataParallel(_model())
        plain_optimizer = torch.optim.AdamW(plain.parameters())

        def plain_step() -> None:
            _loss(plain, inputs).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()

        def step() -> None:
            with job.attempt():
                _loss(model, inputs).backward()
                job.commit(optimizer)

        def spent() -> tuple[int, int, int]:
            own = job.overhead
            return own.bookkeeping_ns, own.streams_ns, own.agreement_ns

        def block(one: Callable[[], None]) -> list[float]:
            """Medians over its steps: seconds of all, then nanoseconds of Hotspare's parts."""
            dist.barrier()
            samples = []
            for _ in range(steps):
                before, started = spent(), time.perf_counter()
                one()
                seconds = time.perf_counter() - started
                parts = [new - old for new, old in zip(spent(), before, strict=True)]
                samples.append((seconds, *parts))
            return [statistics.median(column) for column in zip(*samples, strict=True)]

        block(plain_step)
        block(step)
        measured = []
        for number in range(pairs):
            # in turn, so that neither always has the other's warm caches
            first, second = (step, plain_step) if number % 2 else (plain_step, step)
            one, two = block(first), block(second)
            with_hotspare, without = (one, two) if number % 2 else (two, one)
            names = ("hotspare", "bookkeeping", "streams", "agreement")
            measured.append({"plain": without[0], **dict(zip(names, with_hotspare, strict=True))})
        if job.rank == 0:
            Path(result).write_text(json.dumps(measured))


main()
