"""The door: it listens, lets connections in, and holds what they share.

All bounds over connections are kept here: how many there are, the memory they receive into, what
slow readers have not taken. Who may call: the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from quackmq.broker import Broker
from quackmq.loop_clock import loop_clock
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import LastAnswer, Node
from quackmq.protocols.kafka.codec.framing import ReceiveMemory
from quackmq.protocols.kafka.connection import Connection
from quackmq.protocols.kafka.handlers.encoded_topics import DescribedTopics
from quackmq.serving.first_bytes import MistakenPeers

log = logging.getLogger(__name__)

NODE_ID: Final = 1
#: How much of the memory that is left for answers one of them may take.
_SHARE: Final = 4
#: How often slow requests are looked for.
_SWEEP_SECONDS: Final = limits.KAFKA_REQUEST_WAIT_MS / 4_000


class KafkaServer:
    """`advertise` is where clients are told to find this broker; without it, at the address at
    which they came."""

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        *,
        advertise: tuple[str, int] | None = None,
    ) -> None:
        self.broker = broker
        self.memory = ReceiveMemory(self._memory_released)
        self.last_answer = LastAnswer()
        self.mistaken = MistakenPeers("kafka", broker.doors)
        self.described = DescribedTopics()
        self._host = host
        self._port = port
        self._advertise = advertise
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._unsent_bytes = 0
        # Both in the order of their asking.
        self._for_room: dict[Connection, None] = {}
        self._for_memory: dict[Connection, None] = {}
        self._room: asyncio.Task[None] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._pace: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_closed = asyncio.Event()

    async def start(self) -> tuple[str, int]:
        """Listen; where, is answered. OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self._host, self._port, backlog=limits.KAFKA_BACKLOG
        )
        self._sweep = loop.call_later(_SWEEP_SECONDS, self._sweep_slow_requests)
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        """Let nobody in, answer what was asked (a fetch that waits, with what there is), close."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for timer in (self._sweep, self._pace):
            if timer is not None:
                timer.cancel()
        for connection in list(self._connections):
            connection.drain()
        await self._wait_for_connections()
        if self._room is not None:
            self._room.cancel()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    # --- what connections call --------------------------------------------------------------

    @property
    def answer_bytes(self) -> int:
        share_bytes = (limits.KAFKA_SEND_BYTES - self._unsent_bytes) // _SHARE
        return max(limits.KAFKA_SCARCE_FETCH_BYTES, min(limits.KAFKA_FETCH_BYTES, share_bytes))

    def opened(self, connection: Connection) -> bool:
        may_stay = len(self._connections) < limits.KAFKA_CONNECTIONS and not self._closing
        self._connections.add(connection)
        return may_stay

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._for_room.pop(connection, None)
        self._for_memory.pop(connection, None)
        if not self._connections:
            self._all_closed.set()

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
        if self._pace is None and self._for_memory and not self._closing:
            loop = asyncio.get_running_loop()
            self._pace = loop.call_later(limits.KAFKA_PACE_MS / 1000, self._keep_pace)

    def _keep_pace(self) -> None:
        """Disconnect those whose large requests come too slowly while others wait for memory."""
        self._pace = None
        now = loop_clock().time()
        for connection in list(self._connections) if self._for_memory else ():
            if connection.is_behind(now):
                connection.disconnect("a large request comes too slowly, others wait for memory")
        self._watch_pace()

    def _sweep_slow_requests(self) -> None:
        """Disconnect those whose request began to come long ago and is still not whole."""
        loop = asyncio.get_running_loop()
        latest = loop_clock().time() - limits.KAFKA_REQUEST_WAIT_MS / 1000
        for connection in list(self._connections):
            if connection.begun_at is not None and connection.begun_at < latest:
                connection.disconnect(
                    f"a request was not whole after {limits.KAFKA_REQUEST_WAIT_MS} ms"
                )
        self._sweep = loop.call_later(_SWEEP_SECONDS, self._sweep_slow_requests)

    async def _wait_for_connections(self) -> None:
        if not self._connections:
            return
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), limits.KAFKA_DRAIN_MS / 1000)
        except TimeoutError:
            log.warning("%d connections did not take their answers in time", len(self._connections))
            for connection in list(self._connections):
                connection.abort()
            await self._all_closed.wait()
