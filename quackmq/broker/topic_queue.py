"""A topic as the bounded queue of the line protocol: `enqueue`, `getentry`, `dequeue`.

The queue is the live range of one partition, by the topic's own policy. It has no state besides the
log:

    number     1        2         head                       tail
               |________|__________|===========================|
    offset     0        1        live, at most `live_entries` of them (MAXENTRIES),
               history           none older than `live_for_ms` (δ)

The number of an entry is its offset plus one, so numbers begin at 1. They have no gaps, except for
the markers of transactions, and after a power cut in a weak sync mode. An entry that leaves the
queue stays in the history for as long as the topic keeps it. The policy also decides whether the
queue can be full. With `when_full=wait` and `refuse`, an `enqueue` finds no room until old entries
have left; otherwise the oldest entries leave.

Entries that were published by other protocols are in the queue, too. A batch of them leaves as a
whole. Unreadable entries are skipped.

Not thread-safe: call from the broker's event loop. Each call is one step, and sees all entries that
were enqueued before it.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from quackmq import limits
from quackmq.broker.broker import Broker
from quackmq.broker.settings import Caller
from quackmq.errors import OffsetOutOfRange, RecordTooLarge
from quackmq.model.topic import AppendResult, PartitionKey
from quackmq.records.batch import Headers, Record
from quackmq.tasks import map_result

#: The header that holds the publisher's id of an entry.
PUBLISHER_HEADER: Final = "publisher"
_NOBODY: Final = Caller()


class QueueEntry(NamedTuple):
    """One entry of a topic's queue."""

    number: int
    timestamp_ms: int
    #: Empty for an entry that was not published through a queue.
    publisher_id: str
    content: bytes


class TopicQueue:
    """The queue of one partition of an existing topic."""

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
        #: The first live offset that `dequeue` saw last.
        self._head = 0

    async def enqueue(self, publisher_id: str, content: bytes) -> int:
        """Add an entry; return its number when it is durable. Raise RecordTooLarge for more than
        QUACKSIZE bytes; TopicFull if there is no room, after a wait if the topic's policy is to
        wait."""
        return await self.begin_enqueue(publisher_id, content)

    def begin_enqueue(
        self, publisher_id: str, content: bytes, *, wait_for_room: bool = True
    ) -> asyncio.Future[int]:
        """Start adding an entry; return a future of its number. A publisher must not start another
        one before it has the result: each publisher has one pending entry per topic (Q6). Without
        `wait_for_room`, TopicFull is raised at once, here or by the future."""
        if len(content) > self._entry_bytes:
            raise RecordTooLarge(
                f"an entry of {len(content)} bytes: use at most {self._entry_bytes}"
            )
        number = self._begin_put(publisher_id, content, wait_for_room)
        if number is not None:
            return number
        return asyncio.ensure_future(self._put_when_possible(publisher_id, content, wait_for_room))

    async def getentry(self, last: int) -> QueueEntry | int:
        """Return the first entry after number `last`, the last one that a reader had (0 at first).
        If that entry has left the queue, return the next newer one. If there is none, return minus
        the number of the last entry that was ever enqueued."""
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
                continue  # more entries were deleted in the meantime
            if page.messages:
                return _make_entry(page.messages[0].record)
            offset = max(offset + 1, page.next_offset)

    async def dequeue(self) -> int:
        """Return how many entries have left the queue since the last call, because they are too old
        or too many. Nothing is read or written for this: the clock and the policy decide, and old
        entries go to the archive independently."""
        head = await self._first_live()
        count = max(0, head - self._head)
        self._head = max(self._head, head)
        return count

    async def _first_live(self) -> int:
        return await self._broker.pushing.first_live(self._key)

    def _begin_put(
        self, publisher_id: str, content: bytes, wait_for_room: bool
    ) -> asyncio.Future[int] | None:
        """Start adding an entry; return a future of its number. Return None if the topic does not
        exist, or the store has no room."""
        begun = self._broker.messages.begin_put(
            self._caller,
            self._topic_name,
            content,
            headers=_headers(publisher_id),
            partition=self._key.partition,
            wait_for_room=wait_for_room,
        )
        return None if begun is None else map_result(begun.appended, _entry_number)

    async def _put_when_possible(
        self, publisher_id: str, content: bytes, wait_for_room: bool
    ) -> int:
        """Ensure that the topic exists, and wait until the store has room; then add the entry."""
        while (number := self._begin_put(publisher_id, content, wait_for_room)) is None:
            await self._broker.ensure_topic(self._caller, self._topic_name)
            await self._broker.room()
        return await number


def _headers(publisher_id: str) -> Headers:
    return ((PUBLISHER_HEADER, publisher_id.encode()),)


def _make_entry(record: Record) -> QueueEntry:
    publishers = (value for name, value in record.headers if name == PUBLISHER_HEADER)
    publisher_id = (next(publishers, None) or b"").decode(errors="replace")
    return QueueEntry(record.offset + 1, record.timestamp_ms, publisher_id, record.value or b"")


def _entry_number(appended: AppendResult) -> int:
    return appended.base_offset + 1
