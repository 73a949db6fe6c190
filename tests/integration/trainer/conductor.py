# SPDX-License-Identifier: Apache-2.0
"""A stand-in for workerd and the leader: real trainer processes over the real link, driven by hand.

It keeps to the protocol and to nothing else: what it decides, it decides from the messages.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from protos.membership_pb2 import COMPUTING, DONE, EMPTY, PREPARED, Rendezvous, Source
from protos.trainer_pb2 import (
    Committed,
    Done,
    Failed,
    Hello,
    Joined,
    Ready,
    Release,
    Restore,
    Running,
    Stop,
    Stopped,
    Welcome,
)
from tests.integration.trainer.nursery import Nursery
from workerd.protocol import link as wire
from workerd.protocol.page import PageView, ProgressPage

DEADLINE = 60.0
SCRIPT = Path(__file__).with_name("script.py")

M = TypeVar("M")


@dataclass(frozen=True)
class Shape:
    """What a trainer is told of its job, and of its place on its node."""

    replicas: int
    positions: int = 1
    ranks_per_node: int = 1
    local_rank: int = 0


class Trainer:
    """One real trainer process and workerd's end of its link."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        instance: str,
        spare: bool,
        shape: Shape,
        environment: Mapping[str, str],
    ) -> None:
        self.instance = instance
        self.messages: list[wire.Upward] = []
        self.failed: str | None = None
        self._changed = threading.Condition()
        page = folder / f"{instance}.page"
        self.page = ProgressPage.create(page)
        self.output = folder / f"{instance}.log"
        listener = wire.Listener(folder / f"{instance}.sock")
        self.process = nursery.start(
            SCRIPT,
            {
                wire.SOCKET_VARIABLE: str(folder / f"{instance}.sock"),
                wire.INSTANCE_VARIABLE: instance,
                wire.PAGE_VARIABLE: str(page),
                **environment,
            },
            self.output,
        )
        self._spare, self._shape, self._listener = spare, shape, listener
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.link = self._listener.accept(DEADLINE)
        except wire.LinkError:
            return
        finally:
            self._listener.close()
        hello = self.link.receive(DEADLINE)
        assert isinstance(hello, Hello)
        assert hello.pid == self.process.pid
        self.link.send(
            Welcome(
                job="job",
                seed=7,
                local_rank=self._shape.local_rank,
                ranks_per_node=self._shape.ranks_per_node,
                shard_positions=self._shape.positions,
                replicas=self._shape.replicas,
                spare=self._spare,
                data_address="127.0.0.1",
            )
        )
        while True:
            try:
                message = self.link.receive()
            except wire.LinkClosed:
                with self._changed:
                    self._changed.notify_all()
                return
            with self._changed:
                self.messages.append(message)
                if isinstance(message, Failed):
                    self.failed = message.traceback
                self._changed.notify_all()

    def expect(
        self, kind: type[M], fits: Callable[[M], bool] = lambda m: True, *, alive: bool = True
    ) -> M:
        """The first message of a kind that fits, now or within the deadline."""
        deadline = time.monotonic() + DEADLINE
        with self._changed:
            while True:
                for message in self.messages:
                    if isinstance(message, kind) and fits(message):
                        return message
                left = deadline - time.monotonic()
                ended = alive and self.process.poll() is not None
                if left <= 0 or ended or (self.failed and kind is not Failed):
                    raise AssertionError(
                        f"{self.instance} sends no {kind.__name__}"
                        f" (exit {self.process.poll()}):\n"
                        f"{self.failed or ''}\n{self.output.read_text()[-4000:]}\n"
                        f"{[type(m).__name__ for m in self.messages]}"
                    )
                self._changed.wait(min(left, 0.2))

    def reached(self, fits: Callable[[PageView], bool]) -> PageView:
        """The page's first view that fits, by looking at it often."""
        deadline = time.monotonic() + DEADLINE
        while True:
            view = self.page.read()
            if fits(view):
                return view
            assert time.monotonic() < deadline, f"{self.instance} stands at {view}"
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.0005)  # noqa: TID251 - a page has no event to wait on

    def reached_step(self, step: int) -> PageView:
        return self.reached(lambda view: view.step >= step)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(DEADLINE)

    def counts(self) -> tuple[int, int]:
        """Threads and open descriptors of the process."""
        own = Path(f"/proc/{self.process.pid}")
        return len(list((own / "task").iterdir())), len(list((own / "fd").iterdir()))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        self._thread.join(DEADLINE)
        if hasattr(self, "link"):
            self.link.close()


class Conductor:
    """One job of replicas of `positions` ranks each. Ranks are the keys of `ranks`."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        positions: int = 1,
        ranks_per_node: int = 1,
        **environment: str,
    ) -> None:
        self.nursery = nursery
        self.folder = folder
        self.positions = positions
        self.ranks_per_node = ranks_per_node
        self.environment = environment
        self.generation = 0
        self.size = 0
        self.ranks: dict[int, Trainer] = {}
        self.all: list[Trainer] = []
        self.replaced: list[Trainer] = []
        self.resume_step = -1

    def trainer(
        self, environment: Mapping[str, str], *, spare: bool = False, local_rank: int = 0
    ) -> Trainer:
        """Starts one more."""
        together = {**self.environment, **environment}
        name = f"t{len(self.all)}"
        shape = Shape(self.size // self.positions, self.positions, self.ranks_per_node, local_rank)
        trainer = Trainer(self.nursery, self.folder, name, spare, shape, together)
        self.all.append(trainer)
        return trainer

    def start(
        self, size: int = 3, spares: int = 0, special: Mapping[int, Mapping[str, str]] | None = None
    ) -> list[Trainer]:
        """Starts `size` ranks (some with an environment of their own) and runs generation 1.

        Answers the spares, which are ready by then; their local ranks count up from 0.
        """
        self.size = size
        waiting = [
            self.trainer({"REHEARSE": "1"}, spare=True, local_rank=one % self.ranks_per_node)
            for one in range(spares)
        ]
        for rank in range(size):
            own = (special or {}).get(rank, {})
            self.ranks[rank] = self.trainer(own, local_rank=rank % self.ranks_per_node)
        for trainer in waiting:
            trainer.expect(Ready)
        self.pause()
        self.restore(self.stopped())
        self.running()
        return waiting

    def pause(self, replace: Mapping[int, Trainer] | None = None) -> None:
        self.generation += 1
        for rank, trainer in (replace or {}).items():
            self.replaced.append(self.ranks[rank])
            self.ranks[rank] = trainer
        for rank, trainer in self.ranks.items():
            if self.generation == 1:
                trainer.expect(Ready)
            trainer.link.send(
                Stop(generation=self.generation, rank=rank, offer_rendezvous=rank < 2)
            )

    def stopped(self) -> dict[int, Stopped]:
        generation = self.generation
        return {
            rank: trainer.expect(Stopped, lambda m: m.generation == generation)
            for rank, trainer in self.ranks.items()
        }

    def restore(
        self,
        acks: Mapping[int, Stopped],
        only: Sequence[int] | None = None,
        sources: Sequence[int] | None = None,
        reserves: Collection[int] = (),
    ) -> int:
        """RESTORE from the acks, to `only` some ranks, naming some `sources`; answers S.

        The replicas of `reserves` are absent.
        """
        present = sorted({r // self.positions for r in self.ranks if r not in reserves})
        held = [ack.step for ack in acks.values() if ack.phase != EMPTY]
        initial = not held
        step = max(held) if held else 0
        offer = next(ack.offer for ack in acks.values() if ack.HasField("offer"))
        for rank in self.ranks if only is None else only:
            replica, position = divmod(rank, self.positions)
            own = {one: ack for one, ack in acks.items() if one % self.positions == position}
            named = [
                Source(
                    rank=one,
                    node=f"node-of-{self.ranks[one].instance}",
                    instance=self.ranks[one].instance,
                    address=ack.shard_address,
                    initial_digest=ack.initial_digest if initial else "",
                )
                for one, ack in own.items()
                if (sources is None or one in sources)
                if (initial and one == min(own))
                or (ack.phase in (COMPUTING, PREPARED, DONE) and ack.step == step)
                or (ack.phase == PREPARED and ack.step == step - 1)
            ]
            self.ranks[rank].link.send(
                Restore(
                    generation=self.generation,
                    resume_step=step,
                    initial=initial,
                    rank=rank,
                    replica=present.index(replica) if replica in present else 0,
                    replicas=len(present),
                    reserve=rank in reserves,
                    shard_position=position,
                    sources=named,
                    rendezvous=Rendezvous(address=offer.address, nonce=offer.nonce),
                )
            )
        self.resume_step = step
        return step

    def running(self) -> None:
        generation = self.generation
        for trainer in self.ranks.values():
            trainer.expect(Joined, lambda m: m.generation == generation)
        for trainer in self.ranks.values():
            trainer.link.send(Running(generation=generation))

    def reached(self, step: int, *ranks: int) -> None:
        """These ranks have come to a step: they learn after others that it was agreed on."""
        for rank in ranks:
            self.ranks[rank].reached_step(step)

    def recover(self, replace: Mapping[int, Trainer] | None = None) -> int:
        """A whole recovery that puts `replace` into the ranks; answers S."""
        self.pause(replace)
        step = self.restore(self.stopped())
        self.running()
        return step

    def committed(self) -> None:
        """Every rank has applied its first update of the generation."""
        generation = self.generation
        for trainer in self.ranks.values():
            trainer.expect(Committed, lambda m: m.generation == generation)

    def first(self, kind: type[M]) -> list[M]:
        """All messages of a kind from all ranks, once there is one."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found: list[M] = [
                message
                for trainer in self.ranks.values()
                for message in list(trainer.messages)
                if isinstance(message, kind)
            ]
            if found:
                return found
            assert time.monotonic() < deadline, f"nobody sends a {kind.__name__}"
            threading.Event().wait(0.01)

    def finish(self) -> str:
        """The end of the job: the digest that all ranks report, after all have exited with 0.

        With several positions their digests, one after the other.
        """
        ends = {rank: trainer.expect(Done).digest for rank, trainer in self.ranks.items()}
        digests: list[str] = []
        for position in range(self.positions):
            held = {end for rank, end in ends.items() if rank % self.positions == position}
            assert len(held) == 1, ends
            digests += held
        steps = {trainer.expect(Done).step for trainer in self.ranks.values()}
        assert len(steps) == 1, steps
        living = [trainer for trainer in self.all if trainer not in self.replaced]
        for trainer in living:
            trainer.link.send(Release(step=max(steps)))
        for trainer in living:
            assert trainer.process.wait(DEADLINE) == 0, trainer.output.read_text()
        return " ".join(digests)

    def close(self) -> None:
        for trainer in self.all:
            trainer.close()
