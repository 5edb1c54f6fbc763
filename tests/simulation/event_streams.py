"""Readers of Server-Sent Events, and a publisher to several partitions of a topic.

A reader remembers only the id of its last event, and sends it as `Last-Event-ID` when it connects
again. Then it gets each message once and in the order of its partition. A stream of all partitions
has ids that hold the position in each of them.

A stream whose connection is not reset must end properly, by its last chunk: the broker closes. The
decoder reads whatever has arrived, so a reader can give up waiting at any byte and continue later.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, NamedTuple

from tests.protocols.http.peers import Answer, request
from tests.protocols.http.peers import Peer as HttpPeer
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, end_of
from tests.simulation.protocol_clients import ProtocolClient, Publisher, Reader

PARTITIONED_TOPIC: Final = "by-partition"
PARTITIONS: Final = 3
#: Failures that a reader or publisher must expect: the disk fails, or the broker is busy or closes.
_EXPECTED_FAILURES: Final = (
    *("closing", "store_read_only", "outcome_unknown", "limit_reached", "storage_error"),
)


class Event(NamedTuple):
    """One event. Its type is "" for a message."""

    id: str
    type: str
    data: str


class StreamEnded(ConnectionError):
    """The broker has ended the stream properly."""


class EventStream:
    """The response to one request for events."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._peer = HttpPeer(reader, writer)
        self._is_chunked = True
        self._chunked = bytearray()
        #: Bytes of the body that do not make up a whole event yet.
        self._body = bytearray()
        self._has_last_chunk = False
        self._events: list[Event] = []

    async def begin(self, target: str, version: str = "1.1", **headers: str) -> int:
        """Send the request and return the status. The events follow if it is 200."""
        self.writer.write(request("GET", target, version=version, **headers))
        status, answered = await self._peer.receive_head()
        self._is_chunked = answered.get("transfer-encoding") == "chunked"
        if status == 200 and self._is_chunked != (version == "1.1"):
            raise Violation(f"a stream for HTTP/{version} came with {answered}")
        return status

    async def next_event(self, wait_s: float) -> Event | None:
        """Return the next event, or None if the time is over. Comments are no events. Raise
        StreamEnded after the last event, and Violation if the stream ends without its last chunk.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self._events:
                    await self.read_some()
        except TimeoutError:
            return None
        return self._events.pop(0)

    async def read_some(self) -> None:
        """Wait for more bytes and decode them."""
        if self._has_last_chunk:
            raise StreamEnded
        data = await self._reader.read(65_536)
        if not data:
            if self._is_chunked:
                raise Violation("an event stream ended without its last chunk")
            raise StreamEnded
        if self._is_chunked:
            self._chunked += data
            self._decode_chunks()
        else:
            self._body += data
        *events, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        self._events += filter(None, map(_parse_event, events))

    def _decode_chunks(self) -> None:
        """Move the data of all chunks that have arrived whole to the body."""
        while not self._has_last_chunk:
            size_text, line_end, rest = self._chunked.partition(b"\r\n")
            size = int(size_text, 16) if line_end else 0
            if not line_end or len(rest) < size + 2:
                return
            if rest[size : size + 2] != b"\r\n":
                raise Violation(
                    f"a chunk of {size} bytes ends with {bytes(rest[size : size + 2])!r}"
                )
            self._body += rest[:size]
            self._chunked = rest[size + 2 :]
            self._has_last_chunk = not size


def _parse_event(text: bytes) -> Event | None:
    """Return an event; None for a comment, and for an event that only sets the retry time."""
    fields: dict[str, str] = {}
    for line in text.decode().split("\n"):
        name, colon, value = line.partition(":")
        if not colon:
            raise Violation(f"an event has the line {line!r}")
        fields[name] = value.removeprefix(" ")
    if "data" not in fields:
        return None
    return Event(fields.get("id", ""), fields.get("event", ""), fields["data"])


class EventReader(Reader[EventStream]):
    """Follows all partitions of a topic from its beginning."""

    server = "http"

    def __init__(self, name: str, topic: str, partitions: int = 1) -> None:
        super().__init__(name, topic)
        self._last_event_id = ""
        #: The next number of each partition. A partitioned publisher numbers over all of them.
        self._next_numbers = list(range(partitions))

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> EventStream:
        source = self._life_loop.source
        stream = EventStream(reader, writer)
        target, version = f"/v1/topics/{self.topic}/events", source.choice(("1.1", "1.1", "1.0"))
        if self._last_event_id:
            # The id counts, and not the start position beside it.
            target += source.choice(("", "?start=end", "?start=beginning"))
            status = await stream.begin(target, version, last_event_id=self._last_event_id)
        else:
            target += source.choice(("?start=beginning", "?offset=0"))
            status = await stream.begin(target, version)
        if status in (429, 503):
            self._life_loop.counts["event streams refused"] += 1
            raise ConnectionResetError
        if status != 200:
            raise Violation(f"{self.name} asked for {target} and got {status}")
        if self._last_event_id:
            self._life_loop.counts["event streams resumed"] += 1
        return stream

    async def _step(self, peer: EventStream, loop: NetworkLoop) -> None:
        if loop.source.random() < 0.03:
            await _read_nothing(peer.writer, loop)
        try:
            event = await peer.next_event(loop.source.choice((0.01, 0.1, 3.0)))
        except StreamEnded:
            loop.counts["event streams that ended properly"] += 1
            raise
        if event is None:
            return
        if event.type:
            self._check_end(event)
            loop.counts["event streams that ended with an error"] += 1
            raise ConnectionResetError
        self._last_event_id = event.id
        message = json.loads(event.data)
        self._got_in(message["partition"], message["value"])
        loop.counts["events received"] += 1
        if loop.source.random() < 0.02:  # it disconnects and does not know what was on its way
            raise ConnectionResetError

    def _got_in(self, partition: int, value: str) -> None:
        """Check the next message of a partition."""
        expected = self._next_numbers[partition]
        if value != str(expected):
            raise Violation(f"{self.name} got {value} in partition {partition}, not {expected}")
        self._next_numbers[partition] += len(self._next_numbers)
        self.expected += 1

    def _check_end(self, event: Event) -> None:
        """Nobody deletes topics, so only the disk can end a stream early."""
        if event.type != "end" or json.loads(event.data)["code"] not in _EXPECTED_FAILURES:
            raise Violation(f"{self.name} got {event}")


async def _read_nothing(writer: asyncio.StreamWriter, loop: NetworkLoop) -> None:
    """Read nothing for a while, sometimes for longer than the broker waits."""
    end_of(writer).pause_reading()
    await asyncio.sleep(loop.source.choice((0.5, 0.5, 3.0, 35.0)))
    end_of(writer).resume_reading()


class PartitionedPublisher(Publisher[HttpPeer], ProtocolClient[HttpPeer]):
    """Publishes to the partitions of its topic in turn, under its name and with a sequence."""

    server = "http"
    partitions = PARTITIONS

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpPeer:
        return HttpPeer(reader, writer)

    async def _step(self, peer: HttpPeer, loop: NetworkLoop) -> None:
        number = self.acknowledged
        answer = await peer.post(
            f"/v1/topics/{self.topic}/messages?publisher={self.name}&sequence={number}"
            f"&partition={number % self.partitions}",
            {"value": str(number)},
        )
        if answer.status not in (200, 201):
            _check_failure(answer)
            loop.counts["numbered http entries refused"] += 1
            return
        self._check_position(answer.json, number)
        self.acknowledged += 1
        loop.counts["numbered http entries acknowledged"] += 1

    def _check_position(self, fields: dict[str, Any], number: int) -> None:
        """A repeat may have no position, because the broker remembers only some of them."""
        expected = (number % self.partitions, number // self.partitions)
        for message in fields["messages"]:
            if (message["partition"], message["offset"]) != expected:
                raise Violation(f"{self.name} put {number} and got {fields}")


def _check_failure(answer: Answer) -> None:
    if json.loads(answer.body).get("code") not in _EXPECTED_FAILURES:
        raise Violation(f"HTTP answered {answer}")
