"""Clients of the proxy that come and go, clients that never answer, and a probe that is never late.

`Visitor` uses a topic that is deleted under it again and again. `SilentClient` says `hello` and
then does not answer, or nobody is at its address any more. `Probe` measures whether they delay
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from quackmq.errors import QuackError, UnknownTopic
from quackmq.protocols.zmq.codec.proxy_language import (
    Goodbye,
    Hello,
    Publish,
    encode_data_received,
    encode_not_yet,
    parse_data,
)
from tests.kit.waiting import soon
from tests.simulation.life import CALLER
from tests.simulation.listeners import HOST
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, end_of
from tests.simulation.protocol_clients import LOST, ProtocolClient
from tests.simulation.proxy_peers import (
    CallbackListener,
    Command,
    ProxyServers,
    ZmtpPeer,
    note_refusal,
)

#: Virtual seconds within which a visitor gets its messages: some failures, each with a longer wait.
_VISIT_SECONDS: Final = 600.0
#: Virtual seconds between the acknowledgement of a message and its arrival. No computation takes
#: virtual time, so only waiting for somebody else can take longer.
_PROBE_SECONDS: Final = 1.0


def ever_longer(seconds: float) -> Iterator[float]:
    """Yield pauses, each longer than the last by a tenth: a long life has no more work than a
    short one."""
    while True:
        yield seconds
        seconds = min(1.1 * seconds, 10.0)


class Visitor(ProtocolClient[ZmtpPeer]):
    """Says `hello`, publishes, waits for its messages, and leaves; or its topic is deleted.

    Every message that it publishes after the answer to its `hello` comes while the topic exists.
    """

    server = "proxy"
    #: The servers of this life.
    servers: ProxyServers

    def __init__(self, name: str, topic: str, free_ports: Iterator[int]) -> None:
        super().__init__(name, topic)
        self._listener = CallbackListener(self._serve, free_ports)
        self._numbers = 0
        self._received: set[bytes] = set()
        self._may_postpone = True

    async def begin(self, servers: ProxyServers) -> None:
        self.servers = servers
        self._listener.forget()
        await self._listener.open()

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        return await ZmtpPeer(reader, writer).introduce(b"REQ")

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        fate = loop.source.random()
        try:
            if fate < 0.2:
                await self._delete_topic()
            elif fate < 0.4:
                await self._say_hello_during_deletion(peer, loop)
            await peer.ask(self._hello())
            await self._publish_and_wait(peer, loop)
            if fate > 0.7:
                await peer.ask(Goodbye(self.name, self.topic))
        except QuackError as error:
            note_refusal(error, loop)

    def _hello(self) -> Hello:
        return Hello(self.name, self.topic, f"*:{self._listener.port}")

    async def _say_hello_during_deletion(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        """Say `hello` while the topic is deleted: it may fail, or concern the deleted topic."""
        deleting = asyncio.create_task(self._delete_topic())
        try:
            await asyncio.sleep(loop.source.random() * 0.01)
            await peer.ask(self._hello())
        except UnknownTopic:
            loop.counts["hellos to a topic that is being deleted"] += 1
        finally:
            await deleting

    async def _delete_topic(self) -> None:
        try:
            await self.servers.broker.delete_topic(CALLER, self.topic)
        except UnknownTopic:
            return

    async def _publish_and_wait(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        contents = []
        for _ in range(loop.source.randint(1, 3)):
            self._numbers += 1
            contents.append(b"%d" % self._numbers)
            await peer.ask(Publish(self.name, self.topic, self._numbers, contents[-1]))
        began = loop.time()
        while not self._received.issuperset(contents):
            if self.servers.proxy.is_closing:
                raise ConnectionResetError
            if loop.time() - began > _VISIT_SECONDS:
                raise Violation(f"{self.name} has got only {self._received} of {contents}")
            await asyncio.sleep(0.05)
        self._received.clear()
        loop.counts["visits"] += 1

    async def _serve(self, peer: ZmtpPeer) -> None:
        await peer.introduce(b"REP")
        while True:
            _, frame = await peer.receive_message()
            data = parse_data(frame)
            if (data.client, data.topic) != (self.name, self.topic):
                raise Violation(f"{self.name} got {frame!r}")
            self._may_postpone = not self._may_postpone
            if self._may_postpone:
                peer.send(b"", encode_not_yet(data))
                continue
            self._received.add(data.content)
            peer.send(b"", encode_data_received(data))


class SilentClient(ProtocolClient[ZmtpPeer]):
    """Says `hello`, and is then a bad client. Its subscription stays."""

    server = "proxy"

    def __init__(self, name: str, topic: str, free_ports: Iterator[int]) -> None:
        super().__init__(name, topic)
        self._listener = CallbackListener(self._serve, free_ports)
        self._loop: NetworkLoop | None = None

    async def begin(self, loop: NetworkLoop) -> None:
        self._loop = loop
        self._listener.forget()
        if loop.source.random() < 0.5:
            await self._listener.open()

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        return await ZmtpPeer(reader, writer).introduce(b"REQ")

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        await self._listener.open(is_new_port=True)
        try:
            await peer.ask(Hello(self.name, self.topic, f"*:{self._listener.port}"))
        except QuackError as error:
            note_refusal(error, loop)
        if loop.source.random() < 0.3:
            self._listener.close()
        await asyncio.sleep(loop.source.random() * 5)

    async def _serve(self, peer: ZmtpPeer) -> None:
        """Accept a connection and disappoint the proxy in some way."""
        assert self._loop is not None
        source = self._loop.source
        fate = source.choice(("says nothing", "never answers", "never reads", "sends noise"))
        self._loop.counts[f"silent client {fate}"] += 1
        if fate != "says nothing":
            await peer.introduce(b"REP")
        if fate == "never reads":
            end_of(peer.writer).pause_reading()
        if fate == "sends noise":
            await peer.receive_message()
            peer.writer.write(source.randbytes(100))
        await asyncio.sleep(60)


class Probe:
    """Publishes on an undisturbed connection, and gets the message from XPUB and as `data`, on
    undisturbed connections too, within a bound."""

    def __init__(self, name: str, topic: str, free_ports: Iterator[int]) -> None:
        self.name = name
        self.topic = topic
        self._listener = CallbackListener(self._serve, free_ports)
        self._number = 0
        self._arrivals: dict[tuple[str, int], asyncio.Future[None]] = {}

    async def run(self, servers: ProxyServers, loop: NetworkLoop) -> None:
        """Probe until it is cancelled, or until the disk fails."""
        with loop.calm():
            await self._open_listener()
            subscriber = ZmtpPeer(*await asyncio.open_connection(HOST, servers.ports["xpub"]))
            peer = ZmtpPeer(*await asyncio.open_connection(HOST, servers.ports["proxy"]))
        reading = asyncio.create_task(self._read(subscriber))
        try:
            await peer.introduce(b"REQ")
            await peer.ask(Hello(self.name, self.topic, f"*:{self._listener.port}"))
            for pause_seconds in ever_longer(0.05):
                await self._probe(peer, loop)
                await asyncio.sleep(pause_seconds)
        except QuackError as error:
            note_refusal(error, loop)
        finally:
            reading.cancel()
            peer.writer.close()
            subscriber.writer.close()

    async def _open_listener(self) -> None:
        self._listener.forget()
        await self._listener.open()

    async def _probe(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        self._number += 1
        number = self._number
        for way in ("xpub", "data"):
            self._arrivals[way, number] = loop.create_future()
        await peer.ask(Publish(self.name, self.topic, number, b"%d" % number))
        done, _ = await asyncio.wait(
            [self._arrivals[way, number] for way in ("xpub", "data")], timeout=_PROBE_SECONDS
        )
        if len(done) < 2:
            late = [way for way in ("xpub", "data") if not self._arrivals[way, number].done()]
            raise Violation(f"the probe's message {number} is late by {late}")
        loop.counts["probes answered"] += 1

    def _on_arrival(self, way: str, content: bytes) -> None:
        arrival = self._arrivals.get((way, int(content)))
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    async def _read(self, subscriber: ZmtpPeer) -> None:
        try:
            await subscriber.introduce(b"SUB")
            subscriber.send_command(b"SUBSCRIBE", self.topic.encode())
            while True:
                received = await soon(subscriber.receive())
                if isinstance(received, Command):
                    raise Violation(f"the probe got {received}")
                self._on_arrival("xpub", received[1])
        except LOST:
            return

    async def _serve(self, peer: ZmtpPeer) -> None:
        await peer.introduce(b"REP")
        while True:
            _, frame = await peer.receive_message()
            data = parse_data(frame)
            self._on_arrival("data", data.content)
            peer.send(b"", encode_data_received(data))
