"""The HTTP server: what its connections share.

It stands on httptools, the parser in C below uvicorn, and on nothing above it. Measured: one small
POST that is answered with JSON takes 26 to 44 µs of processor time here, 60 with uvicorn and a raw
ASGI application, 55 to 138 with granian, whose threads hand each request over to our loop, 95 with
Starlette, 200 with h11, 350 with hypercorn (`benchmarks/http_stacks.py`, in one run). And every
bound has to hold: on connections, on the bytes of heads, bodies and unsent answers, on the time
that a request takes to come, an answer to be taken, a connection to be idle. Read, not measured:
among the settings of uvicorn 0.54 there is none for heads that are slow, none for large ones over
httptools, and none for peers that take nothing. How it fares under such peers was not tried.

It keeps the bounds over all connections. Call it only from the loop that started it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from quackmq.broker import Broker
from quackmq.protocols.http import limits, v1
from quackmq.protocols.http import queue_api as queue
from quackmq.protocols.http.browser_guards import OwnNames, machine_names
from quackmq.protocols.http.connection import Connection
from quackmq.protocols.http.head_cache import RequestHeadCache
from quackmq.protocols.http.response_writer import Date
from quackmq.protocols.http.router import Route, Router
from quackmq.serving.budgets import ReceiveBudget, SendBudget
from quackmq.serving.server import Bounds, Server


class HttpServer(Server[Connection]):
    """`names` are further names by which browsers and programs may call this door (see `guards`),
    and `advertised_host` is the one that Kafka clients are told. `routes` are in the place of all
    those that there are."""

    name = "http"

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
        super().__init__(broker, (host, port))
        known = (host, advertised_host, *machine_names(socket.gethostname()))
        self.names = OwnNames(names, known)
        self.router = Router((*queue.routes(), *v1.ROUTES) if routes is None else routes)
        self.known_heads = RequestHeadCache()
        self.date = Date()
        #: For large bodies, and for those that were sent ahead.
        self.receive_budget = ReceiveBudget(limits.HTTP_RECEIVE_BYTES)
        self.send_budget = SendBudget(limits.HTTP_SEND_BYTES)
        self._streams = 0

    @property
    def bounds(self) -> Bounds:
        """Connections are looked at four times in the shortest of the times that they have. Half
        of the time for draining is for what was asked to be answered, and the rest for what was
        cancelled then to be answered that the broker closes."""
        shortest_ms = min(
            limits.HTTP_REQUEST_WAIT_MS, limits.HTTP_IDLE_MS, limits.HTTP_SEND_WAIT_MS
        )
        return Bounds(
            connections=limits.HTTP_CONNECTIONS,
            backlog=limits.HTTP_BACKLOG,
            sweep_ms=shortest_ms / 4,
            drain_ms=limits.HTTP_DRAIN_MS / 2,
            cancel_ms=limits.HTTP_DRAIN_MS / 2,
        )

    def make_connection(self, channel: str = "") -> Connection:
        return Connection(self)

    # --- what handlers may know -------------------------------------------------------------

    @property
    def connection_count(self) -> int:
        return len(self.connections)

    @property
    def stream_count(self) -> int:
        return self._streams

    # --- what connections call --------------------------------------------------------------

    def streaming(self, change: int) -> None:
        self._streams += change
