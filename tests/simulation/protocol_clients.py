"""Clients of the four protocols, as models: each checks what its protocol promises to it.

Every publisher numbers its entries 0, 1, 2, … and has a topic of its own. Kafka, HTTP and ZeroMQ
publishers repeat an entry whose answer was lost, with the same sequence number. So the record at
offset n of their topics is the number n, whatever was lost on the way. A line publisher cannot
say that an entry is a repetition: its last number may occur more than once in a row.

Readers check that they get those numbers in order, each once. They survive lost connections and
lives of the broker, and remember only what a program would.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from aiokafka.record.default_records import DefaultRecordBatch

from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.serving.server import Server
from tests.kit.support import batches_of
from tests.protocols.http.peers import Answer
from tests.protocols.http.peers import Peer as HttpPeer
from tests.protocols.kafka.client import (
    API_VERSIONS,
    FETCH,
    INIT_PRODUCER_ID,
    PRODUCE,
    Client,
    fetch_fields,
    news,
    only_partition,
    produce_fields,
)
from tests.protocols.line.peers import Peer as LinePeer
from tests.protocols.zmq.peers import Raw
from tests.simulation.listeners import Listeners
from tests.simulation.local_channels import PipePair, leave_pipes, open_pipes
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, end_of

#: How a connection ends for a program that waits for bytes; the peers wait for a minute.
LOST: Final = (ConnectionError, asyncio.IncompleteReadError, TimeoutError)
#: The topics of the publishers.
TOPICS: Final = ("by-kafka", "by-http", "by-zmq", "by-line", "by-transaction")
_IN_FLIGHT: Final = 5
_NOT_IN_ORDER: Final = 45
_DUPLICATE: Final = 46

PeerT = TypeVar("PeerT")


@dataclass
class Servers(Listeners):
    """The servers of four protocols, in one life of the broker."""

    kafka: KafkaServer
    http: HttpServer
    zmq: ZmqServer
    line: LineServer

    async def attach_pipes(
        self, channel: str, loop: NetworkLoop
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Give the line server a pair of pipes; return the other ends."""
        (read_fd, from_peer), (from_broker, write_fd) = loop.pipe(), loop.pipe()
        await self.line.attach(read_fd, write_fd, channel)
        loop.counts["peers on pipes"] += 1
        return await open_pipes(loop, from_broker, from_peer)

    @property
    def all(self) -> tuple[Server[Any], ...]:
        return (self.kafka, self.http, self.zmq, self.line)

    @property
    def counted_bytes(self) -> dict[str, int]:
        return {
            "kafka receives": self.kafka.memory.budget.used_bytes,
            "kafka sends": self.kafka.send_budget.unsent_bytes,
            "http receives": self.http.receive_budget.used_bytes,
            "http sends": self.http.send_budget.unsent_bytes,
            "zmq receives": self.zmq.budgets.receive.used_bytes,
            "zmq sends": self.zmq.budgets.send.unsent_bytes,
            "event streams": self.http.stream_count,
        }


class ProtocolClient(ABC, Generic[PeerT]):
    """A client with one connection at a time, which it opens again when it is lost."""

    #: The name of its server.
    server: str
    #: Whether it may wait for long without an answer.
    waits = False
    #: The loop of the present life.
    _life_loop: NetworkLoop

    def __init__(self, name: str, topic: str) -> None:
        self.name = name
        self.topic = topic
        self.steps = 0
        self._peer: PeerT | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, servers: Listeners, loop: NetworkLoop, steps: int) -> None:
        """Take so many steps, with a pause after each; end when nobody listens any more."""
        for _ in range(steps):
            try:
                if self._peer is None:
                    self._life_loop = loop
                    reader, writer = await self._connect(servers)
                    self._writer = writer
                    self._peer = await self._introduce(reader, writer)
                await self._step(self._peer, loop)
                self.steps += 1
            except ConnectionRefusedError:
                return
            except LOST as error:
                if isinstance(error, TimeoutError) and not loop.weather.stalls and not self.waits:
                    raise Violation(f"{self.name} got no answer in a minute") from error
                loop.counts[f"{self.server} connections lost"] += 1
                self.hang_up(is_reset=loop.source.random() < 0.5)
            await asyncio.sleep(loop.source.random() ** 3 * 0.05)

    def hang_up(self, *, is_reset: bool = False) -> None:
        if self._writer is not None:
            if is_reset:
                self._writer.transport.abort()
            else:
                self._writer.close()
        self.forget_connection()

    def forget_connection(self) -> None:
        """The process of the broker is gone, and all connections with it."""
        self._peer = self._writer = None

    async def _connect(
        self, servers: Listeners
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await servers.connect(self.server)

    @abstractmethod
    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> PeerT: ...

    @abstractmethod
    async def _step(self, peer: PeerT, loop: NetworkLoop) -> None: ...


class Publisher(ProtocolClient[PeerT]):
    """Publishes numbers to its topic."""

    #: Whether it can repeat an entry without publishing it twice.
    is_exact = True
    #: The number of partitions of its topic.
    partitions = 1

    def __init__(self, name: str, topic: str) -> None:
        super().__init__(name, topic)
        #: The numbers below this one were acknowledged.
        self.acknowledged = 0

    @property
    def is_waiting(self) -> bool:
        """Whether entries may have been published whose answers were lost."""
        return False


class Reader(ProtocolClient[PeerT]):
    """Reads a topic from its beginning."""

    def __init__(self, name: str, topic: str, *, is_exact: bool = True) -> None:
        super().__init__(name, topic)
        self.expected = 0
        self._is_exact = is_exact

    def _got(self, value: bytes) -> None:
        """Check the next entry of the topic."""
        number = int(value)
        if number == self.expected:
            self.expected += 1
        elif self._is_exact or number != self.expected - 1:
            raise Violation(f"{self.name} got {number} of {self.topic}, not {self.expected}")


async def read_nothing(writer: asyncio.StreamWriter, loop: NetworkLoop) -> None:
    """Read nothing for a while."""
    end_of(writer).pause_reading()
    await asyncio.sleep(loop.source.random() * 5)
    end_of(writer).resume_reading()


# --- Kafka ----------------------------------------------------------------------------------------


class KafkaPublisher(Publisher[Client]):
    """An idempotent producer with up to five requests in flight."""

    server = "kafka"

    def __init__(self, name: str, topic: str) -> None:
        super().__init__(name, topic)
        self._producer_id: int | None = None
        #: The first number and the number of records of each batch that is not acknowledged.
        self._pending: list[tuple[int, int]] = []
        self._next = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        return Client(reader, writer)

    async def _step(self, peer: Client, loop: NetworkLoop) -> None:
        source = loop.source
        if self._producer_id is None:
            answer = await peer.ask(
                INIT_PRODUCER_ID,
                4,
                transactional_id=None,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
            if not answer.error_code:
                self._producer_id = answer.producer_id
            return
        for _ in range(source.randint(0, _IN_FLIGHT - len(self._pending))):
            count = source.choice((1, 1, 3))
            self._pending.append((self._next, count))
            self._next += count
        for first, count in self._pending:
            values = [b"%d" % number for number in range(first, first + count)]
            batch = news(
                *values, producer_id=self._producer_id, producer_epoch=0, base_sequence=first
            )
            peer.send(PRODUCE, 9, transactional_id=None, **produce_fields(batch, topic=self.topic))
        if source.random() < 0.2:
            peer.send(API_VERSIONS, 3, client_software_name="model", client_software_version="1")
            loop.counts["other requests behind Kafka's produces"] += 1
        await self._receive(peer, loop)

    async def _receive(self, peer: Client, loop: NetworkLoop) -> None:
        has_failed = False
        for first, count in list(self._pending):
            part = only_partition(await peer.receive())
            code = int(part.error_code)
            if code in (0, _DUPLICATE) and not has_failed:
                if not code and part.base_offset != first:
                    raise Violation(f"{self.name}: {first} is at offset {part.base_offset}")
                self._pending.pop(0)
                self.acknowledged = first + count
                loop.counts["kafka entries acknowledged"] += count
            elif code == _NOT_IN_ORDER and not has_failed:
                raise Violation(f"{self.name}: {first} is said to be out of order")
            else:
                has_failed = True
                loop.counts["kafka entries refused"] += count
        if peer._sent:  # the answer to the request behind them
            await peer.receive()


class KafkaReader(Reader[Client]):
    """Fetches, and waits for new records now and then."""

    server = "kafka"

    def __init__(self, name: str, topic: str, *, is_exact: bool = True) -> None:
        super().__init__(name, topic, is_exact=is_exact)
        self._offset = 0

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        return Client(reader, writer)

    async def _step(self, peer: Client, loop: NetworkLoop) -> None:
        # The offset is the number of records read; a line publisher's topic may have more of them.
        fields = fetch_fields(
            self._offset,
            topic=self.topic,
            wait_ms=loop.source.choice((0, 20, 500)),
            partition_bytes=loop.source.choice((1, 100, 10_000)),
        )
        count = loop.source.choice((1, 1, 4))
        for _ in range(count):
            peer.send(FETCH, 11, **fetch_without_session(fields))
        if loop.source.random() < 0.1:
            await read_nothing(peer.writer, loop)
        for _ in range(count):
            self._on_fetched(only_partition(await peer.receive()), loop)

    def _on_fetched(self, part: Any, loop: NetworkLoop) -> None:
        if int(part.error_code):
            loop.counts["kafka fetches refused"] += 1
            return
        for offset, value in records_of(part):
            if offset == self._offset:
                self._got(value)
                self._offset += 1
                loop.counts["kafka entries fetched"] += 1


def records_of(part: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets and values of a fetched partition, also before the requested offset."""
    for batch in batches_of([part.records or b""]):
        for record in DefaultRecordBatch(bytearray(batch.view)):
            yield record.offset, record.value


def fetch_without_session(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Fetch of version 11."""
    return fields | {"session_id": 0, "session_epoch": -1, "rack_id": ""}


# --- HTTP -----------------------------------------------------------------------------------------


class HttpClient(ProtocolClient[HttpPeer]):
    """A client of the queue, which gives it an id when it registers."""

    server = "http"
    role: str
    id = ""

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpPeer:
        return HttpPeer(reader, writer)


class HttpPublisher(HttpClient, Publisher[HttpPeer]):
    """A producer of the queue that numbers its messages."""

    role = "producer"

    async def _step(self, peer: HttpPeer, loop: NetworkLoop) -> None:
        number = self.acknowledged
        answer = await peer.post(
            "/producer/produce",
            {
                "topic": self.topic,
                "producer_id": self.id,
                "message": str(number),
                "sequence": number + 1,
            },
        )
        if _is_success(answer, loop):
            self.acknowledged += 1
            loop.counts["http entries acknowledged"] += 1


class HttpReader(HttpClient, Reader[HttpPeer]):
    """A consumer of the queue that names the last message it has received."""

    role = "consumer"
    _last_id = ""

    async def _step(self, peer: HttpPeer, loop: NetworkLoop) -> None:
        target = f"/consumer/consume?topic={self.topic}&consumer_id={self.id}"
        # Several requests at once: each gets the same message, since each names the one before it.
        count = loop.source.choice((1, 1, 2, 5))
        for _ in range(count):
            peer.send(_get(f"{target}&last_id={self._last_id}"))
        others = loop.source.choices(TOPICS, k=loop.source.choice((0, 0, 3)))
        for other in others:
            peer.send(_get(f"/v1/topics/{other}"))
        if loop.source.random() < 0.1:
            await read_nothing(peer.writer, loop)
        answers = [await peer.receive() for _ in range(count)]
        for other in others:
            answer = await peer.receive()
            if answer.status == 200 and answer.json["name"] != other:
                raise Violation(f"{self.name} asked for {other} and got {answer.json['name']}")
        messages = [answer.json for answer in answers if _is_success(answer, loop)]
        if len({message["message_id"] for message in messages}) > 1:
            raise Violation(f"{self.name} got different messages after {self._last_id!r}")
        if messages:
            self._got(messages[0]["message"].encode())
            self._last_id = messages[0]["message_id"]
            loop.counts["http entries consumed"] += 1


def _get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


#: The codes of errors that a closing broker, a failed disk or a bound explains.
EXPLAINED: Final = {
    *("empty", "closing", "store_read_only", "outcome_unknown", "limit_reached", "storage_error"),
}


def _is_success(answer: Answer, loop: NetworkLoop) -> bool:
    """Return whether it succeeded. Raise Violation if it failed in a way that nothing explains."""
    if answer.status == 200:
        return True
    code = json.loads(answer.body).get("code")
    if code not in EXPLAINED:
        raise Violation(f"HTTP answered {answer}")
    loop.counts[f"http answers {code}"] += 1
    return False


# --- ZeroMQ ---------------------------------------------------------------------------------------


class ZmqClient(ProtocolClient[Raw]):
    server = "zmq"

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Raw:
        return await Raw(reader, writer).hello()

    async def _ask(self, peer: Raw, words: str) -> list[str]:
        reply = (await peer.ask(words.encode())).decode().split(" ")
        verb = words.split(" ", maxsplit=1)[0]
        if reply[0] not in (verb, "ERR"):
            raise Violation(f"{self.name} asked {words!r} and got {reply}")
        return reply


class ZmqPublisher(ZmqClient, Publisher[Raw]):
    async def _step(self, peer: Raw, loop: NetworkLoop) -> None:
        number = self.acknowledged
        reply = await self._ask(peer, f"PUTN {self.name} {self.topic} {number} {number}")
        if reply[0] == "ERR":
            loop.counts[f"zmq answers {reply[1]}"] += 1
            return
        if reply != ["PUTN", self.name, self.topic, str(number)]:
            raise Violation(f"{self.name} put {number} and got {reply}")
        self.acknowledged += 1
        loop.counts["zmq entries acknowledged"] += 1


class ZmqReader(ZmqClient, Reader[Raw]):
    _last_id = "-1"

    async def _step(self, peer: Raw, loop: NetworkLoop) -> None:
        reply = await self._ask(peer, f"GET {self.name} {self.topic} {self._last_id}")
        if reply[0] == "ERR":
            loop.counts[f"zmq answers {reply[1]}"] += 1
            return
        verb, name, topic, message_id, content = reply
        if (name, topic) != (self.name, self.topic):
            raise Violation(f"{self.name} got {reply}, which is for {name} and {topic}")
        self._got(content.encode())
        self._last_id = message_id
        loop.counts["zmq entries received"] += 1


# --- line -----------------------------------------------------------------------------------------


class LineClient(ProtocolClient[LinePeer]):
    """A peer over TCP or a Unix socket, whichever the broker has, or over pipes."""

    server = "line"

    #: Closes the pipes of the last connection.
    _leaving: asyncio.Task[None] | None = None

    async def _connect(
        self, servers: Listeners
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert isinstance(servers, Servers)
        # A new connection of the same name would end the last one.
        if self._leaving is not None and self._life_loop.source.random() < 0.7:
            await self._leaving
        if not servers.is_closing() and self._life_loop.source.random() < 0.4:
            return await servers.attach_pipes(self.name, self._life_loop)
        return await super()._connect(servers)

    def hang_up(self, *, is_reset: bool = False) -> None:
        """Disconnect. Over pipes, sometimes close one of them before the other."""
        writer = self._writer
        if writer is None or not isinstance(writer.transport, PipePair) or is_reset:
            super().hang_up(is_reset=is_reset)
            return
        leaving = leave_pipes(writer, self._life_loop)
        self.forget_connection()
        self._leaving = self._life_loop.create_task(leaving, name=f"{self.name} closes its pipes")

    def forget_connection(self) -> None:
        super().forget_connection()
        self._leaving = None


class LinePublisher(LineClient, Publisher[LinePeer]):
    is_exact = False

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> LinePeer:
        return await _introduce_line(LinePeer(reader, writer), "pub", self.name, self.topic)

    async def _step(self, peer: LinePeer, loop: NetworkLoop) -> None:
        # It cannot repeat an entry without publishing it twice, so it also does that on purpose:
        # the second entry arrives while the broker is busy with the first.
        copies = loop.source.choice((1, 1, 1, 3))
        for _ in range(copies):
            peer.say(f"topic {self.topic} [{self.acknowledged}]")
        answers = [await peer.hears() for _ in range(copies)]
        for answer in answers:
            if answer in ("", "terminate"):
                raise ConnectionResetError
            if answer != "successful" and answer.split(" ")[0] not in ("retry", "reject"):
                raise Violation(f"{self.name} got {answer!r}")
        if "successful" in answers:
            self.acknowledged += 1
            loop.counts["line entries acknowledged"] += 1
        else:
            loop.counts["line entries refused"] += 1
        if loop.source.random() < 0.1:
            raise ConnectionResetError


class LineSubscriber(LineClient):
    """Answers entries. They come for the first time in the order of their numbers. An entry whose
    answer has reached the broker does not come again while the broker lives; the next entry on the
    connection shows that it has."""

    waits = True

    def __init__(self, name: str, topic: str, *, is_exact: bool) -> None:
        super().__init__(name, topic)
        self.received: set[int] = set()
        self._is_exact = is_exact
        self._answered: set[int] = set()
        self._last: int | None = None
        self._greatest = -1

    def forget_connection(self) -> None:
        super().forget_connection()
        self._last = None

    def broker_restarted(self) -> None:
        self._answered.clear()

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> LinePeer:
        return await _introduce_line(LinePeer(reader, writer), "sub", self.name, self.topic)

    async def _step(self, peer: LinePeer, loop: NetworkLoop) -> None:
        line = await peer.hears()
        if line in ("", "terminate"):
            raise ConnectionResetError
        begin, end = f"topic {self.topic} [", "]"
        if not (line.startswith(begin) and line.endswith(end)):
            raise Violation(f"{self.name} got {line!r}")
        number = int(line[len(begin) : -len(end)])
        if self._last is not None:
            self._answered.add(self._last)
        if self._is_exact and number in self._answered:
            raise Violation(f"{self.name} got {number} again, which it has answered")
        if number not in self.received and number < self._greatest:
            raise Violation(f"{self.name} got {number} for the first time after {self._greatest}")
        self._last = number
        self._greatest = max(self._greatest, number)
        self.received.add(number)
        loop.counts["line entries received"] += 1
        if loop.source.random() < 0.02:  # it disconnects without an answer
            raise ConnectionResetError
        peer.say("successful")


async def _introduce_line(peer: LinePeer, role: str, name: str, topic: str) -> LinePeer:
    for line in (f"{role} {name} connect", "end", f"{role} {name} topic {topic}", "end"):
        answer = await peer.ask(line)
        if answer != "accept":
            # A name that another connection still has, a broker that closes, a disk that is full.
            if answer and answer.split(" ")[0] not in ("reject", "terminate"):
                raise Violation(f"{name} said {line!r} and got {answer!r}")
            raise ConnectionResetError
    return peer
