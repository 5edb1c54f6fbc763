"""What doors see: topics, batches, offsets, subscriptions. Every call names its caller.

A topic is a partitioned, append-only log of record batches. Doors that speak in batches publish and
read them whole; for doors of single messages there are `publish_records` and subscriptions. The
broker keeps nothing durable itself: that is the store's. Beside it stand `Retention`, which carries
out topic policies, and `Delivery`, which carries out subscriptions.

Promised: what a call has answered is durable, as the store promises it; a topic whose policy counts
nothing costs a publish nothing; nobody waits by asking again and again. A change that has begun is
carried through, also if its caller goes away. A call after `close` raises BrokerClosing, and so
does every wait that `close` meets.

Who may call: one event loop, the one that `open` ran on. Time is passed in: `now_ms` for the wall
clock, and the loop's own for waits.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from quackmq import codec, limits
from quackmq.broker.decoded import DecodedBatches
from quackmq.broker.delivery import Delivery
from quackmq.broker.producer_ids import ProducerIds
from quackmq.broker.retention import Retention
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.times import first_at
from quackmq.broker.topics import Topics
from quackmq.broker.waits import Changes, NamedLocks, Waits, only
from quackmq.clock import wall_clock_ms
from quackmq.errors import (
    BrokerClosing,
    CorruptBatch,
    NoSubscriber,
    UnknownTopic,
    UnsupportedBatch,
)
from quackmq.policy import Policy
from quackmq.record import CONTROL_FLAG, NO_TIMESTAMP, TRANSACTIONAL_FLAG, Batch, Record
from quackmq.stores.base import Store
from quackmq.subscriptions import Message, Start, Subscription, check_name
from quackmq.topic import (
    Append,
    Appended,
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    Topic,
)

log = logging.getLogger(__name__)

_NOT_FROM_CLIENTS: Final = CONTROL_FLAG | TRANSACTIONAL_FLAG


class Broker:
    def __init__(
        self,
        store: Store,
        settings: BrokerSettings = BrokerSettings(),  # noqa: B008  (frozen)
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self.settings = settings
        self._store = store
        self._now_ms = now_ms
        self._topics = Topics(store, settings, self._on_topic_put, self._on_topic_deleted)
        self._decoded = DecodedBatches()
        self._delivery = Delivery(
            store, self._decoded, now_ms, self._read, self._topics.by_id, self._on_cursor_moved
        )
        self._retention = Retention(
            store, now_ms, self._delivery.held_from, settings.full_topic_wait_ms
        )
        #: The names of topics that publishing to goes through retention.
        self._counted: set[str] = set()
        self._producer_ids = ProducerIds(store)
        self._locks = NamedLocks()
        self._waits = Waits()
        self._changes = Changes()
        self._cleaner: asyncio.Task[None] | None = None
        self._turn = 0
        self._is_closing = False

    async def open(self) -> None:
        """Take up what the store holds, and begin to clean."""
        assert self._cleaner is None, "a broker is opened once"
        await self._topics.load()
        await self._delivery.load()
        self._cleaner = asyncio.get_running_loop().create_task(self._clean_again_and_again())

    async def close(self) -> None:
        """End every wait, finish what was begun. The store stays open: it is its opener's."""
        self._is_closing = True
        if self._cleaner is not None:
            self._cleaner.cancel()
            await asyncio.wait([self._cleaner])
        self._waits.end(_closing())
        await self._retention.close()
        await self._changes.finish()

    @property
    def cluster_id(self) -> str:
        return self._store.cluster_id

    # --- topics -----------------------------------------------------------------------------

    def topics(self) -> Mapping[str, Topic]:
        """Every topic by name; a view that follows changes."""
        return MappingProxyType(self._topics.by_name)

    def topic(self, name: str) -> Topic:
        return self._topics.named(name)

    def topic_by_id(self, topic_id: uuid.UUID) -> Topic:
        return self._topics.with_id(topic_id)

    async def create_topic(
        self,
        caller: Caller,
        name: str,
        *,
        partitions: int | None = None,
        policy: Policy | None = None,
        validate_only: bool = False,
    ) -> Topic:
        """A new topic. With `validate_only` it is only said what would be created, with an id of
        zeros. TopicExists, IllegalTopicName, InvalidRequest, LimitReached."""
        self._check_open()
        partitions = self.settings.default_partitions if partitions is None else partitions
        policy = self.settings.default_policy if policy is None else policy
        if validate_only:
            self._topics.check_new(name, partitions)
            return Topic(uuid.UUID(int=0), name, partitions, policy, self._now_ms())
        return await self._changes.carry_through(self._topics.create(name, partitions, policy))

    async def ensure_topic(self, caller: Caller, name: str) -> Topic:
        """The topic of this name; created if topics come to life by their first use."""
        return await self._ensure(name)

    async def alter_topic(
        self,
        caller: Caller,
        name: str,
        *,
        partitions: int | None = None,
        policy: Policy | None = None,
    ) -> Topic:
        """More partitions, or another policy. UnknownTopic, InvalidRequest, LimitReached."""
        self._check_open()
        return await self._changes.carry_through(self._topics.alter(name, partitions, policy))

    async def delete_topic(self, caller: Caller, name: str) -> None:
        """The topic goes, with all that it holds and all its subscriptions. UnknownTopic."""
        self._check_open()
        await self._changes.carry_through(self._topics.delete(name))

    # --- batches ----------------------------------------------------------------------------

    def publish(
        self, caller: Caller, topic: Topic, partition: int, batch: Batch
    ) -> Awaitable[Appended]:
        """Append a batch that has passed `Batch.parse`, under the topic's policy.

        The order of calls is the order in the partition. The bytes are copied before this returns.
        Errors are raised here or by the awaitable: UnknownTopic, UnknownPartition, CorruptBatch,
        UnsupportedBatch, NoSubscriber, TopicFull, RecordTooLarge (more records than the topic ever
        holds), and what `Store.append` raises. Callers mind `pending_bytes` as there.
        """
        if self._is_closing:
            raise _closing()
        key = PartitionKey(topic.id, partition)
        # Whoever publishes again and again has the very value that is current: no need to hash ids.
        if (
            self._topics.by_name.get(topic.name) is not topic
            or not 0 <= partition < topic.partitions
        ):
            topic = self._topics.of(key)
        if batch.attributes & _NOT_FROM_CLIENTS:
            raise UnsupportedBatch("transactional and control batches are not taken")
        if batch.record_count < 1 or batch.record_count != batch.last_offset_delta + 1:
            raise CorruptBatch(
                f"the batch says {batch.record_count} records and a last offset delta of "
                f"{batch.last_offset_delta}"
            )
        if topic.policy.needs_subscriber and not self._delivery.count(topic.id):
            raise NoSubscriber(f"topic {topic.name} takes nothing while nobody subscribes to it")
        if topic.name in self._counted:
            return self._retention.publish(key, batch)
        return only(self._store.append((Append(key, batch),)))

    async def publish_records(
        self,
        caller: Caller,
        topic_name: str,
        records: Sequence[Record],
        *,
        partition: int | None = None,
    ) -> Appended:
        """Append records as one batch, to a topic that may come to life by it. A record without a
        timestamp gets the time of now. Without a partition the first record's key chooses one, and
        without a key each partition has its turn."""
        topic = await self._ensure(topic_name)
        now_ms = self._now_ms()
        timed = [
            record._replace(timestamp_ms=now_ms) if record.timestamp_ms == NO_TIMESTAMP else record
            for record in records
        ]
        batch = Batch.peek(codec.encode(timed))
        if partition is None:
            partition = self._choose_partition(topic, records[0].key)
        if self.pending_bytes > limits.PENDING_BYTES:
            await self.room()
        return await self.publish(caller, topic, partition, batch)

    async def read(
        self,
        caller: Caller,
        reads: Sequence[Read],
        *,
        max_bytes: int,
        min_bytes: int = 1,
        wait_ms: int = 0,
    ) -> list[Slice]:
        """As `Store.read`: whole batches, errors in the slices."""
        return await self._read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)

    @property
    def pending_bytes(self) -> int:
        """Published and not yet durable; above `limits.PENDING_BYTES` a door awaits `room()`."""
        return self._store.pending_bytes

    async def room(self) -> None:
        self._check_open()
        await self._waits.wait(self._store.room())

    async def offsets(self, caller: Caller, key: PartitionKey) -> Offsets:
        self._check_open()
        self._topics.of(key)
        return await self._store.offsets(key)

    async def offset_for_time(
        self, caller: Caller, key: PartitionKey, timestamp_ms: int
    ) -> OffsetTime | None:
        """The first record whose timestamp is this or later; None if there is none."""
        self._check_open()
        topic = self._topics.of(key)
        return await first_at(self._store, self._decoded, key, topic.name, timestamp_ms)

    async def trim(self, caller: Caller, key: PartitionKey, before: int) -> int:
        """Let go of what lies before an offset; the first offset that is left. OffsetOutOfRange
        beyond the end. Subscriptions do not hold what is trimmed so."""
        self._check_open()
        self._topics.of(key)
        return await self._changes.carry_through(self._retention.trim(key, before))

    async def new_producer_id(self, caller: Caller) -> int:
        """An id that nobody ever had or will have."""
        self._check_open()
        return await self._producer_ids.next()

    async def clean(self) -> None:
        """What the cleaner does at its intervals, now."""
        self._check_open()
        await self._retention.clean()

    # --- subscriptions ----------------------------------------------------------------------

    async def subscribe(
        self, caller: Caller, name: str, topic_name: str, start: Start = "end"
    ) -> bool:
        """A durable subscription, which lasts until `unsubscribe` and holds what it has not read
        (unless the topic drops its oldest). True if it is new; one that is there stays as it is.
        The topic may come to life by it."""
        self._check_open()
        check_name(name)
        return await self._changes.carry_through(self._subscribe(name, topic_name, start))

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """UnknownSubscription. With its last subscription an ephemeral topic goes."""
        self._check_open()
        await self._changes.carry_through(self._unsubscribe(name, topic_name))

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int = 0,
    ) -> Message | None:
        """The next message, if `last_id` is the id of the last one sent; otherwise that one again.
        None if there is nothing, after waiting so long. InvalidMessageId, UnknownSubscription."""
        self._check_open()
        return await self._delivery.get(self.topic(topic_name), name, last_id, wait_ms)

    async def commit(self, caller: Caller, name: str, topic_name: str, message_id: str) -> None:
        """Everything of the message's partition up to and including it is done with."""
        self._check_open()
        topic = self.topic(topic_name)
        await self._changes.carry_through(self._delivery.commit(topic, name, message_id))

    async def seek(self, caller: Caller, name: str, topic_name: str, to: Start) -> None:
        """Go on from somewhere else, further on or back."""
        self._check_open()
        await self._changes.carry_through(self._delivery.seek(self.topic(topic_name), name, to))

    async def lag(self, caller: Caller, name: str, topic_name: str) -> int:
        """How many records are still to come, the outstanding one included."""
        self._check_open()
        return await self._delivery.lag(self.topic(topic_name), name)

    async def subscriptions(
        self, caller: Caller, *, name: str | None = None, topic_name: str | None = None
    ) -> list[Subscription]:
        self._check_open()
        topic_id = None if topic_name is None else self.topic(topic_name).id
        return self._delivery.subscriptions(name, topic_id)

    # --- how subscriptions change -----------------------------------------------------------

    async def _subscribe(self, name: str, topic_name: str, start: Start) -> bool:
        async with self._locks.hold(self._subscription_lock(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            if self._delivery.is_subscribed(topic, name):
                return False
            await self._delivery.subscribe(topic, name, start)
            return True

    async def _unsubscribe(self, name: str, topic_name: str) -> None:
        async with self._locks.hold(self._subscription_lock(name, topic_name)):
            topic = self.topic(topic_name)
            is_last = self._delivery.count(topic.id) == 1
            is_last = is_last and self._delivery.is_subscribed(topic, name)
            if is_last and topic.policy.ephemeral:
                # One change of the store: the subscription cannot be gone and the topic there.
                await self._topics.delete(topic_name)
            else:
                await self._delivery.unsubscribe(topic, name)

    def _subscription_lock(self, name: str, topic_name: str) -> tuple[str, ...]:
        """One at a time for a name; for all names where the first and the last one matter."""
        topic = self._topics.by_name.get(topic_name)
        policy = self.settings.default_policy if topic is None else topic.policy
        if policy.ephemeral:
            return "subscriptions", topic_name
        return "subscriptions", topic_name, name

    # --- helpers ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closing:
            raise _closing()

    async def _ensure(self, name: str) -> Topic:
        self._check_open()
        topic = self._topics.by_name.get(name)
        if topic is not None:
            return topic
        return await self._changes.carry_through(self._topics.ensure(name, subscribing=False))

    def _choose_partition(self, topic: Topic, key: bytes | None) -> int:
        if key is not None:
            return zlib.crc32(key) % topic.partitions  # as librdkafka does
        self._turn += 1
        return self._turn % topic.partitions

    async def _read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        self._check_open()
        if wait_ms <= 0:
            return await self._store.read(reads, max_bytes=max_bytes, min_bytes=min_bytes)
        return await self._waits.wait(
            self._store.read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)
        )

    def _on_topic_put(self, topic: Topic) -> None:
        self._delivery.follow(topic)
        self._retention.follow(topic)
        if topic.policy.counts_entries:
            self._counted.add(topic.name)
        else:
            self._counted.discard(topic.name)

    async def _on_topic_deleted(self, topic: Topic) -> None:
        self._counted.discard(topic.name)
        self._retention.forget(topic.id, UnknownTopic(f"topic {topic.name} was deleted"))
        await self._delivery.forget(topic)

    def _on_cursor_moved(self, key: PartitionKey) -> None:
        self._retention.cursor_moved(key)

    async def _clean_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self.settings.clean_interval_ms / 1000)
            try:
                await self._retention.clean()
            except Exception:
                log.exception("cleaning failed; it is tried again")


def _closing() -> BrokerClosing:
    return BrokerClosing("the broker is closing: try again when it is back")
