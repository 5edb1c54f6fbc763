"""The door: it listens, lets connections in, and holds what they share.

It stands on httptools, the parser in C below uvicorn, and on nothing above it. Measured: one small
POST that is answered with JSON takes 26 to 44 µs of processor time here, 60 with uvicorn and a raw
ASGI application, 55 to 138 with granian, whose threads hand each request over to our loop, 95 with
Starlette, 200 with h11, 350 with hypercorn (`benchmarks/http_stacks.py`, in one run). And every
bound has to hold: on connections, on the bytes of heads, bodies and unsent answers, on the time
that a request takes to come, an answer to be taken, a connection to be idle. Read, not measured:
among the settings of uvicorn 0.54 there is none for heads that are slow, none for large ones over
httptools, and none for peers that take nothing. How it fares under such peers was not tried.

All bounds over connections are kept here. Who may call: the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from quackmq.broker import Broker
from quackmq.loop_clock import loop_clock
from quackmq.protocols.http import limits, v1
from quackmq.protocols.http import queue_api as queue
from quackmq.protocols.http.browser_guards import OwnNames, machine_names
from quackmq.protocols.http.connection import Connection
from quackmq.protocols.http.head_cache import RequestHeadCache
from quackmq.protocols.http.response_writer import Date
from quackmq.protocols.http.router import Route, Router
from quackmq.serving.first_bytes import MistakenPeers

log = logging.getLogger(__name__)


class HttpServer:
    """`names` are further names by which browsers and programs may call this door (see `guards`),
    and `advertised_host` is the one that Kafka clients are told. `routes` are in the place of all
    those that there are."""

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        *,
        names: Iterable[str] = (),
        advertised_host: str = "",
        routes: Iterable[Route] | None = None,
    ) -> None:
        self.broker = broker
        known = (host, advertised_host, *machine_names(socket.gethostname()))
        self.names = OwnNames(names, known)
        self._host = host
        self.router = Router((*queue.routes(), *v1.ROUTES) if routes is None else routes)
        self.known_heads = RequestHeadCache()
        self.date = Date()
        self.mistaken = MistakenPeers("http", broker.doors)
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        #: Of large bodies, and of those that were sent ahead.
        self.received_bytes = 0
        #: What peers have not taken of their answers.
        self.unsent_bytes = 0
        self._streams = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._all_closed = asyncio.Event()

    async def start(self) -> tuple[str, int]:
        """Listen; where, is answered. OSError where that cannot be."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self._host, self._port, backlog=limits.HTTP_BACKLOG
        )
        self._sweep_later()
        host, port, *_ = self._server.sockets[0].getsockname()
        return host, port

    async def close(self) -> None:
        """Let nobody in, answer what was asked (what waits for something to come, that the broker
        closes), close."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()
        if not await self._connections_end():
            log.warning("%d requests were not answered in time", len(self._connections))
            for connection in list(self._connections):
                connection.cancel()
            await self._connections_end()
        for connection in list(self._connections):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._connections:
            await self._all_closed.wait()
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None

    # --- what handlers may know -------------------------------------------------------------

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def stream_count(self) -> int:
        return self._streams

    # --- what connections call --------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        may_stay = len(self._connections) < limits.HTTP_CONNECTIONS and not self._closing
        self._connections.add(connection)
        return may_stay

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()

    def reserve(self, body_bytes: int) -> bool:
        if body_bytes > 0 and self.received_bytes + body_bytes > limits.HTTP_RECEIVE_BYTES:
            return False
        self.received_bytes += body_bytes
        return True

    def streaming(self, change: int) -> None:
        self._streams += change

    def unsent(self, change_bytes: int) -> None:
        self.unsent_bytes += change_bytes

    @property
    def may_answer(self) -> bool:
        return self.unsent_bytes <= limits.HTTP_SEND_BYTES

    # --- inside -----------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        """Connections are looked at four times in the shortest of the times that they have."""
        shortest_ms = min(
            limits.HTTP_REQUEST_WAIT_MS, limits.HTTP_IDLE_MS, limits.HTTP_SEND_WAIT_MS
        )
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(shortest_ms / 4_000, self._sweep_all)

    def _sweep_all(self) -> None:
        now = loop_clock().time()
        for connection in list(self._connections):
            connection.sweep(now)
        self._sweep_later()

    async def _connections_end(self) -> bool:
        """Whether all connections have ended within half of the time for draining."""
        if not self._connections:
            return True
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), limits.HTTP_DRAIN_MS / 2_000)
        except TimeoutError:
            return False
        return True
