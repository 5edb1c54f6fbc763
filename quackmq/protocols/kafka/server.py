"""The Kafka server: the state that its connections share.

It holds the bounds over all connections: the memory for received requests, and the unsent bytes of
slow readers. Call it only from the loop that started it.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker import Broker
from quackmq.errors import BrokerClosing
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import LastResponse, Node
from quackmq.protocols.kafka.codec.framing import ReceiveMemory
from quackmq.protocols.kafka.connection import Connection
from quackmq.protocols.kafka.handlers.encoded_topics import EncodedTopics
from quackmq.protocols.kafka.publish_turns import PublishTurns
from quackmq.serving.budgets import ReceiveBudget, SendBudget
from quackmq.serving.server import Bounds, Server
from quackmq.serving.waiting_line import WaitingLine

NODE_ID: Final = 1
#: A response may take this fraction (one fourth) of the remaining send budget.
_SHARE: Final = 4
#: Sweeps within the deadline of a request.
_SWEEPS: Final = 4


class KafkaServer(Server[Connection]):
    """The Kafka listener. `advertise` is the address that clients get for this broker; without it,
    they get the address that they connected to.
    """

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
        self.waiting_for_memory = WaitingLine(limits.KAFKA_PACE_MS)
        self.waiting_for_memory.watch(self.connections)
        receive_budget = ReceiveBudget(
            limits.KAFKA_RECEIVE_BYTES, self.waiting_for_memory.wake_soon
        )
        self.memory = ReceiveMemory(receive_budget)
        self.send_budget = SendBudget(limits.KAFKA_SEND_BYTES)
        self.last_response = LastResponse()
        self.publish_turns = PublishTurns()
        self.encoded_topics = EncodedTopics()
        self._advertised_address = advertise
        #: Connections that wait until the broker has room, in the order in which they asked.
        self._waiting_for_room: dict[Connection, None] = {}
        self._room_task: asyncio.Task[None] | None = None

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
        """Answer all accepted requests, waiting fetches with the available records, then close."""
        await super().close()
        if self._room_task is not None:
            self._room_task.cancel()

    # --- called by connections ---------------------------------------------------------------

    @property
    def response_bytes(self) -> int:
        budget = self.send_budget
        share_bytes = (budget.most_bytes - budget.unsent_bytes) // _SHARE
        return max(limits.KAFKA_SCARCE_FETCH_BYTES, min(limits.KAFKA_FETCH_BYTES, share_bytes))

    def closed(self, connection: Connection) -> None:
        """Forget a closed connection, which no longer waits for room or memory."""
        super().closed(connection)
        self._waiting_for_room.pop(connection, None)
        self.waiting_for_memory.discard(connection)

    def node_for(self, host: str, port: int) -> Node:
        return Node(NODE_ID, *(self._advertised_address or (host, port)))

    def wait_for_room(self, connection: Connection) -> None:
        """Call the connection's `pump` when the broker has room. One task serves all waiting
        connections."""
        self._waiting_for_room[connection] = None
        if self._room_task is None:
            self._room_task = asyncio.get_running_loop().create_task(self._pump_with_room())

    # --- internal ----------------------------------------------------------------------------

    async def _pump_with_room(self) -> None:
        """Let waiting connections start requests when the broker has room."""
        try:
            while self._waiting_for_room:
                try:
                    await self.broker.room()
                except BrokerClosing:
                    pass  # the broker refuses these requests, and the clients get its answer
                waiting, self._waiting_for_room = self._waiting_for_room, {}
                for connection in waiting:
                    connection.pump(has_room=True)
                # `room` ends at once each time when the store has failed or the broker closes: let
                # other tasks run.
                await asyncio.sleep(0)
        finally:
            self._room_task = None
