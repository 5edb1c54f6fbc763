"""Peers of the ZeroMQ listener: libzmq's sockets, which nobody here wrote, and one made of bytes
for what no library would send; and a broker with a listener to go with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import zmq
import zmq.asyncio

from quackmq.broker import Broker, BrokerSettings, Caller, Message
from quackmq.model.topic import Append, AppendResult, Cursor, StatePut
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.support import listening
from tests.kit.waiting import soon
from tests.protocols.codecs.zmtp_frames import HELLO, request

T = TypeVar("T")

#: For what takes milliseconds when all is well. Long, since machines can be busy.
DEADLINE_S = 60
TESTER = Caller("tester")
GREETING_AND_READY_BYTES = 64 + 2 + 6 + 12 + 4 + 6 + 9 + 4


class WatchedBroker(Broker):
    """A broker that says how many calls wait for a message, and how many there were."""

    waiting = 0
    gets = 0

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int = 0,
        *,
        raise_on_loss: bool = False,
    ) -> Message | None:
        self.gets += 1
        self.waiting += wait_ms > 0
        try:
            return await super().get(
                caller, name, topic_name, last_id, wait_ms, raise_on_loss=raise_on_loss
            )
        finally:
            self.waiting -= wait_ms > 0


class SlowStore(MemoryStore):
    """Appends are answered when the test says so, as by a slow disk."""

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
        self.appends += 1
        return self._later(super().append(appends, cursors, states))

    async def _later(self, appended: Awaitable[list[AppendResult]]) -> list[AppendResult]:
        await self.released.wait()
        return await appended


class Socket:
    """A REQ socket, or another kind."""

    def __init__(
        self, context: zmq.asyncio.Context, kind: int, address: str, heartbeat_ms: int
    ) -> None:
        self.socket = context.socket(kind)
        self.socket.linger = 0
        self.socket.ipv6 = True
        self.socket.heartbeat_ivl = heartbeat_ms
        # A busy machine may answer late; libzmq would hang up after one interval.
        self.socket.heartbeat_timeout = 60_000
        self.socket.connect(address)

    async def ask(self, frame: bytes) -> bytes:
        await self.socket.send(frame)
        return await self.receive()

    async def receive(self) -> bytes:
        frames: list[bytes] = await soon(self.socket.recv_multipart())
        assert len(frames) == 1
        return frames[0]

    def close(self) -> None:
        self.socket.close()


class Raw:
    """A TCP connection to which a test writes what it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def hello(self) -> Raw:
        """Introduce itself as a REQ socket."""
        self.writer.write(HELLO)
        await soon(self.reader.readexactly(GREETING_AND_READY_BYTES))
        return self

    async def ask(self, content: bytes) -> bytes:
        self.writer.write(request(content))
        return (await self.receive())[-1]

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        frames = []
        more = True
        while more:
            flags = (await soon(self.reader.readexactly(1)))[0]
            assert not flags & 4, "a command"
            size = await soon(self.reader.readexactly(8 if flags & 2 else 1))
            frames.append(await soon(self.reader.readexactly(int.from_bytes(size, "big"))))
            more = bool(flags & 1)
        return frames

    async def is_disconnected(self) -> bool:
        """True when the listener closes the connection, whatever it says before."""
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
        except ConnectionError:
            return


class Served:
    """A broker with a listener, on a store in memory unless another is given."""

    def __init__(self, broker: Broker, listener: ZmqServer, address: tuple[str, int]) -> None:
        self.broker = broker
        self.listener = listener
        self.address = address
        self._context = zmq.asyncio.Context()
        self._raws: list[Raw] = []

    def socket(self, kind: int = zmq.REQ, *, heartbeat_ms: int = 0) -> Socket:
        host, port = self.address
        host = f"[{host}]" if ":" in host else host
        return Socket(self._context, kind, f"tcp://{host}:{port}", heartbeat_ms)

    async def raw(self) -> Raw:
        raw = Raw(*await asyncio.open_connection(*self.address))
        self._raws.append(raw)
        return raw

    @property
    def connections(self) -> int:
        return len(self.listener.connections)

    async def reopen(self) -> None:
        """The listener has been closed: another one, at the same place."""
        self.listener = ZmqServer(self.broker, *self.address)
        await self.listener.start()

    async def close_peers(self) -> None:
        self._context.destroy(linger=0)
        for raw in self._raws:
            await raw.close()


@asynccontextmanager
async def served(
    broker_type: type[Broker] = Broker,
    settings: BrokerSettings | None = None,
    store: Store | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[Served]:
    store = store or MemoryStore()
    broker = broker_type(store, settings or BrokerSettings())
    await broker.open()
    listener = ZmqServer(broker, host, 0)
    running = Served(broker, listener, await listening(listener))
    try:
        yield running
    finally:
        await running.close_peers()
        await soon(running.listener.close())
        await broker.close()
        await store.close()


def broker_of(running: Served) -> WatchedBroker:
    assert isinstance(running.broker, WatchedBroker)
    return running.broker
