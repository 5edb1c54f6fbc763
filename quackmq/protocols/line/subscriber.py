"""The proxy of one subscriber: brings it the entries of its topics, one at a time, in turns.

It goes round the topics that may have something. An entry is asked of the broker when it is to be
sent and not before, so that nothing is sent that has got old meanwhile, and the newest goes first.
Then comes the answer, which acknowledges the entry, and it is the next topic's turn. What is new is
in memory and is sent in the same step; only what has to be read from disk takes a task, so another
subscriber's silence, or its old news, is nobody else's.

An entry longer than a line may be cannot be sent. It is left out: acknowledged, counted, and named
in the log, since waiting with it would hold up all that come after it.

A name is used by one connection at a time. Whoever connects later takes over, since mostly it is
the same subscriber, whose former connection nobody has missed yet.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from quackmq.broker import Broker, Caller, Channel, LeasedEntry, Start
from quackmq.errors import BrokerClosing, NotFound, RecordTooLarge, StorageError
from quackmq.protocols.line import limits
from quackmq.protocols.line.codec import Entry, check_size, encode
from quackmq.protocols.line.records import End
from quackmq.protocols.line.settings import LineSettings

log = logging.getLogger(__name__)


class KeptLines:
    """Entries as lines, each encoded once for all subscribers that are in step. By message id,
    which no other entry ever has."""

    __slots__ = ("_entry_bytes", "_lines")

    def __init__(self, entry_bytes: int) -> None:
        self._entry_bytes = entry_bytes
        self._lines: dict[str, tuple[Entry, bytes]] = {}

    def of(self, topic_name: str, delivery: LeasedEntry) -> tuple[Entry, bytes]:
        """RecordTooLarge, and then nothing is encoded or kept."""
        kept = self._lines.get(delivery.id)
        if kept is None:
            entry = Entry(topic_name, delivery.record.value or b"")
            check_size(len(entry.content), self._entry_bytes)
            kept = self._lines[delivery.id] = entry, encode(entry)
            if len(self._lines) > limits.LINE_KEPT_LINES:
                del self._lines[next(iter(self._lines))]
        return kept


class Door(Protocol):
    """What a subscriber needs of its door."""

    broker: Broker
    settings: LineSettings
    lines: KeptLines

    async def take_over(self, name: str, connection: Any) -> None: ...

    def give_up(self, name: str, connection: Any) -> None: ...


class Peer(Protocol):
    """And of its connection."""

    @property
    def caller(self) -> Caller: ...

    def listens(self) -> bool: ...

    def deliver(self, entry: Entry, line: bytes) -> None: ...

    def end(self, end: End, detail: str = "") -> None: ...


class _Topic:
    __slots__ = ("channel", "name", "trouble")

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.channel = channel
        #: Why its entries could not be read when it was last tried.
        self.trouble = ""


class Subscriber:
    def __init__(self, door: Door, peer: Peer, name: str) -> None:
        self._door = door
        self._lines = door.lines
        self._peer = peer
        self._name = name
        self._topics: dict[str, _Topic] = {}
        #: Those that may have something for us, the one whose turn it is first.
        self._hopeful: dict[str, None] = {}
        #: What was sent and not answered.
        self._held: tuple[_Topic, LeasedEntry] | None = None
        self._reading: asyncio.Task[None] | None = None
        #: Those that are gone, to be closed with the others.
        self._dropped: list[_Topic] = []
        self._closing: asyncio.Task[None] | None = None
        self._entries = 0
        self._left_out = 0

    def counts(self) -> dict[str, int]:
        skipped = sum(topic.channel.counts().skipped for topic in self._topics.values())
        return {"entries": self._entries, "skipped": skipped, "left_out": self._left_out}

    # --- what the connection calls ----------------------------------------------------------

    async def choose(self, topic_name: str) -> None:
        """A durable subscription; one that is there stays as it is."""
        broker, settings = self._door.broker, self._door.settings
        topic = broker.topics().get(topic_name)
        start: Start = "end"
        if settings.reading == "live" and topic is not None:
            # Who is new gets what is live. A topic in which nothing gets old has no such part:
            # there it begins with what comes from now on.
            policy = topic.policy
            if policy.live_for_ms is not None or policy.live_entries is not None:
                start = "beginning"
        await broker.pushing.subscribe(
            self._peer.caller, self._name, topic_name, settings.terms, start
        )

    async def begin(self, topic_names: Sequence[str]) -> None:
        self._check_there()
        await self._door.take_over(self._name, self._peer)
        try:
            for name in topic_names:
                await self._open(name)
        except BaseException:
            await self._close_channels()
            raise

    def look(self) -> None:
        """Send the next entry, if there is one and the peer listens."""
        try:
            while self._hopeful and self._reading is None and self._peer.listens():
                self._look_at(next(iter(self._hopeful)))
        except BrokerClosing:
            self._peer.end(End.CLOSED)
        except Exception:
            log.exception("sub %s: its entries cannot be brought", self._name)
            self._peer.end(End.FAILED)

    def answered(self) -> None:
        """The subscriber has the entry that it was sent."""
        assert self._held is not None, "it was sent one"
        topic, delivery = self._held
        self._held = None
        self._entries += 1
        topic.channel.ack(delivery.partition, delivery.offset)
        if self._hopeful:
            self.look()

    async def close(self) -> None:
        """Give back what is not acknowledged. The subscription stays."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    # --- inside -----------------------------------------------------------------------------

    async def _open(self, name: str) -> None:
        on_change = partial(self._on_change, name)
        pushing = self._door.broker.pushing
        channel = await pushing.open(self._peer.caller, self._name, name, on_change)
        if self._closing is not None:
            await channel.close()
        self._check_there()
        self._topics[name] = _Topic(name, channel)
        self._hopeful[name] = None

    def _check_there(self) -> None:
        if self._closing is not None:
            raise BrokerClosing("the subscriber has gone meanwhile")

    def _on_change(self, name: str) -> None:
        self._hopeful[name] = None
        if self._held is None:
            self.look()

    def _look_at(self, name: str) -> None:
        """Send the next entry of a topic, if there is one."""
        del self._hopeful[name]
        topic = self._topics.get(name)
        if topic is None:
            return
        try:
            found = topic.channel.take_now()
        except NotFound as error:
            self._drop(topic, error)
            return
        if found is None:
            self._reading = asyncio.get_running_loop().create_task(self._read(topic))
            self._reading.add_done_callback(self._has_read)
        elif found:
            self._send(topic, found[0])

    async def _read(self, topic: _Topic) -> None:
        """The same, of what is not in memory."""
        try:
            found = await topic.channel.take()
        except NotFound as error:
            self._drop(topic, error)
        except StorageError as error:
            # The channel tells when it is to be tried again, which may go on for ever.
            if topic.trouble != str(error):
                topic.trouble = str(error)
                log.warning("sub %s, topic %s: %s", self._name, topic.name, error)
        else:
            topic.trouble = ""
            if found and self._peer.listens():
                self._send(topic, found[0])
            elif found:  # it has said something meanwhile
                topic.channel.nack(found[0])
                self._hopeful[topic.name] = None

    def _has_read(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if reading.cancelled():
            return
        error = reading.exception()
        if isinstance(error, BrokerClosing):
            self._peer.end(End.CLOSED)
        elif error is not None:
            log.error("sub %s: its entries cannot be brought", self._name, exc_info=error)
            self._peer.end(End.FAILED)
        else:
            self.look()

    def _send(self, topic: _Topic, delivery: LeasedEntry) -> None:
        if not topic.channel.is_idle:
            self._hopeful[topic.name] = None  # all others come before it
        self._held = topic, delivery
        try:
            self._peer.deliver(*self._lines.of(topic.name, delivery))
        except RecordTooLarge as error:
            self._held = None
            self._left_out += 1
            place = f"topic {topic.name}, partition {delivery.partition}, offset {delivery.offset}"
            # There may be as many of them as entries.
            level = logging.WARNING if self._left_out == 1 else logging.DEBUG
            log.log(level, "left out for sub %s: %s: %s", self._name, place, error)
            topic.channel.ack(delivery.partition, delivery.offset)

    def _drop(self, topic: _Topic, error: NotFound) -> None:
        log.warning("sub %s is not served topic %s any more: %s", self._name, topic.name, error)
        del self._topics[topic.name]
        self._dropped.append(topic)

    async def _close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._close_channels()
        self._door.give_up(self._name, self._peer)

    async def _close_channels(self) -> None:
        topics = [*self._topics.values(), *self._dropped]
        self._topics = {}
        for topic in topics:
            await topic.channel.close()
