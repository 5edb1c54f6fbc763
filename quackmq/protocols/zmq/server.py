"""The ZeroMQ servers, and the state that their connections share.

A server here plays the role of a ZeroMQ ROUTER socket. It uses `codec.zmtp` on the event loop's own
sockets instead of libzmq. With libzmq every request and every reply changes threads: an echo took
three times the processor time (docs/zmq.md). We also found no option of libzmq that bounds
connections and memory over all peers. How libzmq behaves without these bounds was not measured.

The proxy's three sockets are subclasses of `ZmtpServer` too.

Call it only from the loop that started it.
"""

from __future__ import annotations

from functools import partial

from quackmq.broker import Broker
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.connection import Peer
from quackmq.protocols.zmq.queue_handlers import begin_request
from quackmq.protocols.zmq.rep_connection import Connection, RequestHandler
from quackmq.serving.server import Bounds, Server


class ZmtpServer(Server[Peer]):
    """A server of any ZeroMQ socket type. It counts the unfinished requests of all its peers."""

    def __init__(
        self, broker: Broker, host: str, port: int, budgets: Budgets | None = None
    ) -> None:
        """All ZeroMQ servers of one broker should get the same `budgets`."""
        super().__init__(broker, (host, port))
        self.scratch = memoryview(bytearray(limits.ZMQ_SCRATCH_BYTES))
        self.budgets = budgets or Budgets()
        self.budgets.waiting.watch(self.connections)
        self._receive_budget = self.budgets.receive
        self._requests = 0

    @property
    def bounds(self) -> Bounds:
        return Bounds(
            connections=limits.ZMQ_CONNECTIONS,
            backlog=limits.ZMQ_BACKLOG,
            sweep_ms=limits.ZMQ_SWEEP_MS,
            drain_ms=limits.ZMQ_DRAIN_MS,
        )

    # --- called by peers --------------------------------------------------------------------

    def closed(self, peer: Peer) -> None:
        super().closed(peer)
        self.budgets.waiting.discard(peer)

    def has_room(self) -> bool:
        return self._requests < limits.ZMQ_REQUESTS and self._receive_budget.has_room

    def begin_request(self, large_bytes: int) -> None:
        self._requests += 1
        self._receive_budget.used_bytes += large_bytes

    def end_request(self, large_bytes: int) -> None:
        self._requests -= 1
        self._receive_budget.release(large_bytes)


class ZmqServer(ZmtpServer):
    """A REP socket. By default it handles the requests of `codec.queue_language`."""

    name = "zmq"

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        budgets: Budgets | None = None,
        handle_request: RequestHandler | None = None,
    ) -> None:
        super().__init__(broker, host, port, budgets)
        self._handle_request = handle_request or partial(begin_request, broker)

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self, self._handle_request)
