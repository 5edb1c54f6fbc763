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

from quackmq.broker import Broker
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.queue_handlers import begin
from quackmq.protocols.zmq.rep_connection import Begin, Connection
from quackmq.serving.server import Bounds, Server


class Listener(Server[Peer]):
    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        """The sockets of one broker are given the same `budgets`."""
        super().__init__(broker, (host, port))
        self.scratch = memoryview(bytearray(limits.ZMQ_SCRATCH_BYTES))
        self.budgets = budgets or Budgets()
        self.budgets.waiting.watch(self.connections)
        self._receive = self.budgets.receive
        self._requests = 0

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
        self.budgets.waiting.discard(peer)

    def has_room(self) -> bool:
        return self._requests < limits.ZMQ_REQUESTS and self._receive.has_room

    def begun(self, large_bytes: int) -> None:
        self._requests += 1
        self._receive.used_bytes += large_bytes

    def done(self, large_bytes: int) -> None:
        self._requests -= 1
        self._receive.release(large_bytes)


class ZmqServer(Listener):
    """For requests: in the language of `quackmq.protocols.zmq.codec.queue_language`, unless another
    is given."""

    name = "zmq"

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        budgets: Budgets | None = None,
        begin: Begin = begin,
    ) -> None:
        super().__init__(broker, host, port, budgets)
        self._begin = begin

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self, self._begin)
