"""A topic as the bounded queue of news that it is to the line door: `enqueue`, `getentry`,
`dequeue`.

The queue is what is live of one partition, by the topic's own policy; nothing is kept beside the
log:

    number     1        2         head                       tail
               |________|__________|===========================|
    offset     0        1        live, `live_entries` of them at the most (MAXENTRIES),
               history           none older than `live_for_ms` (δ)

An entry's number is its offset plus one, so numbers begin at 1 and have no gaps within a run of the
broker. An entry that leaves the queue stays in the history for as long as the topic keeps it.
Whether the queue may be full is the policy's too: with `when_full=wait` and `refuse` an `enqueue`
finds no room until old entries have left; otherwise the oldest leave for it.

Entries published by other doors are in the queue like those enqueued here; a batch of them leaves
as a whole, and one that cannot be read is gone over.

Who may call: the broker's loop. Each call sees all that was enqueued before it, and is one step.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, NamedTuple

from quackmq import limits
from quackmq.broker.broker import Broker
from quackmq.broker.settings import Caller
from quackmq.errors import OffsetOutOfRange, RecordTooLarge
from quackmq.model.topic import Appended, PartitionKey
from quackmq.records.batch import Headers, Record

#: The header that names who published an entry.
PUBLISHER_HEADER: Final = "publisher"
_NOBODY: Final = Caller()


class QueueEntry(NamedTuple):
    number: int
    timestamp_ms: int
    #: Empty for an entry that did not come through a queue.
    publisher_id: str
    content: bytes


class TopicQueue:
    """One partition of a topic that is there."""

    def __init__(
        self,
        broker: Broker,
        topic_name: str,
        *,
        partition: int = 0,
        entry_bytes: int = limits.LINE_ENTRY_BYTES,
        caller: Caller = _NOBODY,
    ) -> None:
        """`entry_bytes` is QUACKSIZE."""
        self._broker = broker
        self._topic_name = topic_name
        self._key = PartitionKey(broker.topic(topic_name).id, partition)
        self._entry_bytes = entry_bytes
        self._caller = caller
        #: How far entries have left, as far as anybody was told.
        self._head = 0

    async def enqueue(self, publisher_id: str, content: bytes) -> int:
        """Add an entry: its number, when it is durable. RecordTooLarge for more than QUACKSIZE
        bytes; TopicFull if there is no room, after a while in a topic that waits."""
        return await self.begin_enqueue(publisher_id, content)

    def begin_enqueue(
        self, publisher_id: str, content: bytes, *, wait_for_room: bool = True
    ) -> asyncio.Future[int]:
        """The same for who goes on meanwhile. Whoever has begun one and has not heard of it yet
        begins no other: there is one pending entry for each publisher and topic (Q6). Unless it
        `wait_for_room` is set, TopicFull comes at once, here or by the future."""
        if len(content) > self._entry_bytes:
            raise RecordTooLarge(
                f"an entry of {len(content)} bytes; {self._entry_bytes} is the most here"
            )
        begun = self._begin(publisher_id, content, wait_for_room)
        return (
            asyncio.ensure_future(self._put(publisher_id, content, wait_for_room))
            if begun is None
            else begun
        )

    async def getentry(self, last: int) -> QueueEntry | int:
        """The entry behind number `last`, which a reader had last (0 at first); if that one has
        left the queue, the next newer one. If there is none: minus the number of the last entry
        that was ever enqueued."""
        offset = max(last, await self._first_live())
        while True:
            offsets = await self._broker.offsets(self._caller, self._key)
            offset = max(offset, offsets.first)
            if offset >= offsets.stable:
                return -offsets.stable
            try:
                page = await self._broker.messages.read(
                    self._caller,
                    self._topic_name,
                    self._key.partition,
                    offset,
                    max_records=1,
                    max_bytes=1,
                )
            except OffsetOutOfRange:
                continue  # more has left meanwhile
            if page.messages:
                return _entry_of(page.messages[0].record)
            offset = max(offset + 1, page.next_offset)

    async def dequeue(self) -> int:
        """Let entries that are too old leave, beginning at the head: how many have left since the
        last call. Nothing is read or written for it: age is a matter of the clock, and what has
        left goes to the archive by itself."""
        head = await self._first_live()
        left = max(0, head - self._head)
        self._head = max(self._head, head)
        return left

    async def _first_live(self) -> int:
        return await self._broker.pushing.first_live(self._key)

    def _begin(
        self, publisher_id: str, content: bytes, wait_for_room: bool
    ) -> asyncio.Future[int] | None:
        begun = self._broker.messages.begin_put(
            self._caller,
            self._topic_name,
            content,
            headers=_headers(publisher_id),
            partition=self._key.partition,
            wait_for_room=wait_for_room,
        )
        return None if begun is None else _numbered(begun.appended)

    async def _put(self, publisher_id: str, content: bytes, wait_for_room: bool) -> int:
        """The topic has to come to life again first, or too much is on its way to the disk."""
        while (begun := self._begin(publisher_id, content, wait_for_room)) is None:
            await self._broker.ensure_topic(self._caller, self._topic_name)
            await self._broker.room()
        return await begun


def _headers(publisher_id: str) -> Headers:
    return ((PUBLISHER_HEADER, publisher_id.encode()),)


def _entry_of(record: Record) -> QueueEntry:
    named = (value for name, value in record.headers if name == PUBLISHER_HEADER)
    publisher_id = (next(named, None) or b"").decode(errors="replace")
    return QueueEntry(record.offset + 1, record.timestamp_ms, publisher_id, record.value or b"")


def _numbered(appended: asyncio.Future[Appended]) -> asyncio.Future[int]:
    """The number of the entry that is appended, when it is."""
    number: asyncio.Future[int] = appended.get_loop().create_future()
    appended.add_done_callback(partial(_number, number))
    return number


def _number(number: asyncio.Future[int], appended: asyncio.Future[Appended]) -> None:
    if number.cancelled():
        if not appended.cancelled():
            appended.exception()  # nobody is left to hear of it
    elif appended.cancelled():
        number.cancel()
    elif (error := appended.exception()) is not None:
        number.set_exception(error)
    else:
        number.set_result(appended.result().base_offset + 1)
