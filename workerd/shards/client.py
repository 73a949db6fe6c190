# SPDX-License-Identifier: Apache-2.0
"""Pulls a state from those who hold it, straight into the memory of what is tracked here."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Final, Generic, Protocol, TypeVar

import grpc

from protos import shards_pb2, shards_pb2_grpc
from workerd.shards.errors import (
    ChecksumError,
    InvalidManifest,
    NoSource,
    PullAborted,
    PullTimeout,
    SourceRefused,
)
from workerd.shards.manifest import validate
from workerd.shards.memory import Writer
from workerd.shards.receive import Destination
from workerd.shards.state import TrackedState
from workerd.shards.stream import GLANCE, Incoming, Listener
from workerd.shards.wire import OPTIONS, ShardIdentity

_log = logging.getLogger(__name__)

R = TypeVar("R")

_LAST_WORD: Final = 1.0
"""Seconds that a source has to say why its stream has ended."""
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
_MOST_BAD: Final = 3
"""Times that one source may send wrong bytes."""


class Source(Protocol):
    """A rank that serves; protos.membership_pb2.Source is one."""

    @property
    def node(self) -> str: ...

    @property
    def instance(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def initial_digest(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class PullResult:
    """A state that has arrived, was verified and is loaded."""

    source: str
    """The node that the last of it came from."""
    bytes: int
    """Received, over all tries."""
    seconds: float
    digest: str
    """Of the manifest."""


class _TryAgain(Exception):
    """This source may do better later."""


class _WrongBytes(_TryAgain):
    """This source sent what its own manifest contradicts."""


class _Refused(Exception):
    """This source never will."""


def pull(
    sources: Sequence[Source],
    state: TrackedState,
    *,
    host: str,
    job: str,
    generation: int,
    step: int,
    shard_position: int,
    nonce: str,
    timeout: float,
    stop: threading.Event,
) -> PullResult:
    """Receive state `step` from one of `sources` and load it, within `timeout` seconds.

    `host` is this rank's address as the sources reach it: they connect to it to send the bytes.
    Until it returns, what is tracked is torn and must be served or used by nobody. Raises a
    ShardError: Mismatch when the state does not fit, PullAborted soon after `stop` is set,
    SourceRefused, ChecksumError or PullTimeout when no source was left that could deliver.
    """
    if not sources:
        raise NoSource(f"no source for shard position {shard_position} of {job}")
    wanted = ShardIdentity(job, generation, step, shard_position, "", nonce)
    return _Pull(list(sources), wanted, state, host, time.monotonic() + timeout, stop).run()


class _Pull:
    def __init__(
        self,
        sources: list[Source],
        wanted: ShardIdentity,
        state: TrackedState,
        host: str,
        deadline: float,
        stop: threading.Event,
    ) -> None:
        self._sources = sources
        self._wanted = wanted
        self._state = state
        self._host = host
        self._deadline = deadline
        self._stop = stop
        self._arrived: dict[str, str] = {}
        """The checksum of each tensor that lies whole in its place."""
        self._destination: Destination | None = None
        self._digest = ""
        self._bytes = 0

    def run(self) -> PullResult:
        started = time.monotonic()
        last = dict.fromkeys((source.address for source in self._sources), "not asked yet")
        bad = dict.fromkeys(last, 0)
        pause = _FIRST_PAUSE
        try:
            while self._sources:
                before = len(self._arrived)
                # All of them in turn: what one has begun another goes on with.
                for source in list(self._sources):
                    try:
                        digest = self._from(source)
                    except _Refused as refusal:
                        last[source.address] = str(refusal)
                        self._sources.remove(source)
                    except _TryAgain as reason:
                        last[source.address] = str(reason)
                        bad[source.address] += isinstance(reason, _WrongBytes)
                        if bad[source.address] >= _MOST_BAD:
                            self._sources.remove(source)
                    else:
                        seconds = time.monotonic() - started
                        return PullResult(source.node, self._bytes, seconds, digest)
                moved = len(self._arrived) > before
                pause = _FIRST_PAUSE if moved else min(pause * 2, _LONGEST_PAUSE)
                self._wait(pause)
        except PullTimeout:
            raise PullTimeout(f"not whole in time; {_join(last)}") from None
        kind = ChecksumError if any(bad.values()) else SourceRefused
        raise kind(f"no source is left; {_join(last)}")

    def _from(self, source: Source) -> str:
        """Everything from one source. Returns the manifest's digest."""
        identity = dataclasses.replace(self._wanted, instance=source.instance)
        channel = grpc.insecure_channel(
            source.address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        try:
            stub = shards_pb2_grpc.ShardsStub(channel)
            manifest = self._manifest(stub, identity)
            if source.initial_digest and source.initial_digest != manifest.digest:
                raise _WrongBytes(f"its digest is not {source.initial_digest}")
            try:
                validate(manifest, self._wanted.step)
                destination = self._destination_of(manifest, source)
            except InvalidManifest as error:
                raise _WrongBytes(str(error)) from error
            missing = [
                entry
                for entry in manifest.tensors
                if self._arrived.get(entry.name) != entry.checksum
            ]
            self._tensors(stub, identity, destination, missing)
            destination.load()
            return manifest.digest
        finally:
            channel.close()

    def _destination_of(self, manifest: shards_pb2.Manifest, source: Source) -> Destination:
        if self._destination is None or self._digest != manifest.digest:
            if self._destination is not None:
                _log.warning("%s holds another state than the source before it", source.address)
                self._arrived.clear()
            self._destination = Destination(self._state, manifest)
            self._digest = manifest.digest
        return self._destination

    def _manifest(
        self, stub: shards_pb2_grpc.ShardsStub, identity: ShardIdentity
    ) -> shards_pb2.Manifest:
        request = shards_pb2.ManifestRequest(shard=identity.request())
        with _calling(stub.GetManifest.future(request, timeout=self._left())) as call:
            while not call.over.wait(GLANCE):
                self._glance()
            return call.answer()

    def _tensors(
        self,
        stub: shards_pb2_grpc.ShardsStub,
        identity: ShardIdentity,
        destination: Destination,
        missing: list[shards_pb2.TensorEntry],
    ) -> None:
        if not missing:
            return
        for entry in missing:
            self._arrived.pop(entry.name, None)
        try:
            listener = Listener(self._host)
        except OSError as error:
            raise _TryAgain(f"cannot listen on {self._host}: {error}") from error
        with listener:
            request = shards_pb2.PullRequest(
                shard=identity.request(),
                tensors=[entry.name for entry in missing],
                address=listener.address,
                token=listener.token,
            )
            with _calling(stub.Pull.future(request, timeout=self._left())) as call:

                def glance() -> None:
                    self._glance()
                    if call.over.is_set():
                        call.answer()  # why nothing comes

                try:
                    with closing(listener.accept(glance)) as stream:
                        self._receive(stream, destination, missing, glance)
                except OSError as error:
                    # The call knows better.
                    deadline = time.monotonic() + _LAST_WORD
                    while time.monotonic() < deadline and not call.over.wait(GLANCE):
                        glance()
                    glance()
                    raise _TryAgain(str(error)) from error

    def _receive(
        self,
        stream: Incoming,
        destination: Destination,
        missing: list[shards_pb2.TensorEntry],
        glance: Callable[[], None],
    ) -> None:
        wrong: list[str] = []
        for entry in missing:
            writer = Writer(destination.tensors[entry.name])
            while writer.filled < writer.size:
                self._glance()
                size = stream.read(writer.space(), glance)
                writer.taken(size)
                self._bytes += size
            if writer.finish() == entry.checksum:
                self._arrived[entry.name] = entry.checksum
            else:
                wrong.append(entry.name)
        if wrong:
            raise _WrongBytes(f"wrong checksum: {wrong[0]}, {len(wrong)} in all")

    def _glance(self) -> None:
        if self._stop.is_set():
            raise PullAborted("stopped")
        if time.monotonic() >= self._deadline:
            raise PullTimeout("not whole in time")

    def _left(self) -> float:
        self._glance()
        return self._deadline - time.monotonic()

    def _wait(self, seconds: float) -> None:
        self._stop.wait(min(seconds, max(0.0, self._deadline - time.monotonic())))
        self._glance()


class _Call(Generic[R]):
    """A call in progress."""

    def __init__(self, future: grpc.Future[R]) -> None:
        self._future = future
        self.over = threading.Event()
        future.add_done_callback(lambda _: self.over.set())

    def answer(self) -> R:
        """What it answered; raises what the source said instead. Once it is over."""
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise _reason(error) from error


@contextmanager
def _calling(future: grpc.Future[R]) -> Iterator[_Call[R]]:
    try:
        yield _Call(future)
    finally:
        future.cancel()


def _join(last: Mapping[str, str]) -> str:
    return "; ".join(f"{address}: {words}" for address, words in last.items())


def _reason(error: grpc.RpcError) -> Exception:
    code, details = error.code(), error.details()
    said = f"{code.name}: {details}"
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
        return _Refused(said)
    return _TryAgain(said)
