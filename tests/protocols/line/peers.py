"""Peers of the line listener, made of plain streams, and a broker with a listener to go with
them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from quackmq.broker import Broker, BrokerSettings, Caller
from quackmq.clock import wall_clock_ms
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, AppendResult, Cursor, StatePut
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.waiting import soon

T = TypeVar("T")

#: For what takes milliseconds when all is well. Long, since machines can be busy.
DEADLINE_S = 60
TESTER = Caller("tester")


class SlowStore(MemoryStore):
    """Appends of entries are answered when the test says so, as by a slow disk."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.appends = 0

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        appended = super().append(appends, cursors, states)
        if not appends:
            return appended
        self.appends += 1
        return self._later(appended)

    async def _later(self, appended: Awaitable[list[AppendResult]]) -> list[AppendResult]:
        await self.released.wait()
        return await appended


class Peer:
    """One end of a conversation: lines are said and heard, without their ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        #: The reason of the last `reject`.
        self.reason = ""

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.writer.write(line.encode() + b"\n")

    async def hears(self) -> str:
        """The next line; "" when the broker has hung up. `reject` is returned without its reason,
        which is in `reason` then."""
        line = await soon(self.reader.readline())
        assert not line or line.endswith(b"\n"), line
        text = line.decode().removesuffix("\n")
        if text.startswith("reject "):
            text, _, self.reason = text.partition(" ")
        return text

    async def ask(self, line: str) -> str:
        self.say(line)
        return await self.hears()

    async def publishes(self, name: str, *topics: str) -> Peer:
        return await self._introduce("pub", name, topics)

    async def subscribes(self, name: str, *topics: str) -> Peer:
        return await self._introduce("sub", name, topics)

    async def _introduce(self, role: str, name: str, topics: Sequence[str]) -> Peer:
        lines = [f"{role} {name} connect", "end"]
        lines += [f"{role} {name} topic {topic}" for topic in topics]
        for line in [*lines, "end"]:
            assert await self.ask(line) == "accept", line
        return self

    async def receives(self, count: int) -> list[str]:
        """So many entries, each answered."""
        entries = []
        for _ in range(count):
            entries.append(await self.hears())
            self.say("successful")
        return entries

    async def is_hung_up(self) -> bool:
        """True when the broker closes the connection, whatever it says before."""
        try:
            while await soon(self.reader.read(65_536)):
                continue
        except ConnectionError:
            return True
        return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, BrokenPipeError):
            return


class Served:
    """A broker with a listener, on a store in memory unless another is given."""

    def __init__(
        self, broker: Broker, listener: LineServer, where: tuple[str, int] | str | None
    ) -> None:
        self.broker = broker
        self.listener = listener
        self.where = where
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        if isinstance(self.where, str):
            return self.keep(Peer(*await asyncio.open_unix_connection(self.where)))
        assert self.where is not None, "it has pipes alone"
        return self.keep(Peer(*await asyncio.open_connection(*self.where)))

    async def piped(self, name: str) -> Peer:
        """The other ends of two pipes."""
        to_broker, from_broker = os.pipe(), os.pipe()
        await self.listener.attach(to_broker[0], from_broker[1], name)
        return self.keep(await on_pipes(from_broker[0], to_broker[1]))

    async def publisher(self, name: str, *topics: str) -> Peer:
        return await (await self.peer()).publishes(name, *topics)

    async def subscriber(self, name: str, *topics: str) -> Peer:
        return await (await self.peer()).subscribes(name, *topics)

    async def topic(self, name: str, policy: Policy | None = None, partitions: int = 1) -> None:
        await self.broker.create_topic(TESTER, name, policy=policy, partitions=partitions)

    async def put(self, topic: str, *values: bytes) -> None:
        for value in values:
            put = self.broker.messages.begin_put(TESTER, topic, value)
            assert put is not None
            await put.appended

    async def values(self, topic: str, partition: int = 0) -> list[bytes]:
        """All that a topic holds."""
        page = await self.broker.messages.read(
            TESTER, topic, partition, 0, max_records=10_000, max_bytes=1 << 26
        )
        return [message.record.value or b"" for message in page.messages]

    def keep(self, peer: Peer) -> Peer:
        self._peers.append(peer)
        return peer

    async def close_peers(self) -> None:
        for peer in self._peers:
            await peer.close()


@asynccontextmanager
async def served(
    settings: LineSettings | None = None,
    *,
    broker_settings: BrokerSettings | None = None,
    store: Store | None = None,
    where: tuple[str, int] | str | None = ("127.0.0.1", 0),
    now_ms: Callable[[], int] = wall_clock_ms,
) -> AsyncIterator[Served]:
    store = store or MemoryStore(now_ms)
    broker = Broker(store, broker_settings or BrokerSettings(), now_ms)
    await broker.open()
    listener = LineServer(broker, where, settings or LineSettings())
    running = Served(broker, listener, await listener.start())
    try:
        yield running
    finally:
        await running.close_peers()
        await soon(listener.close())
        await broker.close()
        await store.close()


class _PipeReading(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # or uvloop leaves it open


async def on_pipes(read_fd: int, write_fd: int) -> Peer:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: _PipeReading(reader), os.fdopen(read_fd, "rb", 0))
    writing = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: writing, os.fdopen(write_fd, "wb", 0))
    return Peer(reader, asyncio.StreamWriter(transport, writing, None, loop))
