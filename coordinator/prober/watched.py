# SPDX-License-Identifier: Apache-2.0
"""One node that is held on to: a connection, pings, and another connection when that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.model import Line
from coordinator.prober.http2 import Connection
from coordinator.prober.lines import reach
from coordinator.prober.said import Contacted

_RESETS = 3
"""So often in a row a new connection that ends at once is tried again at once."""
_AT_ONCE = 0.02  # seconds
_RARELY = 20
"""Times ``patience``, at most, between two tries to reach who has never answered."""


class Watched:
    """Holds on to one incarnation until it is closed. Owned by the loop's thread."""

    def __init__(
        self,
        node: str,
        incarnation: str,
        address: str,
        patience: float,
        tell: Callable[[Contacted], None],
    ) -> None:
        self._who = (node, incarnation)
        self.address = address
        self.connection: Connection | None = None
        """While it answers."""
        self._patience = patience
        self._tell = tell
        self._line: Line | None = None
        self._waker: asyncio.Future[None] | None = None
        self._hurried = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def hurry(self) -> None:
        """Ping it now."""
        self._hurried = True
        self._wake()

    async def close(self) -> None:
        """End it, without another word."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ---- the life of it

    async def _run(self) -> None:
        resets, pause = 0, self._patience
        while True:
            found = await reach(*self._who, self.address, self._patience, self._wake)
            if isinstance(found, Connection):
                resets, pause = 0, self._patience
                await self._hold(found)
                await self._rest(_AT_ONCE)
            elif found.line is Line.LOST and resets < _RESETS:
                resets += 1
                await self._rest(_AT_ONCE)
            else:
                resets = 0
                line = Line.FROZEN if found.line is Line.LOST else found.line
                self._say(line, found.detail)
                await self._rest(pause)
                if self._line is None:
                    pause = min(2 * pause, _RARELY * self._patience)
                elif line is Line.SILENT:
                    self._say(Line.LOST, "it is tried again")

    async def _hold(self, connection: Connection) -> None:
        """Ping it until it answers no more."""
        self.connection = connection
        self._say(Line.ANSWERS, f"{self.address} answers")
        try:
            self._say(Line.LOST, await self._ping(connection))
        finally:
            self.connection = None
            connection.close()

    async def _ping(self, connection: Connection) -> str:
        """Returns why it answers no more."""
        while True:
            self._hurried = False
            sent = connection.ping()
            await self._rest(self._patience)
            if connection.ended:
                return f"{self.address}: {connection.ended}"
            if connection.answered < sent and not self._hurried:
                return f"a ping to {self.address} has not come back in {self._patience:g} s"

    async def _rest(self, seconds: float) -> None:
        """For so long, or until it is woken."""
        self._waker = self._loop.create_future()
        due = self._loop.call_later(seconds, self._wake)
        try:
            await self._waker
        finally:
            due.cancel()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    def _say(self, line: Line, detail: str) -> None:
        """Nothing before it has answered once: its address may be wrong."""
        if (self._line is None and line is not Line.ANSWERS) or line is self._line:
            return
        self._line = line
        self._tell(Contacted(*self._who, line, detail))
