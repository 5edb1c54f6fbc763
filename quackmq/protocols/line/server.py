"""The line server: the state that its connections share, and the list of connected peers.

`records` lists the connected peers, and `ended_connections` the last ones that have ended. Other
protocols show the connected peers, too: they are registered with `broker.connections`.

Call it only from the loop that started it.
"""

from __future__ import annotations

from collections import deque

from quackmq.broker import Broker, Connected
from quackmq.protocols.line import limits
from quackmq.protocols.line.connection import Connection
from quackmq.protocols.line.joint_writes import JointWrites
from quackmq.protocols.line.records import ConnectionRecord, End, EndedConnection
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import EncodedLines
from quackmq.serving.server import Address, Bounds, Server
from quackmq.tasks import TaskSet


class LineServer(Server[Connection]):
    """The server of the line protocol."""

    name = "line"

    def __init__(
        self,
        broker: Broker,
        address: Address,
        settings: LineSettings = LineSettings(),  # noqa: B008  (frozen)
    ) -> None:
        """`address` is a host and a port, the path of a Unix socket, or None for pipes only."""
        super().__init__(broker, address)
        self.settings = settings
        self.scratch = memoryview(bytearray(limits.LINE_SCRATCH_BYTES))
        self.encoded_lines = EncodedLines(settings.entry_bytes)
        self.joint_writes = JointWrites()
        self._subscriber_connections: dict[str, Connection] = {}
        self._ended: deque[EndedConnection] = deque(maxlen=limits.LINE_ENDED)
        #: The work of connections that `close` waits for.
        self.tasks = TaskSet()

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
        self.broker.connections.add(self._list_connected)
        return address

    async def close(self) -> None:
        """Let every peer finish its current message, send `terminate`, and close."""
        self.broker.connections.discard(self._list_connected)
        await super().close()
        await self.tasks.finish()

    def records(self) -> list[ConnectionRecord]:
        """Return a record of every connected peer that has given its id, sorted by role, id and
        channel.
        """
        records = [connection.record for connection in self.connections if not connection.is_over]
        return sorted(
            (record for record in records if record is not None),
            key=lambda record: (record.role, record.id, record.channel),
        )

    def ended_connections(self) -> list[EndedConnection]:
        """Return the last connections that have ended; the latest comes last."""
        return list(self._ended)

    # --- called by connections --------------------------------------------------------------

    def add_ended(self, record: ConnectionRecord, end: End) -> None:
        self._ended.append(EndedConnection(record, end))

    async def register_subscriber(self, name: str, connection: Connection) -> None:
        """Register a subscriber's connection. End the former one of the same name; return when it
        has released its channels.
        """
        former = self._subscriber_connections.get(name)
        self._subscriber_connections[name] = connection
        if former is not None and former is not connection:
            former.end(End.REPLACED)
            await former.close_handler()

    def unregister_subscriber(self, name: str, connection: Connection) -> None:
        if self._subscriber_connections.get(name) is connection:
            del self._subscriber_connections[name]

    # --- internal ---------------------------------------------------------------------------

    def _list_connected(self) -> list[Connected]:
        """List the connected peers without their counts, which take longer to compute."""
        return [
            Connected("line", *identity)
            for connection in self.connections
            if not connection.is_over and (identity := connection.identity) is not None
        ]
