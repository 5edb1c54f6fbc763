"""Peers of the proxy's sockets in the simulated network, and the servers that they connect to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from quackmq.errors import BrokerClosing, ProtocolError, QuackError
from quackmq.model.subscription import RecordPosition
from quackmq.model.topic import PartitionKey
from quackmq.protocols.zmq.codec.proxy_language import Request, encode_request, read_reply
from quackmq.protocols.zmq.proxy.callback_connection import _Exchange
from quackmq.protocols.zmq.proxy.proxy_server import ProxyServer
from quackmq.protocols.zmq.proxy.xpub import XpubServer
from quackmq.protocols.zmq.proxy.xsub import XsubServer
from quackmq.serving.server import Server
from tests.kit.waiting import soon
from tests.protocols.codecs.zmtp_frames import (
    COMMAND,
    LONG,
    MORE,
    command,
    greeting,
    message,
    ready,
)
from tests.simulation.life import CALLER
from tests.simulation.listeners import HOST, Listeners
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import EXPLAINED, LOST

_GREETING_BYTES: Final = 64


@dataclass
class ProxyServers(Listeners):
    """The three sockets of the proxy, in one life of the broker."""

    xsub: XsubServer
    xpub: XpubServer
    proxy: ProxyServer

    @property
    def all(self) -> tuple[Server[Any], ...]:
        return (self.xsub, self.xpub, self.proxy)

    @property
    def counted_bytes(self) -> dict[str, int]:
        budgets = self.proxy.budgets
        return {"receives": budgets.receive.used_bytes, "sends": budgets.send.unsent_bytes}

    async def close(self) -> None:
        """Close all sockets. Raise Violation if a connection to a client is left."""
        await super().close()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, NetworkLoop)
        if loop.open_connections(_Exchange):
            raise Violation("a connection from the proxy to a client is left")

    def is_done(self, client: str, topic: str, position: RecordPosition) -> bool:
        """Return whether the broker will never lease this message to the client again."""
        retransmission = self.proxy.clients._find(client, topic)
        if retransmission is None or retransmission._channel is None:
            return False
        return retransmission._channel.is_done(*position)

    async def ends_of(self, topic: str) -> dict[int, int]:
        """Return the offset behind the last message of each partition. Raise ConnectionResetError
        if the broker closes."""
        found = self.broker.topic(topic)
        try:
            return {
                number: (await self.broker.offsets(CALLER, PartitionKey(found.id, number))).stable
                for number in range(found.partitions)
            }
        except BrokerClosing:
            raise ConnectionResetError from None


class Command(NamedTuple):
    name: bytes
    data: bytes


class ZmtpPeer:
    """A connection that speaks ZMTP, as any type of socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def introduce(self, socket_type: bytes) -> Self:
        self.writer.write(greeting() + ready(socket_type))
        await soon(self.reader.readexactly(_GREETING_BYTES))
        received = await self.receive()
        if not isinstance(received, Command) or received.name != b"READY":
            # A server that refuses the peer says ERROR.
            raise ConnectionResetError
        return self

    def send(self, *frames: bytes) -> None:
        self.writer.write(message(*frames))

    def send_command(self, name: bytes, data: bytes) -> None:
        self.writer.write(command(name, data))

    async def receive(self, wait_seconds: float | None = None) -> Command | list[bytes]:
        """Return the next command or message. Raise TimeoutError if none has begun in
        `wait_seconds`, by default a minute."""
        frames: list[bytes] = []
        first = self.reader.readexactly(1)
        flags = (await (soon(first) if wait_seconds is None else _within(first, wait_seconds)))[0]
        while True:
            size = await soon(self.reader.readexactly(8 if flags & LONG else 1))
            body = await soon(self.reader.readexactly(int.from_bytes(size, "big")))
            if flags & COMMAND:
                return Command(body[1 : 1 + body[0]], body[1 + body[0] :])
            frames.append(body)
            if not flags & MORE:
                return frames
            flags = (await soon(self.reader.readexactly(1)))[0]

    async def receive_message(self) -> list[bytes]:
        received = await self.receive()
        if isinstance(received, Command):
            raise Violation(f"a command came in the place of a message: {received}")
        return received

    async def ask(self, request: Request) -> Any:
        """Send a request of the proxy's language; return what its reply says. Raise the error that
        it reports, and Violation if the reply is to something else."""
        self.send(b"", encode_request(request))
        *_, reply = await self.receive_message()
        try:
            return read_reply(request, reply)
        except ProtocolError as error:
            if not reply.startswith(b"ERR "):
                raise Violation(f"{request} got {reply!r}") from error
            raise


async def _within(awaitable: Awaitable[bytes], seconds: float) -> bytes:
    async with asyncio.timeout(seconds):
        return await awaitable


def note_refusal(error: QuackError, loop: NetworkLoop) -> None:
    """Count a refused request. Raise Violation if nothing explains the refusal."""
    if error.code not in EXPLAINED | {"unreachable"}:
        raise Violation(f"the proxy answered {error.code}: {error}")
    loop.counts[f"proxy answers {error.code}"] += 1


class CallbackListener:
    """The REP socket of a client, to which the proxy connects."""

    def __init__(
        self, serve: Callable[[ZmtpPeer], Awaitable[None]], free_ports: Iterator[int]
    ) -> None:
        """`serve` answers the requests on one connection until it is lost."""
        self._serve = serve
        self._free_ports = free_ports
        self._listener: Any = None
        self._writers: list[asyncio.StreamWriter] = []
        self.port = next(free_ports)

    async def open(self, *, is_new_port: bool = False) -> None:
        """Listen at the port of the last time, or at a new one, which nobody has ever had."""
        self.close()
        if is_new_port:
            self.port = next(self._free_ports)
        self._listener = await asyncio.start_server(self._on_connection, HOST, self.port)

    def close(self) -> None:
        """Stop to listen, and disconnect."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def forget(self) -> None:
        """The loop is gone, and all connections with it."""
        self._listener = None
        self._writers.clear()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.append(writer)
        try:
            await self._serve(ZmtpPeer(reader, writer))
        except LOST:
            return
        finally:
            writer.close()
