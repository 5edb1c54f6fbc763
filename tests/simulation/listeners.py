"""The servers of one life of the broker, and what must be left of them after they have closed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

from quackmq.broker import Broker
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.serving.server import Server
from tests.simulation.model import Violation

HOST: Final = "127.0.0.1"
#: Virtual seconds within which all listeners have closed: the longest drain, and the time in which
#: connections that are cut off end.
_CLOSE_SECONDS: Final = (
    1.0
    + 2
    * max(
        kafka_limits.KAFKA_DRAIN_MS,
        http_limits.HTTP_DRAIN_MS,
        zmq_limits.ZMQ_DRAIN_MS,
        line_limits.LINE_DRAIN_MS,
    )
    / 1_000
)


@dataclass
class Listeners(ABC):
    broker: Broker
    #: By the name of the server: the port, or the path of a Unix socket.
    ports: dict[str, int] = field(default_factory=dict, init=False)
    paths: dict[str, str] = field(default_factory=dict, init=False)
    #: The loop's time at which the servers began to close.
    closing_at: float | None = field(default=None, init=False)

    @property
    @abstractmethod
    def all(self) -> tuple[Server[Any], ...]: ...

    @property
    @abstractmethod
    def counted_bytes(self) -> dict[str, int]:
        """The bytes that the servers count for their peers, by a name for a message."""

    async def start(self) -> None:
        for server in self.all:
            address = await server.start()
            if isinstance(address, str):
                self.paths[server.name] = address
                continue
            assert address is not None
            self.ports[server.name] = address[1]
            self.broker.listener_addresses[server.name] = (HOST, address[1])

    def is_closing(self) -> bool:
        return self.closing_at is not None

    async def connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a server. Raise ConnectionRefusedError if it does not listen any more."""
        if name in self.paths:
            return await asyncio.open_unix_connection(self.paths[name])
        return await asyncio.open_connection(HOST, self.ports[name])

    async def close(self) -> None:
        """Close as the program does: all listeners at once. Raise Violation if something is
        left."""
        loop = asyncio.get_running_loop()
        began = self.closing_at = loop.time()
        await asyncio.gather(*(server.close() for server in self.all))
        if loop.time() - began > _CLOSE_SECONDS:
            raise Violation(f"the listeners took {loop.time() - began:.1f} s to close")
        for server in self.all:
            if server.connections:
                raise Violation(f"connections of {server.name} are left: {server.connections}")
        if any(self.counted_bytes.values()):
            raise Violation(
                f"memory is still counted after all peers are gone: {self.counted_bytes}"
            )
