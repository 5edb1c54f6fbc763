"""Publishers of the proxy, and SUB sockets without acknowledgements, as models.

`ProxyPublisher` publishes numbers with acknowledgements: the record at offset n is the number n.
`PubSocket` gets no answers. Of what it has sent on one connection, the log has a prefix, in order
and once. `SubSocket` gets what is published after its subscription, without gaps while it keeps up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count

from quackmq.errors import QuackError
from quackmq.protocols.zmq.codec.proxy_language import LastPublished, Publish
from tests.kit.waiting import soon
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, end_of
from tests.simulation.protocol_clients import ProtocolClient, Publisher, read_nothing
from tests.simulation.proxy_audit import check_bounds
from tests.simulation.proxy_peers import Command, ProxyServers, ZmtpPeer, note_refusal

_PADDING = (0, 0, 0, 60, 700)


def pad(text: str, loop: NetworkLoop) -> bytes:
    """Return a content that begins with `text`; some contents are large."""
    return text.encode() + b" " * loop.source.choice(_PADDING)


class ProxyPublisher(Publisher[ZmtpPeer]):
    """Publishes through the proxy's REP socket. After a lost connection it asks what was stored."""

    server = "proxy"
    #: The numbers below this one were sent at least once.
    attempted = 0

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        peer = await ZmtpPeer(reader, writer).introduce(b"REQ")
        last = await peer.ask(LastPublished(self.name, self.topic))
        stored = 0 if last is None else last + 1
        if not self.acknowledged <= stored <= self.attempted:
            raise Violation(
                f"{self.name} has {self.acknowledged} acknowledged and {self.attempted} sent, and "
                f"{stored} are said to be stored"
            )
        return peer

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        number = self.acknowledged
        self.attempted = number + 1
        try:
            await peer.ask(Publish(self.name, self.topic, number, pad(str(number), loop)))
        except QuackError as error:
            note_refusal(error, loop)
            return
        self.acknowledged += 1
        loop.counts["proxy entries acknowledged"] += 1

    @property
    def is_waiting(self) -> bool:
        return self.attempted > self.acknowledged


class PubSocket(ProtocolClient[ZmtpPeer]):
    """Sends `CONNECTION.NUMBER`, with numbers from 0 on each connection."""

    server = "xsub"
    #: The servers of this life.
    servers: ProxyServers

    def __init__(self, name: str, topic: str) -> None:
        super().__init__(name, topic)
        #: How many messages each connection has sent.
        self.sent: list[int] = []
        #: The connections of this life that the broker has read to their end.
        self._read_to_end: set[int] = set()
        #: The connections of earlier lives whose messages must all be there.
        self.complete: set[int] = set()
        #: The connections during which the disk may have failed.
        self.with_gaps: set[int] = set()
        self._first_of_life = 0
        #: Whether it ends each connection in good order.
        self.is_orderly = False

    def broker_restarted(self, *, is_closed: bool, has_failed: bool) -> None:
        """The last life has ended: by closing, or by a crash, perhaps with a failing disk."""
        if has_failed:
            self.with_gaps |= set(range(self._first_of_life, len(self.sent)))
        elif is_closed:
            self.complete |= self._read_to_end
        self._read_to_end.clear()
        self._first_of_life = len(self.sent)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        peer = await ZmtpPeer(reader, writer).introduce(b"PUB")
        self.sent.append(0)
        return peer

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        connection = len(self.sent) - 1
        for _ in range(loop.source.choice((1, 1, 5, 20))):
            peer.send(self.topic.encode(), pad(f"{connection}.{self.sent[-1]}", loop))
            self.sent[-1] += 1
            loop.counts["messages of PUB sockets"] += 1
        if self.is_orderly or loop.source.random() < 0.1:
            await self._end(peer, loop)

    async def _end(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        """End the connection in good order: the broker closes it after it has read everything."""
        peer.writer.write_eof()
        while await soon(peer.reader.read(1_000)):
            continue
        # A server that drains closes connections that it has not read to their end.
        if not self.servers.xsub.is_closing:
            self._read_to_end.add(len(self.sent) - 1)
            loop.counts["PUB sockets that ended in good order"] += 1
        self.hang_up()

    def check(self, bodies: list[tuple[int, bytes]]) -> None:
        """Check the messages in the log, each with its partition, in the order of the log. All are
        of this publisher."""
        numbers: dict[int, list[int]] = {}
        last: dict[tuple[int, int], int] = {}
        for partition, body in bodies:
            connection, number = map(int, body.split(b"."))
            numbers.setdefault(connection, []).append(number)
            if number < last.get((partition, connection), 0):
                raise Violation(f"{self.name}: {body!r} comes after a later message")
            last[partition, connection] = number
        for connection, found in numbers.items():
            if len(set(found)) < len(found):
                raise Violation(f"{self.name}: a message of connection {connection} is there twice")
            if connection not in self.with_gaps and set(found) != set(range(len(found))):
                raise Violation(f"{self.name}: connection {connection} has gaps: {sorted(found)}")
            if not set(found) <= set(range(self.sent[connection])):
                raise Violation(f"{self.name} has not sent all of {found}")
        for connection in self.complete - self.with_gaps:
            if len(numbers.get(connection, ())) != self.sent[connection]:
                raise Violation(
                    f"{self.name}: {self.sent[connection]} messages were read on connection "
                    f"{connection}, and only {numbers.get(connection)} are there"
                )


class SubSocket(ProtocolClient[ZmtpPeer]):
    """Subscribes to prefixes of topics, changes its subscriptions, and checks what it gets.

    A PING behind a change of subscriptions tells when the broker has carried out the change: the
    PONG comes behind everything that was sent before. From then on, the next entry of a topic is
    one that was not yet sent by its publisher, or an earlier one; the others follow without a gap,
    unless the broker has counted messages that it dropped.
    """

    server = "xpub"
    waits = True
    #: The servers of this life.
    servers: ProxyServers

    def __init__(self, name: str, topic: str, publishers: Mapping[str, ProxyPublisher]) -> None:
        """No body in `topic` occurs twice. `publishers` are those whose numbers it checks, by
        topic."""
        super().__init__(name, topic)
        self._publishers = publishers
        self._prefixes: dict[bytes, None] = {}
        #: The last number of each topic, over all connections.
        self._last: dict[str, int] = {}
        #: The number of a topic that must come next, or an earlier one if it is the first.
        self._next: dict[str, int] = {}
        self._is_first: set[str] = set()
        #: Changes of subscriptions are numbered. The last one of each topic, and the last one that
        #: the broker has carried out.
        self._changes = count(1)
        self._changed: dict[str, int] = {}
        self._carried_out = 0
        self._seen: set[bytes] = set()
        self._dropped = 0

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        self._dropped = self.servers.xpub.dropped.count
        self._prefixes.clear()
        self._next.clear()
        self._changed.clear()
        peer = await ZmtpPeer(reader, writer).introduce(b"SUB")
        self._change(peer, b"by-", is_message=False)
        return peer

    def _change_at_random(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        prefixes = [*self._prefixes, b"by-", b"by-publish", b"", b"nothing"]
        self._change(peer, loop.source.choice(prefixes), is_message=loop.source.random() < 0.5)

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        source = loop.source
        try:
            received = await peer.receive(wait_seconds=source.choice((0.1, 1.0, 10.0)))
        except TimeoutError:
            self._change_at_random(peer, loop)
            return
        check_bounds(self.servers)
        if isinstance(received, Command):
            self._on_command(received)
        else:
            self._on_message(received, loop)
        if source.random() < 0.1:
            self._change_at_random(peer, loop)
        if source.random() < 0.02:
            await read_nothing(peer.writer, loop)

    def _change(self, peer: ZmtpPeer, prefix: bytes, *, is_message: bool) -> None:
        """Subscribe to a prefix, or cancel that; send a PING behind it."""
        before = {topic for topic in self._publishers if self._wants(topic)}
        is_new = prefix not in self._prefixes
        if is_new:
            self._prefixes[prefix] = None
        else:
            del self._prefixes[prefix]
        if is_message:
            peer.send((b"\x01" if is_new else b"\x00") + prefix)
        else:
            peer.send_command(b"SUBSCRIBE" if is_new else b"CANCEL", prefix)
        number = next(self._changes)
        peer.send_command(b"PING", b"\0\0%d" % number)
        for topic in before ^ {topic for topic in self._publishers if self._wants(topic)}:
            self._changed[topic] = number
            self._next.pop(topic, None)

    def _wants(self, topic: str) -> bool:
        return any(topic.encode().startswith(prefix) for prefix in self._prefixes)

    def _on_command(self, received: Command) -> None:
        if received.name != b"PONG":
            raise Violation(f"{self.name} got {received}")
        self._carried_out = int(received.data)
        for topic, number in list(self._changed.items()):
            if number <= self._carried_out:
                del self._changed[topic]
                if self._wants(topic):
                    self._next[topic] = self._publishers[topic].attempted
                    self._is_first.add(topic)

    def _on_message(self, frames: list[bytes], loop: NetworkLoop) -> None:
        if len(frames) != 2:
            raise Violation(f"{self.name} got {frames}")
        topic, body = frames[0].decode(), frames[1]
        if topic not in self._changed and topic in self._publishers and not self._wants(topic):
            raise Violation(f"{self.name} got {body!r} of {topic} after it has cancelled that")
        loop.counts["messages of SUB sockets"] += 1
        if topic in self._publishers:
            self._on_number(topic, int(body))
        elif topic == self.topic:
            if body in self._seen:
                raise Violation(f"{self.name} got {body!r} of {topic} twice")
            self._seen.add(body)

    def _on_number(self, topic: str, number: int) -> None:
        if number <= self._last.get(topic, -1):
            raise Violation(f"{self.name} got {number} of {topic} after {self._last[topic]}")
        self._last[topic] = number
        expected = self._next.get(topic)
        if expected is None:
            return
        has_lost = self.servers.xpub.dropped.count > self._dropped
        is_right = number <= expected if topic in self._is_first else number == expected
        if not is_right and not has_lost:
            raise Violation(f"{self.name} got {number} of {topic} and not {expected}")
        self._next[topic] = number + 1
        self._is_first.discard(topic)


class DeafSubSocket(ProtocolClient[ZmtpPeer]):
    """Subscribes to topics with many messages, and reads nothing for long."""

    server = "xpub"
    waits = True

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> ZmtpPeer:
        peer = await ZmtpPeer(reader, writer).introduce(b"SUB")
        peer.send_command(b"SUBSCRIBE", b"by-")
        return peer

    async def _step(self, peer: ZmtpPeer, loop: NetworkLoop) -> None:
        end_of(peer.writer).pause_reading()
        await asyncio.sleep(loop.source.choice((5.0, 50.0)))
        loop.counts["SUB sockets that read nothing"] += 1
        self.hang_up(is_reset=loop.source.random() < 0.5)
