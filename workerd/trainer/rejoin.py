# SPDX-License-Identifier: Apache-2.0
"""The two long waits of following a RESTORE: fetching the state, and building the group."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from protos.membership_pb2 import Pull
from protos.trainer_pb2 import Restore
from workerd.trainer.build import build
from workerd.trainer.errors import ReplicasDiffer
from workerd.trainer.group import Group, GroupPlan

if TYPE_CHECKING:
    from workerd.shards.wire import ShardIdentity
    from workerd.trainer.session import Session

_log = logging.getLogger("workerd.trainer")

_PULL_TIMEOUT: Final = 600.0  # seconds; the generation's own deadline is the leader's
_PULL_PAUSE: Final = 0.5  # seconds between two tries, unless a stop comes


def shard_identity(job: str, instance: str, restore: Restore) -> ShardIdentity:
    """Whose state it is that this rank serves for `restore`."""
    from workerd.shards.wire import ShardIdentity

    return ShardIdentity(
        job=job,
        generation=restore.generation,
        step=restore.resume_step,
        shard_position=restore.shard_position,
        instance=instance,
        nonce=restore.rendezvous.nonce,
    )


def pull_state(session: Session, restore: Restore) -> Pull | None:
    """Fetches, verifies and loads the state; None when a newer stop has come meanwhile.

    Sources that fail are asked again: they may have failed themselves, and then a stop comes.
    Raises workerd.shards.errors.Mismatch when this script tracks something else.
    """
    from workerd.shards.client import pull
    from workerd.shards.errors import Mismatch, PullAborted, ShardError

    generation = restore.generation
    stop = session.begin_pull(generation)
    if stop is None:
        return None
    while True:
        try:
            result = pull(
                list(restore.sources),
                session.tracked,
                host=session.welcome.data_address,
                job=session.welcome.job,
                generation=generation,
                step=restore.resume_step,
                shard_position=restore.shard_position,
                nonce=restore.rendezvous.nonce,
                timeout=_PULL_TIMEOUT,
                stop=stop,
            )
            break
        except PullAborted:
            return None
        except Mismatch:
            raise
        except ShardError as error:
            _log.warning("state %d has not come: %s", restore.resume_step, error)
            if stop.wait(_PULL_PAUSE):
                return None
    if not session.end_pull(generation):
        return None
    _log.info(
        "pulled state %d from %s: %d bytes in %.3f s",
        restore.resume_step,
        result.source,
        result.bytes,
        result.seconds,
    )
    return Pull(source=result.source, bytes=result.bytes, seconds=result.seconds)


class Building:
    """A group under construction in a thread of its own, which may be left alone.

    The constructor waits for all peers; when one has died meanwhile only its time-out ends it.
    """

    def __init__(self, session: Session, restore: Restore) -> None:
        self._session = session
        self._generation = restore.generation
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._error: BaseException | None = None
        self._left = False
        host, _, port = restore.rendezvous.address.rpartition(":")
        welcome = session.welcome
        self._plan = GroupPlan(
            job=welcome.job,
            generation=restore.generation,
            store_host=host,
            store_port=int(port),
            nonce=restore.rendezvous.nonce,
            replica=restore.replica,
            replicas=restore.replicas,
            position=restore.shard_position,
            positions=welcome.shard_positions,
            data_address=welcome.data_address,
            device=session.device,
            inner=session.inner,
            facts=session.facts,
        )
        threading.Thread(target=self._run, name="hotspare-build-group", daemon=True).start()

    def wait(self) -> Group | None:
        """The group; None when a newer stop has come, or when a stop must come to repair it.

        Raises ReplicasDiffer, and what ends the session.
        """
        try:
            built = self._session.wait_for(self._done, self._generation)
        except BaseException:
            self._leave()
            raise
        if not built:
            self._leave()
            return None
        if isinstance(self._error, ReplicasDiffer):
            raise self._error
        if self._error is not None:
            said = str(self._error).partition("\n")[0]
            self._session.broken(self._generation, f"the group could not be built: {said}")
        return self._group

    def _done(self) -> bool:
        return self._group is not None or self._error is not None

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def _run(self) -> None:
        try:
            group = build(self._plan, self._session.broken)
        except BaseException as error:  # noqa: BLE001 - the main thread raises or reports it
            self._error = error
        else:
            with self._lock:
                if not self._left:
                    self._group = group
                    group = None  # type: ignore[assignment]
            if group is not None:
                group.abandon()
        self._session.notify()
