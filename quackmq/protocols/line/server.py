"""The line server: what its connections share, and who is connected.

Who is connected is listed by `records`, for other doors by the broker's
`connections`, and the last of those who were by `ended_connections`.

Call it only from the loop that started it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from quackmq.broker import Broker, Connected
from quackmq.protocols.line import limits
from quackmq.protocols.line.connection import Connection
from quackmq.protocols.line.joint_writes import Outgoing
from quackmq.protocols.line.records import ConnectionRecord, End, EndedConnection
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import KeptLines
from quackmq.serving.server import Address, Bounds, Server


class LineServer(Server[Connection]):
    name = "line"

    def __init__(
        self,
        broker: Broker,
        address: Address,
        settings: LineSettings = LineSettings(),  # noqa: B008  (frozen)
    ) -> None:
        """`address` is a host and a port, the path of a Unix socket, or None: pipes alone."""
        super().__init__(broker, address)
        self.settings = settings
        self.scratch = memoryview(bytearray(limits.LINE_SCRATCH_BYTES))
        self.lines = KeptLines(settings.entry_bytes)
        self.outgoing = Outgoing()
        self._subscribers: dict[str, Connection] = {}
        self._ended: deque[EndedConnection] = deque(maxlen=limits.LINE_ENDED)
        self._work: set[asyncio.Task[None]] = set()

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            connections=limits.LINE_CONNECTIONS,
            backlog=limits.LINE_BACKLOG,
            sweep_ms=self.settings.sweep_ms,
            drain_ms=limits.LINE_DRAIN_MS,
        )

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self, channel)

    async def start(self) -> Address:
        address = await super().start()
        self.broker.connections.add(self._connected)
        return address

    async def close(self) -> None:
        """Let everybody finish what is under way, say `terminate`, close."""
        self.broker.connections.discard(self._connected)
        await super().close()
        while self._work:
            await asyncio.wait(self._work)

    def records(self) -> list[ConnectionRecord]:
        """Of everybody who is connected and has said who it is, in the order of their channels'
        names; a copy."""
        records = [connection.record for connection in self.connections if not connection.is_over]
        return sorted(
            (record for record in records if record is not None),
            key=lambda record: (record.role, record.id, record.channel),
        )

    def ended_connections(self) -> list[EndedConnection]:
        """The last ones, the latest last."""
        return list(self._ended)

    # --- what connections call --------------------------------------------------------------

    def ended(self, record: ConnectionRecord, end: End) -> None:
        self._ended.append(EndedConnection(record, end))

    async def take_over(self, name: str, connection: Connection) -> None:
        former = self._subscribers.get(name)
        self._subscribers[name] = connection
        if former is not None and former is not connection:
            former.end(End.REPLACED)
            await former.closed_proxy()

    def give_up(self, name: str, connection: Connection) -> None:
        if self._subscribers.get(name) is connection:
            del self._subscribers[name]

    def work_on(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # --- inside -----------------------------------------------------------------------------

    def _connected(self) -> list[Connected]:
        """The records without their counts, which take longer to find."""
        return [
            Connected("line", *who)
            for connection in self.connections
            if not connection.is_over and (who := connection.who) is not None
        ]
