"""All four protocols on a network and a disk that fail.

One seed is a machine and a broker that lives on it several times over. In each life the broker's
real servers listen on the simulated network (network.py), and clients of all protocols publish and
read (protocol_clients.py). Between them are peers that do not behave: they speak one protocol to
the listener of another, send half of a request, never read, or disappear. A life ends by a crash
anywhere, or by draining and closing while everybody is busy.

- An acknowledged entry is there, once and in order, through whatever protocol it is read.
- Answers come in the order of the requests, and to the peer that asked.
- A reader that names its last message gets each message once, whatever was lost on the way.
- A line subscriber does not get an entry again that it has answered, while the broker lives.
- A well-behaved peer is answered within a bound, whatever the others do.
- When all peers are gone, no connection and no counted memory is left.
- Draining ends within its deadlines.

    python -m tests.simulation.protocols --seed 7               this seed alone, with a trace
    python -m tests.simulation.protocols --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.protocols --seconds 600          for so long, from a random one on
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final
from unittest import mock

from quackmq.broker import Broker, BrokerSettings
from quackmq.errors import StorageError, WriteFailed
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.stores.local import LocalStore
from tests.protocols.http.peers import Peer as HttpPeer
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.kafka_clients import GroupMember, TransactionalPublisher, Turns
from tests.simulation.life import CALLER
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, Weather, make_weather
from tests.simulation.protocol_clients import (
    TOPICS,
    HttpPublisher,
    HttpReader,
    KafkaPublisher,
    KafkaReader,
    LinePublisher,
    LineSubscriber,
    ProtocolClient,
    Publisher,
    Reader,
    Servers,
    ZmqPublisher,
    ZmqReader,
)
from tests.simulation.soak import main
from tests.simulation.strangers import misbehave
from tests.simulation.world import Trace, World

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "KAFKA_REQUESTS_IN_FLIGHT": (1, 3),
    "KAFKA_UNRESERVED_BYTES": (20, 100),
    "HTTP_REQUESTS_AHEAD": (1, 2),
    "HTTP_UNRESERVED_BYTES": (20, 100),
    "ZMQ_UNRESERVED_BYTES": (20, 40),
    "KAFKA_WRITE_BUFFER_BYTES": (10, 200),
    "HTTP_WRITE_BUFFER_BYTES": (10, 200),
}
_HOST: Final = "127.0.0.1"
_LINE: Final = LineSettings(reading="every", answer_ms=10_000)
_KAFKA_TOPIC, _HTTP_TOPIC, _ZMQ_TOPIC, _LINE_TOPIC, _TRANSACTION_TOPIC = TOPICS
#: Virtual seconds within which a request that needs no disk is answered. No computation takes
#: virtual time, so only waiting for somebody else can take longer.
_PROBE_SECONDS: Final = 1.0
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
#: Virtual seconds within which every client has read everything, when nothing fails any more.
_PATIENCE_SECONDS: Final = 3_600.0


class ProtocolWorld(World):
    program = "protocols"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self.publishers: list[Publisher[Any]] = [
            KafkaPublisher("kafka-publisher", _KAFKA_TOPIC),
            HttpPublisher("http-publisher", _HTTP_TOPIC),
            ZmqPublisher("zmq-publisher", _ZMQ_TOPIC),
            LinePublisher("line-publisher", _LINE_TOPIC),
            TransactionalPublisher("transactional-publisher", _TRANSACTION_TOPIC),
        ]
        self.readers: list[Reader[Any]] = [
            KafkaReader("fetcher-1", _HTTP_TOPIC),
            KafkaReader("fetcher-2", _LINE_TOPIC, is_exact=False),
            HttpReader("http-reader", _KAFKA_TOPIC),
            ZmqReader("zmq-reader", _KAFKA_TOPIC),
            HttpReader("http-reader-2", _ZMQ_TOPIC),
            ZmqReader("zmq-reader-2", _LINE_TOPIC, is_exact=False),
            HttpReader("http-reader-3", _TRANSACTION_TOPIC),
            ZmqReader("zmq-reader-3", _TRANSACTION_TOPIC),
        ]
        self.subscribers = [
            LineSubscriber("line-subscriber", _HTTP_TOPIC, is_exact=True),
            LineSubscriber("line-subscriber-2", _LINE_TOPIC, is_exact=False),
            LineSubscriber("line-subscriber-3", _TRANSACTION_TOPIC, is_exact=True),
        ]
        turns = Turns("group")
        self.members = [GroupMember(f"member-{number}", _ZMQ_TOPIC, turns) for number in range(3)]

    @property
    def clients(self) -> Sequence[ProtocolClient[Any]]:
        return [*self.publishers, *self.readers, *self.subscribers, *self.members]

    def shrink_more(self, stack: ExitStack) -> None:
        """A count that is taken from this limit is compared, not the limit itself."""
        batches = self._source.choice((1, 2, kafka_limits.KAFKA_BATCHES_AT_ONCE))
        patch = mock.patch.object(kafka_limits, "KAFKA_BATCHES_AT_ONCE", batches)
        stack.enter_context(patch)

    def _make_loop(self, source: random.Random) -> VirtualLoop:
        return NetworkLoop(self._clock, source, make_weather(self._source), self.counts)

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.3, operations=600)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, NetworkLoop)
        if last:
            loop.weather = Weather()
        for client in self.clients:
            client.forget_connection()
        for subscriber in self.subscribers:
            subscriber.broker_restarted()
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        broker = Broker(store, BrokerSettings(), clock)
        servers = Servers(
            broker,
            KafkaServer(broker, _HOST, 0),
            HttpServer(broker, _HOST, 0),
            ZmqServer(broker, _HOST, 0),
            LineServer(broker, (_HOST, 0), _LINE),
        )
        has_failed = False
        try:
            await broker.open()
            await servers.start()
            await self._register(servers, loop)
            await (self._finish(servers, loop) if last else self._work(servers, loop))
        except* (WriteFailed, _DiskFailed) as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
            has_failed = True
        if has_failed:
            return True
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        return disk.failed

    # --- one life -------------------------------------------------------------------------------

    async def _register(self, servers: Servers, loop: NetworkLoop) -> None:
        """Create topics and subscriptions. Every life begins with this, before any entry is
        published: a crash may have prevented it before."""
        broker = servers.broker
        for publisher in self.publishers:
            if publisher.topic not in broker.topics():
                if publisher.acknowledged:
                    raise Violation(f"the topic {publisher.topic} is gone")
                await broker.create_topic(CALLER, publisher.topic)
        for reader in self.readers:
            if isinstance(reader, ZmqReader):
                is_new = await broker.subscribe(CALLER, reader.name, reader.topic, "beginning")
                if is_new and reader.expected:
                    raise Violation(f"the subscription of {reader.name} is gone")
        for subscriber in self.subscribers:
            is_new = await broker.pushing.subscribe(
                CALLER, subscriber.name, subscriber.topic, _LINE.terms, "beginning"
            )
            if is_new and subscriber.received:
                raise Violation(f"the subscription of {subscriber.name} is gone")
        with loop.calm():
            peer = HttpPeer(*await asyncio.open_connection(_HOST, servers.ports["http"]))
        for client in self.clients:
            if isinstance(client, HttpPublisher | HttpReader) and not client.id:
                answer = await peer.post(f"/{client.role}/register?topic={client.topic}")
                if answer.status == 503:
                    raise _DiskFailed
                client.id = answer.succeeded()[f"{client.role}_id"]
        await peer.close()

    async def _work(self, servers: Servers, loop: NetworkLoop) -> None:
        """Let everybody work. End when all clients are done, or close while they are busy."""
        steps = self._source.choice((5, 15, 40))
        async with asyncio.TaskGroup() as group:
            working = [
                group.create_task(client.run(servers, loop, steps), name=client.name)
                for client in self.clients
            ]
            for number in range(self._source.choice((0, 2, 6))):
                group.create_task(misbehave(servers, loop), name=f"stranger {number}")
            probing = group.create_task(_probe(servers, loop), name="probe")
            if self._source.random() < 0.5:
                await asyncio.sleep(self._source.random() * 3)
                self.counts["closed while clients were busy"] += 1
            else:
                await asyncio.wait(working)
            probing.cancel()
            await self._close(servers, loop)

    async def _finish(self, servers: Servers, loop: NetworkLoop) -> None:
        """Nothing fails any more: everybody publishes what is pending, and reads everything."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                for publisher in self.publishers:
                    await _run_until_idle(publisher, servers, loop)
                count_by_topic = {each.topic: each.acknowledged for each in self.publishers}
                for reader in self.readers:
                    while reader.expected < count_by_topic[reader.topic]:
                        await reader.run(servers, loop, 1)
                for subscriber in self.subscribers:
                    while set(range(count_by_topic[subscriber.topic])) - subscriber.received:
                        await subscriber.run(servers, loop, 1)
        except TimeoutError as error:
            raise Violation("somebody waits for ever for the last entries") from error
        for reader in self.readers:
            if reader.expected != count_by_topic[reader.topic]:
                raise Violation(f"{reader.name} got more than was published")
        for client in self.clients:
            client.hang_up()
        await self._close(servers, loop)

    async def _close(self, servers: Servers, loop: NetworkLoop) -> None:
        """Close as the program does: all listeners at once, then the broker. Nothing is left."""
        began = loop.time()
        await asyncio.gather(*(server.close() for server in servers.all))
        if loop.time() - began > _CLOSE_SECONDS:
            raise Violation(f"the listeners took {loop.time() - began:.1f} s to close")
        for server in servers.all:
            if server.connections:
                raise Violation(f"connections of {server.name} are left: {server.connections}")
        left = {
            "kafka receives": servers.kafka.memory.budget.used_bytes,
            "kafka sends": servers.kafka.send_budget.unsent_bytes,
            "http receives": servers.http.receive_budget.used_bytes,
            "http sends": servers.http.send_budget.unsent_bytes,
            "zmq receives": servers.zmq.budgets.receive.used_bytes,
            "zmq sends": servers.zmq.budgets.send.unsent_bytes,
        }
        if any(left.values()):
            raise Violation(f"memory is still counted after all peers are gone: {left}")
        self.counts["listeners closed"] += 1
        await servers.broker.close()


async def _run_until_idle(publisher: Publisher[Any], servers: Servers, loop: NetworkLoop) -> None:
    """Publish until nothing is pending whose answer was lost."""
    steps = publisher.steps
    while publisher.steps < steps + 2 or publisher.is_waiting:
        await publisher.run(servers, loop, 1)


async def _probe(servers: Servers, loop: NetworkLoop) -> None:
    """Ask for something that needs no disk, again and again, on an undisturbed connection."""
    with loop.calm():
        peer = HttpPeer(*await asyncio.open_connection(_HOST, servers.ports["http"]))
    try:
        while True:
            began = loop.time()
            answer = await peer.get("/v1/topics")
            if answer.status != 200:
                raise Violation(f"the probe got {answer}")
            if loop.time() - began > _PROBE_SECONDS:
                raise Violation(f"the probe waited {loop.time() - began:.1f} s for its answer")
            loop.counts["probes answered"] += 1
            await asyncio.sleep(0.1)
    finally:
        peer.writer.close()


class _DiskFailed(Exception):
    """A request was refused because the disk has failed."""


simulate_protocols = ProtocolWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=simulate_protocols))
