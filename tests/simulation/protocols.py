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
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, Final
from unittest import mock

from quackmq.broker import Broker
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.zmq.server import ZmqServer
from tests.protocols.http.peers import Peer as HttpPeer
from tests.simulation.disk import SimulatedDisk
from tests.simulation.event_streams import (
    PARTITIONED_TOPIC,
    PARTITIONS,
    EventReader,
    PartitionedPublisher,
)
from tests.simulation.kafka_clients import GroupMember, TransactionalPublisher, Turns
from tests.simulation.life import CALLER
from tests.simulation.listeners import HOST
from tests.simulation.local_channels import SocketFiles, local_channels
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
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
from tests.simulation.served import DiskFailed, ServedWorld, run_until_idle
from tests.simulation.soak import main
from tests.simulation.waiters import QUIET_TOPIC, WAITERS
from tests.simulation.world import Trace

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "KAFKA_REQUESTS_IN_FLIGHT": (1, 3),
    "KAFKA_UNRESERVED_BYTES": (20, 100),
    "HTTP_REQUESTS_AHEAD": (1, 2),
    "HTTP_UNRESERVED_BYTES": (20, 100),
    "ZMQ_UNRESERVED_BYTES": (20, 40),
    "KAFKA_WRITE_BUFFER_BYTES": (10, 200),
    "HTTP_WRITE_BUFFER_BYTES": (10, 200),
    "HTTP_EVENTS_RECORDS": (1, 2),
    "HTTP_EVENT_STREAMS": (2,),
}
_SOCKET_PATH: Final = "/run/line.sock"
_LINE: Final = LineSettings(reading="every", answer_ms=10_000)
_KAFKA_TOPIC, _HTTP_TOPIC, _ZMQ_TOPIC, _LINE_TOPIC, _TRANSACTION_TOPIC = TOPICS
#: Virtual seconds within which a request that needs no disk is answered. No computation takes
#: virtual time, so only waiting for somebody else can take longer.
_PROBE_SECONDS: Final = 1.0
#: Virtual seconds within which every client has read everything, when nothing fails any more.
_PATIENCE_SECONDS: Final = 3_600.0


class ProtocolWorld(ServedWorld[Servers]):
    program = "protocols"
    limits = LIMITS
    #: The ports of the servers; 0 means any.
    http_port = zmq_port = 0

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self.publishers: list[Publisher[Any]] = [
            KafkaPublisher("kafka-publisher", _KAFKA_TOPIC),
            HttpPublisher("http-publisher", _HTTP_TOPIC),
            ZmqPublisher("zmq-publisher", _ZMQ_TOPIC),
            LinePublisher("line-publisher", _LINE_TOPIC),
            TransactionalPublisher("transactional-publisher", _TRANSACTION_TOPIC),
            PartitionedPublisher("partitioned-publisher", PARTITIONED_TOPIC),
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
            EventReader("event-reader", _TRANSACTION_TOPIC),
            EventReader("event-reader-2", PARTITIONED_TOPIC, PARTITIONS),
        ]
        self.subscribers = [
            LineSubscriber("line-subscriber", _HTTP_TOPIC, is_exact=True),
            LineSubscriber("line-subscriber-2", _LINE_TOPIC, is_exact=False),
            LineSubscriber("line-subscriber-3", _TRANSACTION_TOPIC, is_exact=True),
        ]
        self._socket_files = SocketFiles()
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
        stack.enter_context(local_channels(self._socket_files))

    def _make_servers(self, broker: Broker) -> Servers:
        return Servers(
            broker,
            KafkaServer(broker, HOST, 0),
            HttpServer(broker, HOST, self.http_port),
            ZmqServer(broker, HOST, self.zmq_port),
            LineServer(broker, self._choose_line_address(), _LINE),
        )

    def _broker_restarted(self, disk: SimulatedDisk) -> None:
        for subscriber in self.subscribers:
            subscriber.broker_restarted()

    def _choose_line_address(self) -> tuple[str, int] | str:
        """Choose TCP or a Unix socket, whose file a killed broker may have left."""
        self._socket_files.listening.clear()
        if self._source.random() < 0.5:
            return (HOST, 0)
        if _SOCKET_PATH in self._socket_files.numbers:
            self.counts["socket files of dead brokers"] += 1
        return _SOCKET_PATH

    async def _register(self, servers: Servers, loop: NetworkLoop) -> None:
        broker = servers.broker
        for publisher in self.publishers:
            if publisher.topic not in broker.topics():
                if publisher.acknowledged:
                    raise Violation(f"the topic {publisher.topic} is gone")
                await broker.create_topic(CALLER, publisher.topic, partitions=publisher.partitions)
        if QUIET_TOPIC not in broker.topics():
            await broker.create_topic(CALLER, QUIET_TOPIC)
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
            peer = HttpPeer(*await asyncio.open_connection(HOST, servers.ports["http"]))
        for client in self.clients:
            if isinstance(client, HttpPublisher | HttpReader) and not client.id:
                answer = await peer.post(f"/{client.role}/register?topic={client.topic}")
                if answer.status == 503:
                    raise DiskFailed
                client.id = answer.succeeded()[f"{client.role}_id"]
        await peer.close()

    def _background(
        self, servers: Servers, loop: NetworkLoop
    ) -> dict[str, Coroutine[Any, Any, None]]:
        return {"probe": _probe(servers, loop)}

    def _until_closed(
        self, servers: Servers, loop: NetworkLoop
    ) -> dict[str, Coroutine[Any, Any, None]]:
        return {waiter.__name__: waiter(servers, loop) for waiter in WAITERS}

    async def _finish(self, servers: Servers, loop: NetworkLoop) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                for publisher in self.publishers:
                    await run_until_idle(publisher, servers, loop)
                count_by_topic = {each.topic: each.acknowledged for each in self.publishers}
                for reader in self.readers:
                    while reader.expected < count_by_topic[reader.topic]:
                        await reader.run(servers, loop, 1)
                    reader.hang_up()  # there may be too few event streams for all readers
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
        await self._close(servers)

    async def _close(self, servers: Servers) -> None:
        await super()._close(servers)
        if servers.paths and _SOCKET_PATH in self._socket_files.numbers:
            raise Violation(f"the closed broker left its socket file {_SOCKET_PATH}")


async def _probe(servers: Servers, loop: NetworkLoop) -> None:
    """Ask for something that needs no disk, again and again, on an undisturbed connection."""
    with loop.calm():
        peer = HttpPeer(*await asyncio.open_connection(HOST, servers.ports["http"]))
    try:
        while True:
            began = loop.time()
            answer = await peer.get("/v1/topics")
            if answer.status != 200:
                raise Violation(f"the probe got {answer}")
            if loop.time() - began > _PROBE_SECONDS:
                raise Violation(f"the probe waited {loop.time() - began:.1f} s for its answer")
            loop.counts["probes answered"] += 1
            await asyncio.sleep(0.3)
    finally:
        peer.writer.close()


simulate_protocols = ProtocolWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=simulate_protocols))
