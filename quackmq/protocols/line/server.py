"""The door: it listens, lets connections in, and holds what they share.

Peers come over TCP or a Unix socket, or are handed over as a pair of pipes (`attach`); from there
on all are alike. Who is connected is listed by `records`, for other doors by the broker's
`connections`, and the last of those who were by `ended_connections`.

Who may call: the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from itertools import count
from typing import Any

from quackmq.broker import Broker, Connected
from quackmq.loop_clock import loop_clock
from quackmq.protocols.line import limits
from quackmq.protocols.line.connection import Connection
from quackmq.protocols.line.joint_writes import Outgoing
from quackmq.protocols.line.records import ConnectionRecord, End, EndedConnection
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import KeptLines
from quackmq.serving.first_bytes import MistakenPeers
from quackmq.serving.pipes import Pipes
from quackmq.serving.unix_socket import SocketFile

log = logging.getLogger(__name__)


class LineServer:
    def __init__(
        self,
        broker: Broker,
        address: tuple[str, int] | str | None,
        settings: LineSettings = LineSettings(),  # noqa: B008  (frozen)
    ) -> None:
        """`address` is a host and a port, the path of a Unix socket, or None: pipes alone."""
        self.broker = broker
        self.settings = settings
        self.scratch = memoryview(bytearray(limits.LINE_SCRATCH_BYTES))
        self.lines = KeptLines(settings.entry_bytes)
        self.outgoing = Outgoing()
        self.mistaken = MistakenPeers("line", broker.doors)
        self.connections: set[Connection] = set()
        self._address = address
        self._server: asyncio.Server | None = None
        self._file: SocketFile | None = None
        self._numbers = count(1)
        self._subscribers: dict[str, Connection] = {}
        self._ended: deque[EndedConnection] = deque(maxlen=limits.LINE_ENDED)
        self._work: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_closed = asyncio.Event()

    async def start(self) -> tuple[str, int] | str | None:
        """Listen; where, is answered. OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        where = self._address
        if isinstance(where, str):
            self._file = file = SocketFile(where)
            self._server = await loop.create_unix_server(
                lambda: Connection(self, f"unix:{file.path}#{next(self._numbers)}"),
                sock=file.socket,
                backlog=limits.LINE_BACKLOG,
            )
        elif where is not None:
            self._server = await loop.create_server(
                lambda: Connection(self), *where, backlog=limits.LINE_BACKLOG
            )
            host, port, *_ = self._server.sockets[0].getsockname()
            where = (host, port)
        self._sweep = loop.call_later(self.settings.sweep_ms / 1000, self._look_at_all)
        self.broker.connections.add(self._connected)
        return where

    async def attach(self, read_fd: int, write_fd: int, name: str) -> None:
        """Serve whoever is at the other ends of two pipes, as `name` among the channels. Both file
        descriptors are the door's from here on, whatever happens. ValueError if they are none."""
        await Pipes(Connection(self, name)).connect(read_fd, write_fd)

    async def close(self) -> None:
        """Let nobody in, let everybody finish what is under way, say `terminate`, close."""
        self._closing = True
        self.broker.connections.discard(self._connected)
        if self._server is not None:
            self._server.close()
        if self._file is not None:
            self._file.remove()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.drain()
        await self._wait_for_connections()
        while self._work:
            await asyncio.wait(self._work)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

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

    @property
    def is_closing(self) -> bool:
        return self._closing

    # --- what connections call --------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        may_stay = len(self.connections) < limits.LINE_CONNECTIONS and not self._closing
        self.connections.add(connection)
        return may_stay

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()

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

    def _look_at_all(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop_clock().time()
        for connection in list(self.connections):
            connection.look(now)
        self._sweep = loop.call_later(self.settings.sweep_ms / 1000, self._look_at_all)

    async def _wait_for_connections(self) -> None:
        if not self.connections:
            return
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), limits.LINE_DRAIN_MS / 1000)
        except TimeoutError:
            log.warning("%d connections were not done in time", len(self.connections))
            for connection in list(self.connections):
                connection.end(End.CLOSED)
                connection.abort()
            await self._all_closed.wait()
