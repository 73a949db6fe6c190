# SPDX-License-Identifier: Apache-2.0
"""A trainer without torch: speaks the real link and writes the real page.

``FAKE_STEP``: seconds of a step (default 0.01). ``FAKE_TOTAL``: steps until it is done. A file
``break`` in ``FAKE_FOLDER`` breaks its group, ``fail`` makes it fail. ``FAKE_CHILDREN``: how many
processes it forks at its start, the last one in a session of its own. ``FAKE_DEAF``: it ignores
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from protos import membership_pb2, trainer_pb2
from workerd.protocol import link
from workerd.protocol.page import ProgressPage, StepPhase


class FakeTrainer:
    def __init__(self) -> None:
        self.instance = os.environ[link.INSTANCE_VARIABLE]
        self.page = ProgressPage.open(os.environ[link.PAGE_VARIABLE])
        self.link = link.connect(os.environ[link.SOCKET_VARIABLE])
        self.step_seconds = float(os.environ.get("FAKE_STEP", "0.01"))
        self.total = int(os.environ.get("FAKE_TOTAL", "1000000000"))
        self.folder = Path(os.environ["FAKE_FOLDER"])
        self.generation = self.committed = 0
        self.step = -1
        self.phase = StepPhase.EMPTY
        self.running = False

    def write(self) -> None:
        self.page.write(self.generation, self.step, self.phase)

    def run(self) -> int:
        self.link.send(trainer_pb2.Hello(instance=self.instance, pid=os.getpid()))
        welcome = self.link.receive(30)
        assert isinstance(welcome, trainer_pb2.Welcome), welcome
        self.link.send(trainer_pb2.Ready())
        while True:
            try:
                message = self.link.receive(self.step_seconds if self.running else 0.05)
            except link.LinkTimeout:
                if self.running:
                    self.train()
                if (self.folder / "fail").exists():
                    self.link.send(trainer_pb2.Failed(step=self.step, traceback="it was told to"))
                    return 3
                continue
            match message:
                case trainer_pb2.Stop():
                    self.stop(message)
                case trainer_pb2.Restore():
                    self.restore(message)
                case trainer_pb2.Release():
                    return 0

    def stop(self, message: trainer_pb2.Stop) -> None:
        self.running = False
        offer = None
        if message.offer_rendezvous:
            offer = membership_pb2.Rendezvous(address="127.0.0.1:1", nonce=self.instance)
        self.link.send(
            trainer_pb2.Stopped(
                generation=message.generation,
                phase=membership_pb2.StepPhase.ValueType(self.phase),
                step=self.step,
                initial_digest="d0" if self.step < 0 else "",
                shard_address="127.0.0.1:2",
                offer=offer,
            )
        )

    def restore(self, message: trainer_pb2.Restore) -> None:
        pull = None
        if self.phase is StepPhase.EMPTY and not message.initial:
            pull = membership_pb2.Pull(source=message.sources[0].node, bytes=7, seconds=0.5)
        self.step = message.resume_step
        if self.phase is not StepPhase.DONE:
            self.phase = StepPhase.COMPUTING
        number = message.generation
        self.link.send(trainer_pb2.Restored(generation=number, step=self.step, pull=pull))
        self.generation = number
        self.write()
        self.link.send(trainer_pb2.Joined(generation=number, step=self.step))
        self.running = True

    def train(self) -> None:
        if (self.folder / "break").exists():
            self.running = False
            self.link.send(
                trainer_pb2.Broken(generation=self.generation, step=self.step, error="torn")
            )
            return
        if self.phase is StepPhase.DONE:
            return
        self.step += 1
        self.write()
        if self.committed != self.generation:
            self.committed = self.generation
            self.link.send(trainer_pb2.Committed(generation=self.generation, step=self.step))
        if self.step >= self.total:
            self.phase = StepPhase.DONE
            self.write()
            self.link.send(trainer_pb2.Done(step=self.step, digest="final"))


def fork_children(count: int) -> None:
    for number in range(count):
        if os.fork() == 0:
            if number == count - 1:
                os.setsid()
            while True:
                signal.pause()


if __name__ == "__main__":
    if "FAKE_DEAF" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fork_children(int(os.environ.get("FAKE_CHILDREN", "0")))
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    sys.exit(FakeTrainer().run())
