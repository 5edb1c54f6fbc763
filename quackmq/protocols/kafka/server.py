"""The Kafka server: what its connections share.

It keeps the bounds over all connections: the memory they receive into, and what slow readers have
not taken. Call it only from the loop that started it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker import Broker
from quackmq.loop_clock import loop_clock
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import LastAnswer, Node
from quackmq.protocols.kafka.codec.framing import ReceiveMemory
from quackmq.protocols.kafka.connection import Connection
from quackmq.protocols.kafka.handlers.encoded_topics import DescribedTopics
from quackmq.serving.server import Bounds, Server

NODE_ID: Final = 1
#: How much of the memory that is left for answers one of them may take.
_SHARE: Final = 4
#: How often slow requests are looked for, within the time that they have.
_SWEEPS: Final = 4


class KafkaServer(Server[Connection]):
    """`advertise` is where clients are told to find this broker; without it, at the address at
    which they came."""

    name = "kafka"

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        *,
        advertise: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(broker, (host, port))
        self.memory = ReceiveMemory(self._memory_released)
        self.last_answer = LastAnswer()
        self.described = DescribedTopics()
        self._advertise = advertise
        self._unsent_bytes = 0
        # Both in the order of their asking.
        self._for_room: dict[Connection, None] = {}
        self._for_memory: dict[Connection, None] = {}
        self._room: asyncio.Task[None] | None = None
        self._pace: asyncio.TimerHandle | None = None

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            connections=limits.KAFKA_CONNECTIONS,
            backlog=limits.KAFKA_BACKLOG,
            sweep_ms=limits.KAFKA_REQUEST_WAIT_MS / _SWEEPS,
            drain_ms=limits.KAFKA_DRAIN_MS,
        )

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self)

    async def close(self) -> None:
        """Answer what was asked (a fetch that waits, with what there is), then close."""
        await super().close()
        if self._pace is not None:
            self._pace.cancel()
        if self._room is not None:
            self._room.cancel()

    # --- what connections call --------------------------------------------------------------

    @property
    def answer_bytes(self) -> int:
        share_bytes = (limits.KAFKA_SEND_BYTES - self._unsent_bytes) // _SHARE
        return max(limits.KAFKA_SCARCE_FETCH_BYTES, min(limits.KAFKA_FETCH_BYTES, share_bytes))

    def closed(self, connection: Connection) -> None:
        super().closed(connection)
        self._for_room.pop(connection, None)
        self._for_memory.pop(connection, None)

    def node_for(self, host: str, port: int) -> Node:
        return Node(NODE_ID, *(self._advertise or (host, port)))

    def unsent(self, change_bytes: int) -> None:
        self._unsent_bytes += change_bytes

    def wants_room(self, connection: Connection) -> None:
        self._for_room[connection] = None
        if self._room is None:
            self._room = asyncio.get_running_loop().create_task(self._pump_with_room())

    def wants_memory(self, connection: Connection) -> None:
        self._for_memory[connection] = None
        self._watch_pace()

    # --- inside -----------------------------------------------------------------------------

    async def _pump_with_room(self) -> None:
        try:
            while self._for_room:
                await self.broker.room()
                waiting, self._for_room = self._for_room, {}
                for connection in waiting:
                    connection.pump(has_room=True)
                # A store that has failed has room at once, each time: let the others run too.
                await asyncio.sleep(0)
        finally:
            self._room = None

    def _memory_released(self) -> None:
        if self._for_memory:
            asyncio.get_running_loop().call_soon(self._pump_with_memory)

    def _pump_with_memory(self) -> None:
        waiting, self._for_memory = self._for_memory, {}
        for connection in waiting:
            connection.pump()

    def _watch_pace(self) -> None:
        """As long as somebody waits for memory."""
        if self._pace is None and self._for_memory and not self._is_closing:
            loop = asyncio.get_running_loop()
            self._pace = loop.call_later(limits.KAFKA_PACE_MS / 1000, self._keep_pace)

    def _keep_pace(self) -> None:
        """Disconnect those whose large requests come too slowly while others wait for memory."""
        self._pace = None
        now = loop_clock().time()
        for connection in list(self.connections) if self._for_memory else ():
            if connection.is_behind(now):
                connection.disconnect("a large request comes too slowly, others wait for memory")
        self._watch_pace()
