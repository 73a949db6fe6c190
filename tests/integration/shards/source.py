# SPDX-License-Identifier: Apache-2.0
"""The process of a source: does what each line of its input says and answers with one line."""

from __future__ import annotations

import json
import sys

import torch

from tests.integration.shards.support import build, identity, memory, reset_peak
from workerd.shards.server import ShardServer


def main() -> None:
    torch.set_num_threads(1)
    seed, width, layers, steps = map(int, sys.argv[1:])
    state = build(seed, width, layers, steps)
    server = ShardServer("127.0.0.1")
    before = 0
    for line in sys.stdin:
        word, *rest = json.loads(line)
        answer: object = None
        if word == "address":
            answer = server.address
        elif word == "offer":
            server.offer(identity(*rest), state.serve(identity().step, state.snapshot()))
            before = reset_peak()
        elif word == "end":
            server.end(rest[0], 30)
            answer = memory("VmHWM") - before
        elif word == "digest":
            answer = state.digest()
        print(json.dumps(answer), flush=True)
    server.close()


if __name__ == "__main__":
    main()
