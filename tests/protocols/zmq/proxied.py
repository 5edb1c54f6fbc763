"""A broker with the three sockets of the reliable proxy, and peers of them: libzmq's sockets, which
nobody here wrote, and connections made of bytes for what no library would send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq
import zmq.asyncio

from quackmq.broker import Broker, BrokerSettings
from quackmq.protocols.zmq.proxy.clients import ProxySettings
from quackmq.protocols.zmq.proxy.proxy_server import ProxyServer
from quackmq.protocols.zmq.proxy.xpub import Subscriber, XpubServer
from quackmq.protocols.zmq.proxy.xsub import XsubServer
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.serving.server import Server
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.support import listening
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import greeting, ready
from tests.protocols.zmq.peers import DEADLINE_S, TESTER, Raw

HOST = "127.0.0.1"
#: Nothing is sent twice by accident, also on a busy machine; tests that want it take a short one.
LONG_LEASE = ProxySettings(lease_ms=600_000)
SHORT_LEASE = ProxySettings(lease_ms=50)


class Proxied:
    def __init__(self, broker: Broker, settings: ProxySettings) -> None:
        self.broker = broker
        self.xsub = XsubServer(broker, HOST, 0)
        self.xpub = XpubServer(broker, HOST, 0)
        self.proxy = ProxyServer(broker, HOST, 0, self.xpub, settings)
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._raws: list[Raw] = []

    async def start(self) -> None:
        listeners: dict[str, Server[Any]] = {
            "xsub": self.xsub,
            "xpub": self.xpub,
            "proxy": self.proxy,
        }
        for name, listener in listeners.items():
            self.broker.listener_addresses[name] = await listening(listener)

    async def close(self) -> None:
        self._context.destroy(linger=0)
        for raw in self._raws:
            await raw.close()
        for listener in (self.xsub, self.proxy, self.xpub):
            await soon(listener.close())

    # --- peers --------------------------------------------------------------------------------

    def _made(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.linger = 0
        self._sockets.append(made)  # who lets go of one unclosed is warned
        return made

    def _socket(self, kind: int, listener: str) -> zmq.asyncio.Socket:
        made = self._made(kind)
        made.connect(f"tcp://{HOST}:{self.broker.listener_addresses[listener][1]}")
        return made

    async def publisher(self) -> zmq.asyncio.Socket:
        """A PUB socket that is connected: what it sends from now on arrives."""
        made = self._made(zmq.XPUB)
        made.sndhwm = 0
        made.connect(f"tcp://{HOST}:{self.broker.listener_addresses['xsub'][1]}")
        assert await soon(made.recv()) == b"\x01", "it is asked for everything"
        return made

    def plain_publisher(self) -> zmq.asyncio.Socket:
        return self._socket(zmq.PUB, "xsub")

    async def subscriber(self, *prefixes: bytes) -> zmq.asyncio.Socket:
        """A SUB socket whose subscriptions have come."""
        before = self.subscribers()
        made = self._socket(zmq.SUB, "xpub")
        for prefix in prefixes:
            made.subscribe(prefix)
        await self.subscribed(before, *prefixes)
        return made

    async def subscribed(self, before: list[Subscriber], *prefixes: bytes) -> None:
        """Until somebody who was not there before has asked for all of these, and what is published
        from now on is sent."""
        wanted = set(prefixes)
        await until(
            lambda: any(
                wanted <= each.subscriptions for each in self.subscribers() if each not in before
            )
        )
        await until(lambda: all(self.xpub.following().values()))

    def subscribers(self) -> list[Subscriber]:
        return [each for each in self.xpub.connections if isinstance(each, Subscriber)]

    def client(self) -> zmq.asyncio.Socket:
        return self._socket(zmq.REQ, "proxy")

    def rep(self) -> tuple[zmq.asyncio.Socket, int]:
        """A REP socket, as a client has one, and its port."""
        made = self._made(zmq.REP)
        return made, made.bind_to_random_port(f"tcp://{HOST}")

    async def raw(self, listener: str, kind: bytes) -> Raw:
        """A connection that has introduced itself and reads nothing of what is said to it."""
        raw = Raw(*await asyncio.open_connection(HOST, self.broker.listener_addresses[listener][1]))
        self._raws.append(raw)
        raw.writer.write(greeting() + ready(kind))
        return raw

    # --- the broker ---------------------------------------------------------------------------

    async def put(self, topic: str, *bodies: bytes) -> None:
        for body in bodies:
            record = Record(0, NO_TIMESTAMP, None, body)
            await soon(self.broker.messages.put(TESTER, topic, (record,)))

    async def bodies(self, topic: str) -> list[bytes | None]:
        """All that was published to it."""
        if topic not in self.broker.topics():
            return []
        page = await self.broker.messages.read(
            TESTER, topic, 0, 0, max_records=10_000, max_bytes=10_000_000
        )
        return [message.record.value for message in page.messages]

    async def published(self, topic: str, *bodies: bytes) -> None:
        """Until just that was."""
        wanted = list(bodies)
        async with asyncio.timeout(DEADLINE_S):
            while await self.bodies(topic) != wanted:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def proxied(
    settings: ProxySettings = LONG_LEASE,
    store: Store | None = None,
    broker_settings: BrokerSettings | None = None,
) -> AsyncIterator[Proxied]:
    """On a store in memory; one that is given stays open."""
    kept = store or MemoryStore()
    broker = Broker(kept, broker_settings or BrokerSettings())
    await broker.open()
    running = Proxied(broker, settings)
    await running.start()
    try:
        yield running
    finally:
        await running.close()
        await broker.close()
        if store is None:
            await kept.close()


async def ask(socket: zmq.asyncio.Socket, frame: bytes) -> bytes:
    await socket.send(frame)
    answer: bytes = await soon(socket.recv())
    return answer


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    frames: list[bytes] = await soon(socket.recv_multipart())
    return frames
