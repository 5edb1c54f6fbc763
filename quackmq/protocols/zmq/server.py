"""The door: it listens, lets peers in, and holds what they share.

It is what ZeroMQ calls a ROUTER, made here of `quackmq.protocols.zmq.codec.zmtp` on the loop's own
sockets. With libzmq's, each request and each answer changes threads; measured as an echo, that took
three times the processor time (docs/zmq.md). For bounds over all peers (connections, memory for
what they send and what they do not take) we found no option of libzmq's; how it fares without was
not measured.

The proxy's three sockets are listeners too, with peers of their own.

Who may call: the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from quackmq.broker import Broker
from quackmq.loop_clock import loop_clock
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.queue_handlers import begin
from quackmq.protocols.zmq.rep_connection import Begin, Connection
from quackmq.serving.first_bytes import MistakenPeers

log = logging.getLogger(__name__)


class Listener(ABC):
    #: The setting that opens it.
    name: str

    def __init__(self, broker: Broker, host: str, port: int) -> None:
        self.broker = broker
        self.scratch = memoryview(bytearray(limits.ZMQ_SCRATCH_BYTES))
        self.sendable = asyncio.Event()
        self.sendable.set()
        self.mistaken = MistakenPeers(self.name, broker.doors)
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self.connections: set[Peer] = set()
        self._requests = 0
        self._large_bytes = 0
        self._unsent_bytes = 0
        #: In the order of their asking.
        self._for_room: dict[Peer, None] = {}
        self._pump_is_due = False
        self._sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_closed = asyncio.Event()

    @abstractmethod
    def make_peer(self) -> Peer:
        """What is to talk with whoever has connected."""

    async def start(self) -> tuple[str, int]:
        """Listen; where, is answered. OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self.make_peer, self._host, self._port, backlog=limits.ZMQ_BACKLOG
        )
        self._sweep = loop.call_later(limits.ZMQ_SWEEP_MS / 1000, self._look_at_all)
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        """Let nobody in, answer what was asked (a GET that waits, with an error), close."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            connection.drain()
        await self._wait_for_connections()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    # --- what peers call --------------------------------------------------------------------

    def opened(self, peer: Peer) -> bool:
        may_stay = len(self.connections) < limits.ZMQ_CONNECTIONS and not self._closing
        self.connections.add(peer)
        return may_stay

    def closed(self, peer: Peer) -> None:
        self.connections.discard(peer)
        self._for_room.pop(peer, None)
        if not self.connections:
            self._all_closed.set()

    def has_room(self) -> bool:
        return self._requests < limits.ZMQ_REQUESTS and self._large_bytes < limits.ZMQ_RECEIVE_BYTES

    def begun(self, large_bytes: int) -> None:
        self._requests += 1
        self._large_bytes += large_bytes

    def done(self, large_bytes: int) -> None:
        self._requests -= 1
        self.release(large_bytes)

    def reserve(self, large_bytes: int) -> bool:
        if self._large_bytes + large_bytes > limits.ZMQ_RECEIVE_BYTES:
            return False
        self._large_bytes += large_bytes
        return True

    def release(self, large_bytes: int) -> None:
        self._large_bytes -= large_bytes
        if self._for_room and not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump_those_held_up)

    def wants_room(self, peer: Peer) -> None:
        self._for_room[peer] = None

    def unsent(self, change_bytes: int) -> None:
        self._unsent_bytes += change_bytes
        if self._unsent_bytes < limits.ZMQ_SEND_BYTES:
            self.sendable.set()
        else:
            self.sendable.clear()

    # --- inside -----------------------------------------------------------------------------

    def _pump_those_held_up(self) -> None:
        self._pump_is_due = False
        waiting, self._for_room = self._for_room, {}
        for peer in waiting:
            peer.pump()

    def _look_at_all(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop_clock().time()
        memory_is_scarce = bool(self._for_room)
        for peer in list(self.connections):
            peer.look(now, memory_is_scarce)
        self._sweep = loop.call_later(limits.ZMQ_SWEEP_MS / 1000, self._look_at_all)

    async def _wait_for_connections(self) -> None:
        if not self.connections:
            return
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), limits.ZMQ_DRAIN_MS / 1000)
        except TimeoutError:
            log.warning("%d connections did not take their answers in time", len(self.connections))
            for peer in list(self.connections):
                peer.abort()
            await self._all_closed.wait()


class ZmqServer(Listener):
    """For requests: in the language of `quackmq.protocols.zmq.codec.queue_language`, unless another
    is given."""

    name = "zmq"

    def __init__(self, broker: Broker, host: str, port: int, begin: Begin = begin) -> None:
        super().__init__(broker, host, port)
        self._begin = begin

    def make_peer(self) -> Connection:
        return Connection(self, self._begin)
