"""Listen, admit connections, sweep them regularly, and close them in order.

A protocol's server is a subclass. It makes the connections, sets the bounds, and holds the state
that its connections share. Peers connect over TCP or a Unix socket, or are passed in as a pair of
file descriptors (`attach`).

Closing takes five steps: stop accepting, ask every connection to finish (`drain`), wait until the
deadline, cancel operations that are still running, and abort the remaining connections. The sweeps
continue until then, so the deadlines of slow peers hold while the server closes.

Call it only from the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar, cast

from quackmq.broker import Broker
from quackmq.loop_clock import loop_clock
from quackmq.serving.connection import ServedConnection
from quackmq.serving.first_bytes import MistakenPeers
from quackmq.serving.pipes import Pipes
from quackmq.serving.unix_socket import SocketFile

#: A host and a port; the path of a Unix socket; or None for a server with only `attach`.
Address = tuple[str, int] | str | None


class Bounds(NamedTuple):
    """The bounds of one server. The limits are read again on every use."""

    connections: int
    backlog: int
    sweep_ms: float
    #: How long a closing server waits for its connections to finish.
    drain_ms: float
    #: How long cancelled operations then have to answer their peers.
    cancel_ms: float = 0


ConnectionT = TypeVar("ConnectionT", bound=ServedConnection)


class Server(ABC, Generic[ConnectionT]):
    #: The name of the setting that enables this server.
    name: str

    def __init__(self, broker: Broker, address: Address) -> None:
        self.broker = broker
        self.mistaken_peers = MistakenPeers(self.name, broker.listener_addresses)
        #: The open connections, in the order in which they were opened.
        self.connections: dict[ConnectionT, None] = {}
        self._log = logging.getLogger(type(self).__module__)
        self._address = address
        self._listener: asyncio.Server | None = None
        self._socket_file: SocketFile | None = None
        #: Peers of a Unix socket have no address, so they are numbered.
        self._numbers = count(1)
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._all_closed = asyncio.Event()

    # --- implemented by a protocol ------------------------------------------------------------

    @property
    @abstractmethod
    def bounds(self) -> Bounds: ...

    @abstractmethod
    def make_connection(self, channel: str = "") -> Any:
        """Make the asyncio protocol for a new peer; `channel` names a peer without an address."""

    # --- called by the owner ------------------------------------------------------------------

    async def start(self) -> Address:
        """Start listening; return the address. A requested port 0 is replaced by the real port.
        Raise OSError if the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        address = self._address
        backlog = self.bounds.backlog
        if isinstance(address, str):
            self._socket_file = SocketFile(address)
            self._listener = await loop.create_unix_server(
                lambda: self.make_connection(f"unix:{address}#{next(self._numbers)}"),
                sock=self._socket_file.socket,
                backlog=backlog,
            )
        elif address is not None:
            self._listener = await loop.create_server(
                self.make_connection, *address, backlog=backlog
            )
            host, port, *_ = self._listener.sockets[0].getsockname()
            address = (host, port)
        self._schedule_sweep()
        return address

    async def attach(self, read_fd: int, write_fd: int, channel: str) -> ConnectionT:
        """Serve the peer at the other ends of two pipes; `channel` is its name. Return its
        connection. The server owns both file descriptors from now on, even if this fails. Raise
        ValueError if they are not pipes.
        """
        pipes = Pipes(self.make_connection(channel))
        await pipes.connect(read_fd, write_fd)
        return cast(ConnectionT, pipes.receiver)

    async def close(self) -> None:
        """Stop accepting, let connections finish until the deadline, then close all of them."""
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
        if self._socket_file is not None:
            self._socket_file.remove()
        for connection in list(self.connections):
            connection.drain()
        await self._end_connections()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None

    def sweep(self) -> None:
        """End operations that have exceeded their deadline, on every connection. A timer calls
        this.
        """
        now = loop_clock().time()
        for connection in list(self.connections):
            connection.sweep(now)

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    # --- called by connections ----------------------------------------------------------------

    def opened(self, connection: ConnectionT) -> bool:
        """Register a connection; return whether it is admitted. A refused one closes itself."""
        is_admitted = len(self.connections) < self.bounds.connections and not self._is_closing
        self.connections[connection] = None
        return is_admitted

    def closed(self, connection: ConnectionT) -> None:
        self.connections.pop(connection, None)
        if not self.connections:
            self._all_closed.set()

    # --- internal -----------------------------------------------------------------------------

    def _schedule_sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(self.bounds.sweep_ms / 1000, self._on_sweep_timer)

    def _on_sweep_timer(self) -> None:
        self.sweep()
        self._schedule_sweep()

    async def _end_connections(self) -> None:
        """Wait until the connections have finished; cancel, then abort those that have not."""
        bounds = self.bounds
        if await self._all_close_within(bounds.drain_ms):
            return
        self._log.warning("%d connections did not finish in time", len(self.connections))
        for connection in list(self.connections):
            connection.cancel()
        if bounds.cancel_ms and await self._all_close_within(bounds.cancel_ms):
            return
        for connection in list(self.connections):
            connection.abort()
        if self.connections:
            # An aborted connection is closed in the next turn of the loop.
            self._all_closed.clear()
            await self._all_closed.wait()

    async def _all_close_within(self, wait_ms: float) -> bool:
        """Wait for all connections to close; return whether they did so in time."""
        if not self.connections:
            return True
        self._all_closed.clear()
        try:
            await asyncio.wait_for(self._all_closed.wait(), wait_ms / 1000)
        except TimeoutError:
            return False
        return True
