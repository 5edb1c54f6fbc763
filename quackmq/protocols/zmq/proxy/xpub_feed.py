"""Read each subscribed topic once, for all subscribers of the XPUB socket.

A feed follows one topic from its end at the time of the first subscription. It reads each partition
in the order of the log. New messages are encoded into frames once, and every subscriber gets the
same bytes. A feed exists as long as its topic has a subscriber.

A feed sends committed messages only, whichever protocol published them.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quackmq import limits as shared_limits
from quackmq.broker import Broker, Caller, Message
from quackmq.errors import BrokerClosing, NotFound, OffsetOutOfRange, QuackError
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec.proxy_language import ids_subscription
from quackmq.protocols.zmq.codec.zmtp import MORE, frame_head
from quackmq.tasks import TaskSet

log = logging.getLogger(__name__)

#: The caller that the proxy names when it reads.
_PROXY = Caller(client="proxy")


class Receiver(Protocol):
    """A subscriber of the feed."""

    def send(self, frames: bytes, messages: int) -> None:
        """Send `messages` encoded messages, or drop them if the receiver has no room."""


class Feed:
    """Read one topic for all its subscribers."""

    def __init__(self, broker: Broker, topic: Topic, on_end: Callable[[Feed], None]) -> None:
        self.topic = topic
        #: Receivers that want topic and body.
        self.plain: dict[Receiver, None] = {}
        #: Receivers that also want message ids. For each: the offset from which it gets messages,
        #: by partition. Partitions that were not yet being read when it subscribed are missing.
        self.with_ids: dict[Receiver, dict[int, int]] = {}
        self._broker = broker
        self._on_end = on_end
        self._readers: list[_PartitionReader] = []
        self._tasks = TaskSet()
        self._plain_first_frame = frame_head(MORE, len(topic.name)) + topic.name.encode()
        first_frame = ids_subscription(topic.name)
        self._ids_first_frame = frame_head(MORE, len(first_frame)) + first_frame

    @property
    def has_subscribers(self) -> bool:
        return bool(self.plain or self.with_ids)

    @property
    def has_begun(self) -> bool:
        """Whether the start offsets of all partitions are known."""
        return all(reader.position is not None for reader in self._readers)

    def begin(self, start: int | None) -> None:
        """Read from offset `start`, or from the topic's end if that is None."""
        self._start_readers(start)

    def follow_altered(self, topic: Topic) -> None:
        """Use the altered topic; read new partitions from their beginning."""
        self.topic = topic
        self._start_readers(0)

    def stop(self) -> None:
        self._tasks.cancel()

    async def wait_stopped(self) -> None:
        await self._tasks.finish()

    def add_with_ids(self, receiver: Receiver) -> None:
        """Send the messages with ids to a receiver, from the present position on."""
        positions = {
            reader.partition: reader.position
            for reader in self._readers
            if reader.position is not None
        }
        self.with_ids[receiver] = positions

    def covers(self, receiver: Receiver, partition: int, offset: int) -> bool:
        """Return whether the feed has sent an entry with its id to a receiver, or will send it."""
        positions = self.with_ids.get(receiver)
        if positions is None or partition >= len(self._readers):
            return False
        start = positions.get(partition)
        if start is None:
            start = self._readers[partition].start
        return start is not None and offset >= start

    # --- reading ------------------------------------------------------------------------------

    def _start_readers(self, start: int | None) -> None:
        """Start a task for each partition that is not read yet."""
        for partition in range(len(self._readers), self.topic.partitions):
            reader = _PartitionReader(partition, start)
            self._readers.append(reader)
            self._tasks.start(self._run(reader))

    async def _run(self, reader: _PartitionReader) -> None:
        """Read a partition until the topic is deleted or the broker closes; retry after errors."""
        wait_ms = limits.PROXY_RETRY_MS
        while True:
            position = reader.position
            try:
                await self._find_position(reader)
                await self._read(reader)
            except (BrokerClosing, NotFound):
                break
            except OffsetOutOfRange:
                # Retention deleted messages before they were sent. Delivery is at most once, so
                # the feed continues with the first message that still exists.
                reader.is_trimmed = True
                continue
            except QuackError as error:
                log.warning("new messages of topic %s wait: %s", self.topic.name, error)
            except Exception:
                log.exception("following topic %s failed; it is tried again", self.topic.name)
            if reader.position != position:  # it made progress, so this is a new problem
                wait_ms = limits.PROXY_RETRY_MS
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(2 * wait_ms, limits.PROXY_LONGEST_BACKOFF_MS)
        self._on_end(self)

    async def _find_position(self, reader: _PartitionReader) -> None:
        """Find the offset to read next, if it is unknown or no longer exists."""
        if reader.position is None or reader.is_trimmed:
            offsets = await self._broker.offsets(
                _PROXY, PartitionKey(self.topic.id, reader.partition)
            )
            if reader.position is None:
                reader.position = reader.start = offsets.stable
            else:
                reader.position = min(max(reader.position, offsets.first), offsets.next)
            reader.is_trimmed = False

    async def _read(self, reader: _PartitionReader) -> None:
        """Read messages and send them, for ever."""
        assert reader.position is not None, "the position was found before"
        while True:
            page = await self._broker.messages.read(
                _PROXY,
                self.topic.name,
                reader.partition,
                reader.position,
                max_records=limits.PROXY_PAGE_RECORDS,
                max_bytes=limits.PROXY_PAGE_BYTES,
                wait_ms=shared_limits.READ_WAIT_MS,
            )
            # Raise NotFound if the topic was deleted: the messages may be those of a new topic with
            # the same name.
            self._broker.topic_by_id(self.topic.id)
            if page.messages:
                self._send(page.messages)
            reader.position = page.next_offset
            await asyncio.sleep(0)  # let other tasks run

    def _send(self, messages: Sequence[Message]) -> None:
        if self.plain:
            self._send_to(self.plain, self._encode_plain(messages), len(messages))
        if self.with_ids:
            self._send_to(self.with_ids, self._encode_with_ids(messages), len(messages))

    def _send_to(self, receivers: Iterable[Receiver], frames: bytes, messages: int) -> None:
        for receiver in list(receivers):
            receiver.send(frames, messages)

    def _encode_plain(self, messages: Sequence[Message]) -> bytes:
        """Encode messages as two frames each: topic and body."""
        pieces: list[bytes] = []
        for message in messages:
            body = message.record.value or b""
            pieces += (self._plain_first_frame, frame_head(0, len(body)), body)
        return b"".join(pieces)

    def _encode_with_ids(self, messages: Sequence[Message]) -> bytes:
        """Encode messages as three frames each: subscription, body and message id."""
        pieces: list[bytes] = []
        for message in messages:
            body = message.record.value or b""
            message_id = message.id.encode()
            pieces += (
                self._ids_first_frame,
                frame_head(MORE, len(body)),
                body,
                frame_head(0, len(message_id)),
                message_id,
            )
        return b"".join(pieces)


class _PartitionReader:
    """The state of reading one partition."""

    __slots__ = ("is_trimmed", "partition", "position", "start")

    def __init__(self, partition: int, start: int | None) -> None:
        self.partition = partition
        #: The first offset that was read; None until it is known.
        self.start = start
        #: The next offset to read; None until it is known.
        self.position = start
        #: Whether retention has deleted the record at `position`.
        self.is_trimmed = False
