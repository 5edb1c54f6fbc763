"""Deliver the entries of a subscriber's topics to it, one at a time.

The topics take turns (`turns.py`). The subscriber leases an entry from the broker only when it can
be sent. So no entry becomes too old while it waits. The answer acknowledges the entry; then comes
the next topic. A new entry is in memory and is sent in the same step. A task is needed only to read
an entry from disk. So a subscriber that is silent or far behind delays no other.

`LineSettings.reading` says in which order the entries of a topic come. An entry that was sent to an
earlier connection and not answered comes first, before the entries of all topics.

An entry that is longer than a line may be cannot be sent. It is skipped: acknowledged, counted and
logged. Waiting would block all later entries.

Only one connection at a time may use a subscriber's name. A new connection replaces the old one:
usually it is the same subscriber, whose old connection was not yet detected as broken.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from quackmq.broker import Broker, Caller, Channel, LeasedEntry, Start, TopicQueue
from quackmq.errors import BrokerClosing, NotFound, RecordTooLarge, StorageError
from quackmq.protocols.line import limits
from quackmq.protocols.line.codec.messages import Entry, check_size, encode
from quackmq.protocols.line.codec.polling import (
    EntryAnswer,
    GetEntry,
    NoEntry,
    NumberedEntry,
    publisher_word,
)
from quackmq.protocols.line.records import End
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.turns import Turns

log = logging.getLogger(__name__)


class EncodedLines:
    """A cache of encoded entries. Subscribers at the same position share one encoding."""

    __slots__ = ("_entry_bytes", "_lines")

    def __init__(self, entry_bytes: int) -> None:
        self._entry_bytes = entry_bytes
        #: By message id, which is unique for all time. The oldest comes first.
        self._lines: dict[str, tuple[Entry, bytes]] = {}

    def encode_once(self, topic_name: str, leased: LeasedEntry) -> tuple[Entry, bytes]:
        """Return the entry and its line. Raise RecordTooLarge if it does not fit into a line."""
        cached = self._lines.get(leased.id)
        if cached is None:
            entry = Entry(topic_name, leased.record.value or b"")
            check_size(len(entry.content), self._entry_bytes)
            cached = self._lines[leased.id] = entry, encode(entry)
            if len(self._lines) > limits.LINE_KEPT_LINES:
                del self._lines[next(iter(self._lines))]
        return cached


class SubscriberServer(Protocol):
    """The part of the server that a subscriber uses."""

    broker: Broker
    settings: LineSettings
    encoded_lines: EncodedLines

    async def register_subscriber(self, name: str, connection: Any) -> None: ...

    def unregister_subscriber(self, name: str, connection: Any) -> None: ...


class SubscriberPeer(Protocol):
    """The part of the connection that a subscriber uses."""

    @property
    def caller(self) -> Caller: ...

    def can_receive_entry(self) -> bool: ...

    def deliver(self, entry: Entry, line: bytes) -> None: ...

    def end(self, end: End, detail: str = "") -> None: ...


class _SubscribedTopic:
    """A topic of a subscriber, and the channel through which its entries come."""

    __slots__ = ("channel", "name", "index", "read_error")

    def __init__(self, name: str, index: int, channel: Channel) -> None:
        self.name = name
        #: Its place among the topics of the subscriber, for `Turns`.
        self.index = index
        self.channel = channel
        #: Why the last try to read its entries failed; empty if it did not.
        self.read_error = ""


class Subscriber:
    """Lease the entries of one subscriber, and send them."""

    def __init__(self, server: SubscriberServer, peer: SubscriberPeer, name: str) -> None:
        self._server = server
        self._encoded_lines = server.encoded_lines
        self._peer = peer
        self._name = name
        #: By their places.
        self._topics: dict[int, _SubscribedTopic] = {}
        #: The topics that may have an entry to send, and their places.
        self._turns = Turns()
        self._ready = self._turns.ready
        #: The entry that was sent and is not answered.
        self._unanswered: tuple[_SubscribedTopic, LeasedEntry] | None = None
        #: The task that reads an entry from disk, or makes an answer durable. Nothing is sent while
        #: it runs.
        self._waiting: asyncio.Task[None] | None = None
        self._has_durable_acks = server.settings.durable_acks
        #: Topics that were deleted. Their channels are closed with the others.
        self._deleted_topics: list[_SubscribedTopic] = []
        self._closing: asyncio.Task[None] | None = None
        self._entries = 0
        self._left_out = 0

    def counts(self) -> dict[str, int]:
        skipped = sum(topic.channel.counts().skipped for topic in self._topics.values())
        return {"entries": self._entries, "skipped": skipped, "left_out": self._left_out}

    # --- called by the connection -----------------------------------------------------------

    async def choose(self, topic_name: str) -> None:
        """Create a durable subscription to a topic; an existing one stays unchanged."""
        broker, settings = self._server.broker, self._server.settings
        topic = broker.topics().get(topic_name)
        start: Start = "end"
        if settings.reading != "every" and topic is not None:
            # A new live subscriber gets the entries that are live now. In a topic whose entries
            # never become old this would be the whole history, so there it begins at the end.
            policy = topic.policy
            if policy.live_for_ms is not None or policy.live_entries is not None:
                start = "beginning"
        await broker.pushing.subscribe(
            self._peer.caller, self._name, topic_name, settings.terms, start
        )

    async def begin(self, topic_names: Sequence[str]) -> None:
        """Replace an older connection of this subscriber, and open the channels of its topics."""
        self._check_open()
        await self._server.register_subscriber(self._name, self._peer)
        self._turns = Turns()
        self._ready = self._turns.ready
        try:
            for index, name in enumerate(topic_names):
                await self._open_channel(index, name)
        except BaseException:
            await self._close_channels()
            raise

    async def get_entry(self, request: GetEntry) -> EntryAnswer:
        """Return the answer to a subscriber that polls. It needs no subscription, and changes none.
        Raise UnknownTopic or UnknownPartition.
        """
        queue = TopicQueue(
            self._server.broker,
            request.topic,
            partition=request.partition,
            caller=self._peer.caller,
        )
        entry = await queue.getentry(request.last)
        if isinstance(entry, int):
            return NoEntry(request.topic, entry)
        number, timestamp_ms, publisher_id, content = entry
        is_long = len(content) > self._server.settings.entry_bytes
        return NumberedEntry(
            request.topic,
            number,
            timestamp_ms,
            publisher_word(publisher_id),
            len(content) if is_long else content,
        )

    def send_next(self) -> None:
        """Send the next entry, if there is one and the peer can receive it."""
        try:
            while self._ready and self._waiting is None and self._peer.can_receive_entry():
                self._send_next_of(self._turns.next())
        except BrokerClosing:
            self._peer.end(End.CLOSED)
        except Exception:
            log.exception("delivering entries to sub %s failed", self._name)
            self._peer.end(End.FAILED)

    def on_successful(self) -> None:
        """Acknowledge the entry that the subscriber has answered, and send the next one."""
        assert self._unanswered is not None, "an entry was sent"
        topic, leased = self._unanswered
        self._unanswered = None
        self._entries += 1
        topic.channel.ack(leased.partition, leased.offset)
        if self._has_durable_acks:
            self._wait_for(self._make_durable(topic))
        elif self._ready:
            self.send_next()

    async def close(self) -> None:
        """Give back the unanswered entry and close the channels. The subscription stays."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    # --- internal ---------------------------------------------------------------------------

    async def _open_channel(self, index: int, name: str) -> None:
        """Open the channel of a topic. Raise BrokerClosing if the subscriber has disconnected
        meanwhile.
        """
        on_change = partial(self._on_change, index)
        pushing = self._server.broker.pushing
        channel = await pushing.open(self._peer.caller, self._name, name, on_change)
        # If `close` has begun meanwhile, it does not know this channel.
        if self._closing is not None:
            await channel.close()
        self._check_open()
        self._topics[index] = _SubscribedTopic(name, index, channel)
        self._turns.add(index)
        if channel.has_due():
            self._turns.prefer(index)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise BrokerClosing("the subscriber has disconnected meanwhile")

    def _on_change(self, index: int) -> None:
        """Send the next entry, because a topic may have one. The channel calls this."""
        self._turns.add(index)
        if self._unanswered is None:
            self.send_next()

    def _send_next_of(self, index: int) -> None:
        """Send the next entry of a topic, if there is one. Start a task if it is on disk."""
        topic = self._topics.get(index)
        if topic is None:
            return
        try:
            leased = topic.channel.take_now()
        except NotFound as error:
            self._remove_topic(topic, error)
            return
        if leased is None:
            self._wait_for(self._read_and_send(topic))
        elif leased:
            self._send(topic, leased[0])

    async def _read_and_send(self, topic: _SubscribedTopic) -> None:
        """Read the next entry of a topic from disk and send it."""
        try:
            leased = await topic.channel.take()
        except NotFound as error:
            self._remove_topic(topic, error)
        except StorageError as error:
            # The channel calls `_on_change` for every retry, which may go on for ever. So the same
            # error is logged once.
            if topic.read_error != str(error):
                topic.read_error = str(error)
                log.warning("sub %s, topic %s: %s", self._name, topic.name, error)
        else:
            topic.read_error = ""
            if leased and self._peer.can_receive_entry():
                self._send(topic, leased[0])
            elif leased:  # meanwhile the peer has sent a message, or is slow
                topic.channel.nack(leased[0])
                self._turns.prefer(topic.index)

    async def _make_durable(self, topic: _SubscribedTopic) -> None:
        """Make the last answer durable. If that fails, try again until it succeeds: the next entry
        waits, because after a crash the answered entry would come again as well."""
        has_failed = False
        while True:
            try:
                return await topic.channel.flush()
            except StorageError as error:
                if not has_failed:
                    log.warning("sub %s waits, its answer cannot be saved: %s", self._name, error)
                has_failed = True
                await asyncio.sleep(limits.LINE_SAVE_RETRY_MS / 1000)

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, and send the next entry after it."""
        self._waiting = asyncio.get_running_loop().create_task(work)
        self._waiting.add_done_callback(self._on_waited)

    def _on_waited(self, task: asyncio.Task[None]) -> None:
        """Send the next entry after a task. End the connection if the task failed."""
        # An answer may have started another task since.
        if self._waiting is task:
            self._waiting = None
        # Only `_close` cancels the task.
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, BrokerClosing):
            self._peer.end(End.CLOSED)
        elif error is not None:
            log.error("delivering entries to sub %s failed", self._name, exc_info=error)
            self._peer.end(End.FAILED)
        else:
            self.send_next()

    def _send(self, topic: _SubscribedTopic, leased: LeasedEntry) -> None:
        """Send an entry, or skip it if it does not fit into a line."""
        if not topic.channel.is_idle:
            self._turns.add(topic.index)
        self._unanswered = topic, leased
        try:
            self._peer.deliver(*self._encoded_lines.encode_once(topic.name, leased))
        except RecordTooLarge as error:
            self._unanswered = None
            self._left_out += 1
            position = f"topic {topic.name}, partition {leased.partition}, offset {leased.offset}"
            # All entries may be too long, so only the first one is a warning.
            level = logging.WARNING if self._left_out == 1 else logging.DEBUG
            log.log(level, "left out for sub %s: %s: %s", self._name, position, error)
            topic.channel.ack(leased.partition, leased.offset)

    def _remove_topic(self, topic: _SubscribedTopic, error: NotFound) -> None:
        log.warning("sub %s gets no more entries of topic %s: %s", self._name, topic.name, error)
        del self._topics[topic.index]
        self._deleted_topics.append(topic)

    async def _close(self) -> None:
        """End the task, close all channels, and release the name."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait([self._waiting])
        await self._close_channels()
        self._server.unregister_subscriber(self._name, self._peer)

    async def _close_channels(self) -> None:
        topics = [*self._topics.values(), *self._deleted_topics]
        self._topics = {}
        for topic in topics:
            await topic.channel.close()
