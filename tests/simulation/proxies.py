"""The reliable proxy of ZeroMQ's sockets on a network and a disk that fail.

One seed is a machine and a broker that lives on it several times over. In each life the proxy's
real sockets (XSUB, XPUB and REP) serve models of its clients: publishers with and without
acknowledgements, SUB sockets, subscribers that acknowledge (reliable_subscriber.py), clients that
come and go, and clients that never answer (proxy_visitors.py). Peers that do not behave are between
them. A life ends by a crash anywhere, or by draining and closing while everybody is busy.

- An acknowledged message is there once, at the offset of its number.
- Of what a PUB socket has sent on one connection, a prefix is there, in order and once.
- A subscriber that has said `hello` gets every message, with its content, until it acknowledges it.
- What subscribers check besides is at the top of their modules.
- A slow or silent client does not delay a message to another one.
- Every bound of a peer and of all peers holds at every step.
- When the sockets have closed, no connection, no feed, no task and no counted byte is left.

    python -m tests.simulation.proxies --seed 7               this seed alone, with a trace
    python -m tests.simulation.proxies --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.proxies --seconds 600          for so long, from a random one on
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, Final
from unittest import mock

from quackmq.broker import Broker, Message
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.proxy.clients import ProxySettings
from quackmq.protocols.zmq.proxy.proxy_server import ProxyServer
from quackmq.protocols.zmq.proxy.xpub import XpubServer
from quackmq.protocols.zmq.proxy.xsub import XsubServer
from tests.simulation.disk import SimulatedDisk
from tests.simulation.life import CALLER
from tests.simulation.listeners import HOST
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, make_weather
from tests.simulation.protocol_clients import ProtocolClient
from tests.simulation.proxy_audit import check_bounds, check_nothing_left
from tests.simulation.proxy_clients import DeafSubSocket, ProxyPublisher, PubSocket, SubSocket
from tests.simulation.proxy_peers import ProxyServers
from tests.simulation.proxy_visitors import Probe, SilentClient, Visitor, ever_longer
from tests.simulation.reliable_subscriber import LEASE_MS, FirstDeliveries, ReliableSubscriber
from tests.simulation.served import ServedWorld, run_until_idle
from tests.simulation.soak import main
from tests.simulation.world import Trace

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "ZMQ_UNRESERVED_BYTES": (20, 40),
    "ZMQ_RECEIVE_BYTES": (1_000, 2_000),
    "ZMQ_SEND_BYTES": (200, 1_000),
    "ZMQ_REQUESTS": (1, 3),
    "PROXY_PUBLISHER_MESSAGES": (1, 3),
    "PROXY_PUBLISHER_BYTES": (10, 100),
    "PROXY_UNSENT_BYTES": (200, 2_000),
    "PROXY_EARLY": (1, 3),
}
_PUBLISH, _PUB, _PROBE = "by-publish", "by-pub", "probe"
_PARTITIONS: Final = {_PUBLISH: 1, _PUB: 2, _PROBE: 1}
#: So many steps that it works until the servers close.
_ALWAYS: Final = 1_000_000
#: Virtual seconds within which a sound broker has published what it has read from a PUB socket.
_PUBLISH_SECONDS: Final = 10.0
#: Virtual seconds within which every client has everything, when nothing fails any more.
_PATIENCE_SECONDS: Final = 600.0


class ProxyWorld(ServedWorld[ProxyServers]):
    program = "proxies"
    limits = LIMITS
    steps = (5, 10, 20)

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        ports = count(30_000)
        self.publisher = ProxyPublisher("publisher", _PUBLISH)
        self.pub_socket = PubSocket("PUB socket", _PUB)
        self.sub_sockets = [
            SubSocket(f"SUB socket {number}", _PUB, {_PUBLISH: self.publisher})
            for number in range(2)
        ]
        self.deaf = DeafSubSocket("deaf SUB socket", _PUB)
        self.subscribers = [
            ReliableSubscriber("subscriber-1", ports, _PUBLISH, _PUB),
            ReliableSubscriber("subscriber-2", ports, _PUBLISH),
        ]
        self.first_deliveries = [FirstDeliveries(each) for each in self.subscribers]
        self.visitors = [
            Visitor(f"visitor-{number}", f"fleeting-{number}", ports) for number in range(2)
        ]
        self.silent = [SilentClient(f"silent-{number}", _PUBLISH, ports) for number in range(2)]
        self.probe = Probe("probe", _PROBE, ports)
        self._disk: SimulatedDisk | None = None
        self._is_closed = False

    @property
    def clients(self) -> Sequence[ProtocolClient[Any]]:
        return [self.publisher, self.pub_socket, *self.subscribers, *self.visitors]

    @property
    def listening(self) -> Sequence[ProtocolClient[Any]]:
        """The clients that work until the servers close."""
        return [*self.sub_sockets, self.deaf, *self.first_deliveries, *self.silent]

    def shrink_more(self, stack: ExitStack) -> None:
        """Limits that no comparison in the proxy uses: the value of a semaphore, the entries in one
        portion or page, and the unsent bytes from which on a peer is slow."""
        exchanges = self._source.choice(({}, {"PROXY_LARGE_EXCHANGES": 1}))
        entries = self._source.choice(({}, {"PROXY_TAKEN": 2}))
        pages = self._source.choice(({}, *2 * [{"PROXY_PAGE_RECORDS": 3}]))
        buffers = {"ZMQ_WRITE_BUFFER_BYTES": 100} if pages else {}
        for name, value in (exchanges | entries | pages | buffers).items():
            stack.enter_context(mock.patch.object(zmq_limits, name, value))

    def _make_loop(self, source: random.Random) -> VirtualLoop:
        weather = dataclasses.replace(
            make_weather(self._source), slow_connects=self._source.choice((0.0, 0.0, 0.05))
        )
        return NetworkLoop(self._clock, source, weather, self.counts)

    def _make_servers(self, broker: Broker) -> ProxyServers:
        budgets = Budgets()
        xpub = XpubServer(broker, HOST, 0, budgets)
        settings = ProxySettings(lease_ms=LEASE_MS)
        return ProxyServers(
            broker,
            XsubServer(broker, HOST, 0, budgets),
            xpub,
            ProxyServer(broker, HOST, 0, xpub, settings, budgets),
        )

    def _broker_restarted(self, disk: SimulatedDisk) -> None:
        has_failed = self._disk is not None and self._disk.failed
        for client in self.listening:
            client.forget_connection()
        self.pub_socket.broker_restarted(is_closed=self._is_closed, has_failed=has_failed)
        for subscriber in self.subscribers:
            subscriber.broker_restarted(
                self._clock.seconds, is_closed=self._is_closed, has_failed=has_failed
            )
        self._disk, self._is_closed = disk, False

    async def _register(self, servers: ProxyServers, loop: NetworkLoop) -> None:
        for topic, partitions in _PARTITIONS.items():
            if topic not in servers.broker.topics():
                if self.publisher.acknowledged:
                    raise Violation(f"the topic {topic} is gone")
                await servers.broker.create_topic(CALLER, topic, partitions=partitions)
        self.pub_socket.servers = servers
        for sub_socket in self.sub_sockets:
            sub_socket.servers = servers
        for subscriber in self.subscribers:
            await subscriber.begin(servers, loop)
        for visitor in self.visitors:
            await visitor.begin(servers)
        for silent in self.silent:
            await silent.begin(loop)

    def _background(
        self, servers: ProxyServers, loop: NetworkLoop
    ) -> dict[str, Coroutine[Any, Any, None]]:
        working = {client.name: client.run(servers, loop, _ALWAYS) for client in self.listening}
        return working | {"probe": self.probe.run(servers, loop), "audit": _audit(servers, loop)}

    async def _finish(self, servers: ProxyServers, loop: NetworkLoop) -> None:
        for subscriber in self.subscribers:
            subscriber.is_obedient = True
        ends = {topic: await servers.ends_of(topic) for topic in (_PUBLISH, _PUB)}
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS), asyncio.TaskGroup() as group:
                listening = [
                    group.create_task(client.run(servers, loop, _ALWAYS))
                    for client in self.listening
                ]
                listening.append(group.create_task(_audit(servers, loop)))
                for _ in range(4):
                    await run_until_idle(self.publisher, servers, loop)
                self.pub_socket.is_orderly = True
                await self.pub_socket.run(servers, loop, 3)
                await asyncio.sleep(_PUBLISH_SECONDS)
                ends = {topic: await servers.ends_of(topic) for topic in (_PUBLISH, _PUB)}
                for subscriber in self.subscribers:
                    while not subscriber.has_everything(ends):
                        await subscriber.run(servers, loop, 1)
                        await asyncio.sleep(1)
                for visitor in self.visitors:
                    await visitor.run(servers, loop, 2)
                for task in listening:
                    task.cancel()
        except TimeoutError as error:
            waiting = {each.name: each.describe(ends) for each in self.subscribers}
            raise Violation(f"somebody waits for ever for the last messages: {waiting}") from error
        self.pub_socket.broker_restarted(is_closed=True, has_failed=False)
        await self._check_log(servers.broker)
        await self._close(servers)

    async def _check_log(self, broker: Broker) -> None:
        """Compare what everybody got with what is in the log."""
        published = await _read_all(broker, _PUBLISH)
        numbers = [int(message.record.value or b"") for message in published]
        if numbers != list(range(self.publisher.acknowledged)):
            raise Violation(f"{self.publisher.acknowledged} were published: {numbers}")
        sent = await _read_all(broker, _PUB)
        self.pub_socket.check([(each.partition, each.record.value or b"") for each in sent])
        contents = {message.id: message.record.value for message in (*published, *sent)}
        for subscriber in self.subscribers:
            for account in subscriber.accounts.values():
                for position, message_id in account.id_by_position.items():
                    if account.contents[position] != contents.get(message_id):
                        raise Violation(f"{subscriber.name} got another content of {message_id}")

    async def _close(self, servers: ProxyServers) -> None:
        await super()._close(servers)
        await check_nothing_left(servers)
        self._is_closed = True


async def _read_all(broker: Broker, topic: str) -> list[Message]:
    messages: list[Message] = []
    for partition in range(broker.topic(topic).partitions):
        offset, found = 0, 1
        while found:
            page = await broker.messages.read(
                CALLER, topic, partition, offset, max_records=1_000, max_bytes=2**20
            )
            messages += page.messages
            offset, found = page.next_offset, len(page.messages)
    return messages


async def _audit(servers: ProxyServers, loop: NetworkLoop) -> None:
    """Check the bounds again and again, and whether a REP socket has found a broken promise."""
    for pause_seconds in ever_longer(0.02):
        check_bounds(servers)
        for unhandled in loop.unhandled:
            raise Violation("a REP socket was served wrongly") from unhandled.get("exception")
        await asyncio.sleep(pause_seconds)


simulate_proxies = ProxyWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=simulate_proxies))
