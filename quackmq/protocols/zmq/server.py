"""The ZeroMQ servers: what their connections share.

It is what ZeroMQ calls a ROUTER, made here of `quackmq.protocols.zmq.codec.zmtp` on the loop's own
sockets. With libzmq's, each request and each answer changes threads; measured as an echo, that took
three times the processor time (docs/zmq.md). For bounds over all peers (connections, memory for
what they send and what they do not take) we found no option of libzmq's; how it fares without was
not measured.

The proxy's three sockets are listeners too, with peers of their own.

Call it only from the loop that started it.
"""

from __future__ import annotations

import asyncio

from quackmq.broker import Broker
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.queue_handlers import begin
from quackmq.protocols.zmq.rep_connection import Begin, Connection
from quackmq.serving.server import Bounds, Server


class Listener(Server[Peer]):
    def __init__(self, broker: Broker, host: str, port: int) -> None:
        super().__init__(broker, (host, port))
        self.scratch = memoryview(bytearray(limits.ZMQ_SCRATCH_BYTES))
        self.sendable = asyncio.Event()
        self.sendable.set()
        self._requests = 0
        self._large_bytes = 0
        self._unsent_bytes = 0
        #: In the order of their asking.
        self._for_room: dict[Peer, None] = {}
        self._pump_is_due = False

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            connections=limits.ZMQ_CONNECTIONS,
            backlog=limits.ZMQ_BACKLOG,
            sweep_ms=limits.ZMQ_SWEEP_MS,
            drain_ms=limits.ZMQ_DRAIN_MS,
        )

    # --- what peers call --------------------------------------------------------------------

    def closed(self, peer: Peer) -> None:
        super().closed(peer)
        self._for_room.pop(peer, None)

    @property
    def memory_is_scarce(self) -> bool:
        return bool(self._for_room)

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


class ZmqServer(Listener):
    """For requests: in the language of `quackmq.protocols.zmq.codec.queue_language`, unless another
    is given."""

    name = "zmq"

    def __init__(self, broker: Broker, host: str, port: int, begin: Begin = begin) -> None:
        super().__init__(broker, host, port)
        self._begin = begin

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self, self._begin)
