"""The HTTP server: the state that its connections share, and the bounds over all of them.

It uses httptools, the C parser below uvicorn, and no server framework. One small POST that is
answered with JSON takes 26 to 44 µs of processor time here. It takes 60 µs with uvicorn and a raw
ASGI application, 55 to 138 with granian (whose threads pass each request to our loop), 95 with
Starlette, 200 with h11, and 350 with hypercorn (`benchmarks/http_stacks.py`, in one run).

Every bound must hold: on connections; on the bytes of heads, bodies and unsent responses; on the
time for a request to arrive, for a response to be read, and for an idle connection. According to
its documentation, which we read but did not test, uvicorn 0.54 has no setting for slow heads, none
for large heads over httptools, and none for peers that read nothing.

Call it only from the loop that started it.
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
    """The HTTP listener. `names` are additional Host names that requests may use (see
    `browser_guards`). `advertised_host` is the host that Kafka clients get. `routes` replaces all
    standard routes.
    """

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
        machine = (host, advertised_host, *machine_names(socket.gethostname()))
        self.names = OwnNames(names, machine)
        self.router = Router((*queue.routes(), *v1.ROUTES) if routes is None else routes)
        self.head_cache = RequestHeadCache()
        self.date = Date()
        #: For large bodies, and for pipelined requests.
        self.receive_budget = ReceiveBudget(limits.HTTP_RECEIVE_BYTES)
        self.send_budget = SendBudget(limits.HTTP_SEND_BYTES)
        self._stream_count = 0

    @property
    def bounds(self) -> Bounds:
        """Return the bounds. Connections are swept four times within their shortest deadline. Half
        of the drain time is for running requests to finish. The other half is for cancelled
        requests to be answered with an error.
        """
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

    # --- used by handlers --------------------------------------------------------------------

    @property
    def connection_count(self) -> int:
        return len(self.connections)

    @property
    def stream_count(self) -> int:
        return self._stream_count

    # --- called by connections ---------------------------------------------------------------

    def count_stream(self, change: int) -> None:
        self._stream_count += change
