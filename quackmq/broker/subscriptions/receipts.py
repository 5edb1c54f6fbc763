"""Receipts: what a subscription has taken and when, told to a topic for whoever checks it.

A subscription may be told to leave receipts. Then each step of its cursor is written to the topic
`quackmq.receipts`, in the same change of the store: a cursor that moved has left its receipt, and a
receipt stands for a cursor that moved, whatever crashes. The receipts of one subscription lie in
one partition, in the order of its steps. One is JSON:

    {"subscription":"puddles","topic":"ducks","topic_id":"…","partition":0,"kind":"taken",
     "from_offset":5,"first_offset":7,"next_offset":8,"lost":0,
     "time_ms":1700000000042,"append_times":[[7,1700000000001]]}

`begun` says from where on there are receipts. `taken` says that a cursor went on, from
`from_offset` to `next_offset`, because the subscriber is done with what lies from `first_offset`
on; what lies before that was gone over: markers, what was aborted, and `lost` records that could
not be had. `moved` says that somebody has put the cursor at `next_offset`, back or forth.

A pushed subscription acknowledges in any order, and its receipts are written with the state that
says so (`quackmq.broker.push.receipt_ranges`). `acked` says of a stretch what `taken` says of a
step. `passed` says that nobody is to be told any more of a stretch: a live reading skipped it as
too old, or it was done before receipts began. Both have `lent_to`: of what lies before that, other
receipts may have spoken before.

`time_ms` and `append_times` (from which offset on which time) are both of the broker's clock, so
that their difference is the time from publish to delivery. An append time is exact for what is
recent, may be up to `shared_limits.REGION_MS` early for what is not, and is missing for what is
archived, or where the disk cannot tell.

Not promised: that the subscriber has *handled* what it says it has; and anything of a receipt that
somebody else has written to the topic, or taken away by altering or deleting it.

Who may call: the broker's loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from quackmq.broker import limits
from quackmq.broker.topics import Topics
from quackmq.errors import InvalidRequest, StorageError, TopicExists
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.partitioning import partition_of
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Appended, Cursor, OffsetTime, PartitionKey, StatePut, Topic
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: Kept for a while, whoever reads them or not.
RECEIPTS_POLICY: Final = Policy(keep_for_ms=limits.RECEIPTS_KEEP_MS)

Kind = Literal["begun", "taken", "acked", "passed", "moved"]


class ReceiptEvent(NamedTuple):
    """What happened to a subscription in a partition: see above."""

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
    def __init__(
        self,
        store: Store,
        topics: Topics,
        now_ms: Callable[[], int],
        appended: Callable[[PartitionKey, Appended, int], None],
    ) -> None:
        """`appended` is told of what was added to the topic, and of its size."""
        self._store = store
        self._topics = topics
        self._now_ms = now_ms
        self._appended = appended

    async def write(
        self,
        steps: Sequence[ReceiptEvent],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> None:
        """The receipts of steps, with the cursors and states that they are about, as one unit."""

        async def attempt() -> None:
            if steps:
                await self.ready()
            await self.append(steps, cursors, states)

        # Whoever deletes the topic of receipts begins it anew.
        await self._topics.retry_on_topic_deletion(attempt)

    async def ready(self) -> None:
        """There is a topic of receipts. This may wait until a former one has gone, which waits for
        its own subscriptions: whoever holds the lock of one of those must not wait here."""
        if RECEIPTS_TOPIC not in self._topics.by_name:
            try:
                await self._topics.create(RECEIPTS_TOPIC, 1, RECEIPTS_POLICY)
            except TopicExists:
                log.debug("somebody else was first to create %s", RECEIPTS_TOPIC)

    async def append(
        self,
        steps: Sequence[ReceiptEvent],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> None:
        """As `write`, after `ready`: NotFound if the topic of receipts went meanwhile."""
        appends = await self.batches(steps)
        await self._store.room()  # nothing comes between this and the append
        self.note(appends, await self._store.append(appends, cursors, states))

    async def batches(self, steps: Sequence[ReceiptEvent]) -> list[Append]:
        """The receipts of steps, to be appended with their cursors by whoever sets those, who then
        calls `note`; after `ready`. NotFound, from this or from appending them, may mean that the
        topic of receipts went meanwhile."""
        if not steps:
            return []
        topic = self._topics.named(RECEIPTS_TOPIC)
        now_ms = self._now_ms()
        records: dict[int, list[Record]] = {}
        for number, step in enumerate(steps):
            if number % limits.RECEIPTS_PER_BATCH == limits.RECEIPTS_PER_BATCH - 1:
                await asyncio.sleep(0)  # others have their turn
            key = step.name.encode()
            value = _encode(step, now_ms, await self._append_times(step))
            partition = partition_of(topic.policy.partitioner, key, topic.partitions) or 0
            records.setdefault(partition, []).append(Record(0, now_ms, key, value))
        return [
            Append(PartitionKey(topic.id, partition), Batch.peek(codec.encode(some)))
            for partition, of_partition in records.items()
            for some in _portions(of_partition)
        ]

    def note(self, appends: Sequence[Append], appended: Sequence[Appended]) -> None:
        """They were appended."""
        for append, answer in zip(appends, appended, strict=True):
            self._appended(append.key, answer, append.batch.size)

    async def _append_times(self, step: ReceiptEvent) -> Sequence[OffsetTime]:
        if step.kind not in ("taken", "acked") or step.first_offset >= step.next_offset:
            return ()
        key = PartitionKey(step.topic.id, step.partition)
        try:
            times = await self._store.append_times(key, step.first_offset, step.next_offset)
        except (OSError, StorageError) as error:
            # What was taken counts: a disk that cannot be read in one place must not keep it, nor
            # what others have taken, from being written.
            log.debug("a receipt of %s is without its times: %s", step.name, error)
            return ()
        # Of very many, some in even distance: what lies in between counts as of the one before.
        every = -(-len(times) // limits.RECEIPT_TIMES) or 1
        return times[::every]


def begun(name: str, topic: Topic, cursors: Sequence[int]) -> list[ReceiptEvent]:
    """From these cursors on a subscription leaves receipts."""
    return [
        ReceiptEvent(name, topic, partition, "begun", cursor, cursor, cursor)
        for partition, cursor in enumerate(cursors)
    ]


def check_topic(topic_name: str) -> None:
    """InvalidRequest where receipts would beget receipts."""
    if topic_name == RECEIPTS_TOPIC:
        raise InvalidRequest(f"subscriptions to {RECEIPTS_TOPIC} itself leave no receipts")


def _portions(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    for start in range(0, len(records), limits.RECEIPTS_PER_BATCH):
        yield records[start : start + limits.RECEIPTS_PER_BATCH]


def _encode(step: ReceiptEvent, now_ms: int, times: Sequence[OffsetTime]) -> bytes:
    fields: dict[str, object] = {
        "subscription": step.name,
        "topic": step.topic.name,
        "topic_id": str(step.topic.id),
        "partition": step.partition,
        "kind": step.kind,
        "from_offset": step.from_offset,
        "first_offset": step.first_offset,
        "next_offset": step.next_offset,
        "lost": step.lost,
        "time_ms": now_ms,
        "append_times": [[max(at, step.first_offset), time_ms] for at, time_ms in times],
    }
    if step.lent_to is not None:
        fields["lent_to"] = step.lent_to
    return json.dumps(fields, separators=(",", ":")).encode()
