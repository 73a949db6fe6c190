# SPDX-License-Identifier: Apache-2.0
"""What a stopped trainer offers to others: its state, and a rendezvous store.

Both exist between a stop and the RUNNING that ends it. In normal running a trainer has no gRPC
server and none of gRPC's threads: scripts fork their data loaders.
"""

from __future__ import annotations

import secrets
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed

from protos.membership_pb2 import Rendezvous

if TYPE_CHECKING:
    from workerd.shards.manifest import Served
    from workerd.shards.server import ShardServer
    from workerd.shards.wire import ShardIdentity

dist: Any = torch.distributed  # its stubs leave most of this out

READERS_TIMEOUT: Final = 10.0  # seconds; a reader holds on to the state for one chunk at a time
_BACKLOG: Final = 4096


class Serving:
    """The offers of one trainer. Thread-safe."""

    def __init__(self, address: str) -> None:
        """`address`: the host to bind, explicit, as peers reach it."""
        self._address = address
        self._lock = threading.Lock()
        self._server: ShardServer | None = None
        self._stores: dict[int, Any] = {}

    def open(self) -> str:
        """host:port of the shard server, which is started if there is none. Raises OSError."""
        from workerd.shards.server import ShardServer

        with self._lock:
            if self._server is None:
                self._server = ShardServer(self._address)
            return self._server.address

    def offer_store(self, generation: int) -> Rendezvous:
        """A store for `generation`, on a port that is bound already. Raises OSError."""
        listening = socket.create_server((self._address, 0), backlog=_BACKLOG)
        port = listening.getsockname()[1]
        # torch would listen on every interface, so it is given a socket; it closes it.
        store = dist.TCPStore(
            self._address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
        with self._lock:
            self._stores[generation] = store
        return Rendezvous(address=f"{self._address}:{port}", nonce=secrets.token_hex(16))

    def offer(self, identity: ShardIdentity, served: Served) -> None:
        """Serves a state; the server has been opened. Raises ValueError for an ended generation."""
        with self._lock:
            server = self._server
        if server is None:
            raise ValueError(f"nothing is open for {identity}")
        server.offer(identity, served)

    def end(self, generation: int) -> None:
        """Cuts the streams of `generation` and older ones; returns when their readers have left.

        Raises workerd.shards.errors.ReadersRemain.
        """
        with self._lock:
            server = self._server
        if server is not None:
            server.end(generation, READERS_TIMEOUT)

    def running(self, generation: int) -> None:
        """`generation` runs: gives back the server and older generations' stores, in time."""
        with self._lock:
            server, self._server = self._server, None
            old = [self._stores.pop(g) for g in list(self._stores) if g < generation]
        if server is not None or old:
            threading.Thread(
                target=_give_back, args=(server, old), name="hotspare-offers", daemon=True
            ).start()

    def close(self) -> None:
        """Ends all offers now."""
        with self._lock:
            server, self._server = self._server, None
            stores, self._stores = list(self._stores.values()), {}
        _give_back(server, stores)


def _give_back(server: ShardServer | None, stores: list[Any]) -> None:
    stores.clear()
    if server is not None:
        server.close()
