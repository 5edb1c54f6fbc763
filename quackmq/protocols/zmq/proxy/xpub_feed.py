"""What is sent to subscribers: every topic that somebody wants is read once, for all of them.

A feed follows one topic from where it ends when the first subscriber comes; each of its partitions
by itself, in the order of the log. What has come together is made into frames once, and each
subscriber gets the very same bytes. It is there for as long as somebody wants the topic.

Only what is committed is sent, whichever door it came through.

Who may call: the loop.
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
from quackmq.protocols.zmq.codec.proxy_language import with_ids
from quackmq.protocols.zmq.codec.zmtp import MORE, head

log = logging.getLogger(__name__)

#: As whom the proxy reads.
_PROXY = Caller(client="proxy")


class Audience(Protocol):
    """Somebody to whom messages are sent."""

    def send(self, frames: bytes, messages: int) -> None:
        """So many messages, or drop them if there is no room for them."""


class Feed:
    def __init__(self, broker: Broker, topic: Topic, on_end: Callable[[Feed], None]) -> None:
        self.topic = topic
        #: Who wants the messages as they are, and who with their ids; of the latter from which
        #: offset on, by partition, where the partition was being read before they came.
        self.plain: dict[Audience, None] = {}
        self.with_ids: dict[Audience, dict[int, int]] = {}
        self._broker = broker
        self._on_end = on_end
        self._parts: list[_Part] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._plain_head = head(MORE, len(topic.name)) + topic.name.encode()
        first = with_ids(topic.name)
        self._ids_head = head(MORE, len(first)) + first

    @property
    def is_wanted(self) -> bool:
        return bool(self.plain or self.with_ids)

    @property
    def has_begun(self) -> bool:
        return all(part.position is not None for part in self._parts)

    def begin(self, start: int | None) -> None:
        """Read from an offset on, or from where the topic ends."""
        self._follow(start)

    def follow(self, topic: Topic) -> None:
        """It was altered: new partitions are read from their beginning."""
        self.topic = topic
        self._follow(0)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_stopped(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def add_with_ids(self, audience: Audience) -> None:
        positions = {
            part.partition: part.position for part in self._parts if part.position is not None
        }
        self.with_ids[audience] = positions

    def covers(self, audience: Audience, partition: int, offset: int) -> bool:
        """Whether an entry was sent to somebody who wants ids, or will be in its turn."""
        positions = self.with_ids.get(audience)
        if positions is None or partition >= len(self._parts):
            return False
        begin = positions.get(partition)
        if begin is None:
            begin = self._parts[partition].start
        return begin is not None and offset >= begin

    # --- how it is read -----------------------------------------------------------------------

    def _follow(self, start: int | None) -> None:
        for partition in range(len(self._parts), self.topic.partitions):
            part = _Part(partition, start)
            self._parts.append(part)
            task = asyncio.get_running_loop().create_task(self._run(part))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, part: _Part) -> None:
        wait_ms = limits.PROXY_RETRY_MS
        while True:
            position = part.position
            try:
                await self._find(part)
                await self._read_on(part)
            except (BrokerClosing, NotFound):
                break  # the topic, or the broker, is gone
            except OffsetOutOfRange:
                # Trimmed before it was sent: who subscribes like this is served at most once.
                part.is_behind = True
                continue
            except QuackError as error:
                log.warning("new messages of topic %s wait: %s", self.topic.name, error)
            except Exception:
                log.exception("following topic %s failed; it is tried again", self.topic.name)
            if part.position != position:  # it had gone on: this is another trouble
                wait_ms = limits.PROXY_RETRY_MS
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(2 * wait_ms, limits.PROXY_LONGEST_BACKOFF_MS)
        self._on_end(self)

    async def _find(self, part: _Part) -> None:
        """Where to read on, if that is not known."""
        if part.position is None or part.is_behind:
            offsets = await self._broker.offsets(
                _PROXY, PartitionKey(self.topic.id, part.partition)
            )
            if part.position is None:
                part.position = part.start = offsets.stable
            else:
                part.position = min(max(part.position, offsets.first), offsets.next)
            part.is_behind = False

    async def _read_on(self, part: _Part) -> None:
        assert part.position is not None, "it was found"
        while True:
            page = await self._broker.messages.read(
                _PROXY,
                self.topic.name,
                part.partition,
                part.position,
                max_records=limits.PROXY_PAGE_RECORDS,
                max_bytes=limits.PROXY_PAGE_BYTES,
                wait_ms=shared_limits.READ_WAIT_MS,
            )
            # Another of this name must not be taken for it.
            self._broker.topic_by_id(self.topic.id)
            if page.messages:
                self._send(page.messages)
            part.position = page.next_offset
            await asyncio.sleep(0)  # others are to have their turn

    def _send(self, messages: Sequence[Message]) -> None:
        if self.plain:
            self._send_to(self.plain, self._plain_frames(messages), len(messages))
        if self.with_ids:
            self._send_to(self.with_ids, self._frames_with_ids(messages), len(messages))

    def _send_to(self, audience: Iterable[Audience], frames: bytes, messages: int) -> None:
        for each in list(audience):
            each.send(frames, messages)

    def _plain_frames(self, messages: Sequence[Message]) -> bytes:
        pieces: list[bytes] = []
        for message in messages:
            body = message.record.value or b""
            pieces += (self._plain_head, head(0, len(body)), body)
        return b"".join(pieces)

    def _frames_with_ids(self, messages: Sequence[Message]) -> bytes:
        pieces: list[bytes] = []
        for message in messages:
            body = message.record.value or b""
            token = message.id.encode()
            pieces += (self._ids_head, head(MORE, len(body)), body, head(0, len(token)), token)
        return b"".join(pieces)


class _Part:
    """A partition: where it was begun with, and the next offset to be sent; None before either is
    known. `is_behind` if that is there no more."""

    __slots__ = ("is_behind", "partition", "position", "start")

    def __init__(self, partition: int, start: int | None) -> None:
        self.partition = partition
        self.start = start
        self.position = start
        self.is_behind = False
