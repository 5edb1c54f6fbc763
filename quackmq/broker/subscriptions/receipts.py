"""Receipts: records in a topic that say what a subscription has taken, and when.

A subscription can leave receipts. Then each move of its cursor is written to the topic
`quackmq.receipts`, in the same change of the store: there is no move without a receipt and no
receipt without a move, also after a crash. The receipts of one subscription are in one partition,
in order. A receipt is JSON:

    {"subscription":"puddles","topic":"ducks","topic_id":"…","partition":0,"kind":"taken",
     "from_offset":5,"first_offset":7,"next_offset":8,"lost":0,
     "time_ms":1700000000042,"append_times":[[7,1700000000001]]}

- `begun`: receipts exist from this offset on.
- `taken`: the cursor moved from `from_offset` to `next_offset`. The subscriber has taken the
  records from `first_offset` on. Those before were skipped: markers, aborted records, and `lost`
  records that could not be read.
- `moved`: the cursor was set to `next_offset`, forward or back.

A push subscription acknowledges in any order; its receipts are written together with its progress
(`quackmq.broker.push.receipt_ranges`):

- `acked`: as `taken`, for a range of offsets.
- `passed`: the range will not be sent any more. A live subscription skipped it as too old, or it
  was done before receipts began.

Both have `lent_to`: earlier receipts may cover offsets before it.

`time_ms` and `append_times` (pairs of an offset and the append time from there on) are from the
broker's clock, so that their difference is the time from publish to delivery. The append time of
recent records is exact. That of older ones may be up to `shared_limits.REGION_MS` early. That of
archived or unreadable ones is missing.

Not promised: that the subscriber has *processed* the records that it has taken; that no client
writes to the topic, alters it or deletes it.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from quackmq.broker import limits
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.topic_defaults import RECEIPTS_POLICY
from quackmq.broker.topics import Topics
from quackmq.errors import InvalidRequest, StorageError, TopicExists
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.partitioning import choose_partition
from quackmq.model.topic import (
    Append,
    Cursor,
    OffsetTime,
    PartitionKey,
    StatePut,
    Topic,
)
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

Kind = Literal["begun", "taken", "acked", "passed", "moved"]


class ReceiptEvent(NamedTuple):
    """An event of a subscription in a partition, see above."""

    name: str
    topic: Topic
    partition: int
    kind: Kind
    from_offset: int
    first_offset: int
    next_offset: int
    lost: int = 0
    lent_to: int | None = None


class Receipts:
    """Writes receipts to their topic, together with the changes that they report."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        now_ms: Callable[[], int],
        cursors: Cursors,
        retention: Retention,
    ) -> None:
        """`cursors` and `retention` are informed of what was written."""
        self._store = store
        self._topics = topics
        self._now_ms = now_ms
        self._cursors = cursors
        self._retention = retention

    async def write(
        self,
        events: Sequence[ReceiptEvent],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> None:
        """Write receipts, with the cursors and states that they are about, as one unit. There may
        be no receipts: then write the cursors and states only."""

        async def attempt() -> None:
            if events:
                await self.ensure_topic()
            await self.append(events, cursors, states)

        # A receipts topic that is deleted meanwhile is created again.
        await self._topics.retry_on_topic_deletion(attempt)

    async def ensure_topic(self) -> None:
        """Create the receipts topic if it does not exist. This may wait for its deletion, which
        waits for its subscriptions: do not call this with the lock of one of those."""
        if RECEIPTS_TOPIC not in self._topics.by_name:
            try:
                await self._topics.create(RECEIPTS_TOPIC, 1, RECEIPTS_POLICY)
            except TopicExists:
                log.debug("another call has created %s", RECEIPTS_TOPIC)

    async def append(
        self,
        events: Sequence[ReceiptEvent],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> None:
        """Write as `write` does, after `ensure_topic`. Raise NotFound if the receipts topic was
        deleted meanwhile."""
        await self.commit(await self.build_batches(events), cursors, states)

    async def commit(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> None:
        """Write batches of receipts, cursors and states as one unit. Then count the batches for
        retention, and apply the cursors in memory."""
        if not appends and not states:
            await self._cursors.set(cursors)
            return
        await self._store.room()  # no other task runs between this and the append
        results = await self._store.append(appends, cursors, states)
        for append, result in zip(appends, results, strict=True):
            self._retention.count_append(append.key, result, append.batch.size)
        self._cursors.apply(cursors)

    async def build_batches(self, events: Sequence[ReceiptEvent]) -> list[Append]:
        """Return the receipts as batches; call `ensure_topic` first. The caller passes them to
        `commit` with its cursors, or appends them itself. NotFound, here or from the append, may
        mean that the receipts topic was deleted meanwhile."""
        if not events:
            return []
        topic = self._topics.named(RECEIPTS_TOPIC)
        now_ms = self._now_ms()
        records: dict[int, list[Record]] = {}
        for number, event in enumerate(events):
            if number % limits.RECEIPTS_PER_BATCH == limits.RECEIPTS_PER_BATCH - 1:
                await asyncio.sleep(0)  # let other tasks run
            key = event.name.encode()
            value = _encode(event, now_ms, await self._append_times(event))
            partition = choose_partition(topic.policy.partitioner, key, topic.partitions) or 0
            records.setdefault(partition, []).append(Record(0, now_ms, key, value))
        return [
            Append(PartitionKey(topic.id, partition), Batch.peek(codec.encode(portion)))
            for partition, of_partition in records.items()
            for portion in _split(of_partition)
        ]

    async def _append_times(self, event: ReceiptEvent) -> Sequence[OffsetTime]:
        """Return the append times of the records that an event reports, or a sample of them;
        nothing if they cannot be read."""
        if event.kind not in ("taken", "acked") or event.first_offset >= event.next_offset:
            return ()
        key = PartitionKey(event.topic.id, event.partition)
        try:
            times = await self._store.append_times(key, event.first_offset, event.next_offset)
        except (OSError, StorageError) as error:
            # A receipt without times is better than none: one unreadable region must not block the
            # receipts of all subscriptions.
            log.debug("a receipt of %s has no append times: %s", event.name, error)
            return ()
        # Of very many times, report some at even distances.
        # Divide and round up; 1 if there are no times.
        interval = -(-len(times) // limits.RECEIPT_TIMES) or 1
        return times[::interval]


def begin_events(name: str, topic: Topic, cursors: Sequence[int]) -> list[ReceiptEvent]:
    """Return the events that begin the receipts of a subscription: one for each partition,
    without records, at its cursor."""
    return [
        ReceiptEvent(
            name,
            topic,
            partition,
            "begun",
            from_offset=cursor,
            first_offset=cursor,
            next_offset=cursor,
        )
        for partition, cursor in enumerate(cursors)
    ]


def check_leaves_receipts(topic_name: str) -> None:
    """Raise InvalidRequest for the receipts topic: its receipts would cause receipts."""
    if topic_name == RECEIPTS_TOPIC:
        raise InvalidRequest(f"subscriptions to {RECEIPTS_TOPIC} itself leave no receipts")


def _split(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    for start in range(0, len(records), limits.RECEIPTS_PER_BATCH):
        yield records[start : start + limits.RECEIPTS_PER_BATCH]


def _encode(event: ReceiptEvent, now_ms: int, times: Sequence[OffsetTime]) -> bytes:
    """Return a receipt as JSON. `times` are append times of the records that it reports."""
    fields: dict[str, object] = {
        "subscription": event.name,
        "topic": event.topic.name,
        "topic_id": str(event.topic.id),
        "partition": event.partition,
        "kind": event.kind,
        "from_offset": event.from_offset,
        "first_offset": event.first_offset,
        "next_offset": event.next_offset,
        "lost": event.lost,
        "time_ms": now_ms,
        # The first time may be that of an earlier offset: it also holds for the first record.
        "append_times": [[max(offset, event.first_offset), time_ms] for offset, time_ms in times],
    }
    if event.lent_to is not None:
        fields["lent_to"] = event.lent_to
    return json.dumps(fields, separators=(",", ":")).encode()
