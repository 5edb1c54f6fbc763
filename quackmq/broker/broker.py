"""What protocols see: topics, batches, offsets, subscriptions. Every call names its caller.

A topic is a partitioned, append-only log of record batches. Protocols that speak in batches publish
and read them whole; for single messages there are `broker.messages` and subscriptions. The broker
keeps nothing durable itself: the store does. The parts are built in `Broker.__init__`.

Promised: what a call has answered is durable, as the store promises it; a topic whose policy counts
nothing costs a publish nothing; nobody waits by asking again and again. A change that has begun is
carried through, also if its caller goes away. A call after `close` raises BrokerClosing, and so
does every wait that `close` meets.

Not thread-safe: call from the event loop that `open` ran on. Time is passed in: a `Clock` for
stamps and ages, and the loop's own for waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from quackmq.broker.archive.service import Archives
from quackmq.broker.connections import Connections
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.groups.service import Groups
from quackmq.broker.housekeeping import Cleaner
from quackmq.broker.lifecycle import Changes, Waits, only
from quackmq.broker.listener_notes import Notes
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.epoch_lookup import EpochEnd, epoch_end
from quackmq.broker.log.live_reads import LiveReads
from quackmq.broker.log.time_lookup import first_at, latest
from quackmq.broker.publish.admission import check_takes
from quackmq.broker.publish.messages import Messages
from quackmq.broker.publish.producer_ids import ProducerIds
from quackmq.broker.push.live_tail import Feeds
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.service import PushService
from quackmq.broker.queue_registrations import Registrations
from quackmq.broker.retention.hold_leases import HoldLeases
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.staging.service import Staging
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.name_modes import Modes
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.subscriptions.receipts import Receipts
from quackmq.broker.subscriptions.service import SubscriptionService, check_subscriber
from quackmq.broker.timekeeping import Timekeeping
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.service import Transactions
from quackmq.clock import Clock
from quackmq.errors import BrokerClosing, DamagedData, UnknownTopic, UnsupportedBatch
from quackmq.model.log_transactions import TRANSACTION_FLAGS
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.subscription import Message, Start, Subscription, SubscriptionLag
from quackmq.model.topic import (
    Append,
    Appended,
    Cursor,
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    Topic,
)
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

if TYPE_CHECKING:  # what loads pyarrow, which a broker without an archive does without
    from quackmq.archive.archiving.archiver import Archiver
    from quackmq.archive.archiving.builder import FileBuilder
    from quackmq.archive.tiered_store import TieredStore

log = logging.getLogger(__name__)


class Broker:
    def __init__(
        self,
        store: Store,
        settings: BrokerSettings = BrokerSettings(),  # noqa: B008  (frozen)
        clock: Callable[[], int] | None = None,
        archive: TieredStore | None = None,
        workshop: FileBuilder | None = None,
    ) -> None:
        """`clock` is the store's, or by default the system's. `archive` is the store once more,
        where it has one; its files are made in `workshop`, or in a thread of this process."""
        self.settings = settings
        self._store = store
        self._clock = clock = Clock.of_system() if clock is None else Clock.of(clock)
        now_ms = clock.now_ms
        self._topics = Topics(store, settings, self._on_topic_put, self._on_topic_deleted)
        self._decoded = DecodedBatches()
        self._cursors = Cursors(store, self._topics.by_id)
        self._coordinator = Coordinator(
            store, self._topics, now_ms, settings.group_initial_delay_ms
        )
        self._modes = Modes(self._coordinator.holder)
        receipts = Receipts(store, self._topics, now_ms, lambda *put: self._retention.note(*put))
        self._pushed = PushRegistry(store, self._topics, receipts, self._on_cursor_moved)
        self._delivery = PullService(
            store,
            self._decoded,
            now_ms,
            self._read,
            self._topics.by_id,
            self._cursors,
            self._on_cursor_moved,
            self._coordinator,
            receipts,
            self._pushed.check_free,
            self._pushed.room,
        )
        self._subscribing = SubscriptionService(
            self._topics, self._delivery, self._pushed, self._cursors, self._modes, settings, now_ms
        )
        self._changes = Changes()
        feeds = Feeds(store, self._read, clock, self._decoded)
        self.pushing = PushService(
            self._topics, self._pushed, self._subscribing, feeds, self._changes
        )
        self.groups = Groups(
            self._coordinator,
            self._cursors,
            self._delivery,
            self._subscribing,
            self._modes,
            self._topics,
            clock,
            self._on_cursor_moved,
            self._pushed.check_free,
        )
        self._holds = Holds(self._delivery, self._pushed, self.groups, self._cursors)
        self._retention = Retention(
            store, clock, self._holds, settings.full_topic_wait_ms, self.pushing.trimmed, archive
        )
        #: What keeps topics from letting go of what they should: failures, and holds.
        self.retention_failures = self._retention.failures
        self.held_back = self._retention.held_back
        self._producer_ids = ProducerIds(store)
        self.transactions = Transactions(
            store, self._topics, self.groups, self._producer_ids, clock, self._retention.note
        )
        counted = (self._retention.note, self._subscribing.count)
        self.staging = Staging(store, self._topics, self._producer_ids, clock, *counted)
        self.messages = Messages(
            self,
            store,
            self._topics,
            self._cursors,
            self._coordinator,
            self._decoded,
            self._read,
            clock,
        )
        self.registrations = Registrations(self, store, self._topics, self._delivery, self._cursors)
        self.notes = Notes(store)
        #: Called with every topic that comes or is altered, for doors that follow all of them.
        self.topic_watchers: set[Callable[[Topic], None]] = set()
        #: Where doors listen, by name, as whoever opens them says: some tell of each other.
        self.doors: dict[str, tuple[str, int]] = {}
        self.connections = Connections()
        #: The names of topics that publishing to goes through retention.
        self._counted: set[str] = set()
        self._waits = Waits()
        self.live_reads = LiveReads(store)
        self._archiver = None if archive is None else self._make_archiver(archive, workshop)
        #: None where the store has none.
        self.archive: Archives | None = None
        if archive is not None and self._archiver is not None:
            self.archive = Archives(archive, self._archiver, self._topics, now_ms, settings)
        self.timekeeping = Timekeeping(store, clock)
        leases = HoldLeases(self._topics, self._cursors, self._subscribing, self._changes, clock)
        others = (self.pushing, self.groups, self.transactions, self.staging, self.timekeeping)
        self._cleaner = Cleaner((leases, self._retention, *others), settings.clean_interval_ms)
        self._cleaning: asyncio.Task[None] | None = None
        self._archiving: asyncio.Task[None] | None = None
        self._is_closing = False

    async def open(self) -> None:
        """Take up what the store holds, begin to clean and to archive."""
        assert self._cleaning is None, "a broker is opened once"
        await self.timekeeping.load()
        await self._topics.load()
        await self._cursors.load()
        await self._coordinator.load()
        await self._delivery.load()
        await self._pushed.load()
        self.groups.load()
        await self.transactions.load()
        await self.staging.load()
        await self.registrations.load()
        loop = asyncio.get_running_loop()
        self._cleaning = loop.create_task(self._cleaner.run())
        if self._archiver is not None:
            self._archiving = loop.create_task(self._archiver.run())
        if self.archive is not None:
            self.archive.open()

    async def close(self) -> None:
        """End every wait, finish what was begun. The store stays open: it is its opener's."""
        self._is_closing = True
        working = [task for task in (self._cleaning, self._archiving) if task is not None]
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working)
        if self.archive is not None:
            await self.archive.close()
        if self._archiver is not None:
            await self._archiver.close()
        self._waits.end(_closing())
        self.live_reads.close()
        await self.pushing.close()
        await self.staging.close()
        await self.transactions.close()
        await self.groups.close()
        await self._retention.close()
        await self.messages.close()
        await self.registrations.close()
        await self.notes.close()
        await self._decoded.close()
        await self.timekeeping.close()
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
            return Topic(uuid.UUID(int=0), name, partitions, policy, self._clock.now_ms())
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
        policy: Policy | Callable[[Policy], Policy] | None = None,
    ) -> Topic:
        """More partitions, or another policy: a function makes it of the one that is there, which
        nobody changes meanwhile. UnknownTopic, InvalidRequest, LimitReached."""
        self._check_open()
        return await self._changes.carry_through(self._topics.alter(name, partitions, policy))

    async def delete_topic(self, caller: Caller, name: str) -> None:
        """The topic goes, with all that it holds and all its subscriptions. UnknownTopic."""
        self._check_open()
        await self._changes.carry_through(self._topics.delete(name))

    # --- batches ----------------------------------------------------------------------------

    def publish(
        self,
        caller: Caller,
        topic: Topic,
        partition: int,
        batch: Batch,
        *,
        owned: bool = False,
        waits: bool = True,
    ) -> Awaitable[Appended]:
        """Append a batch that has passed `Batch.parse`, under the topic's policy.

        The order of calls is the order in the partition. The bytes are copied before this returns,
        or kept where their buffer is handed over (`owned`, see `Append`). Unless it `waits`,
        TopicFull comes at once also from a topic that would let it wait.
        Errors are raised here or by the awaitable: UnknownTopic, UnknownPartition, CorruptBatch,
        UnsupportedBatch, NoSubscriber, TopicFull, RecordTooLarge (more bytes than the topic takes,
        more records than it ever holds), and what `Store.append` raises. Callers mind
        `pending_bytes` as there. A transactional batch is taken when `transactions.admit` has let
        it in, else InvalidTransactionState.
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
        transaction = None
        if batch.attributes & TRANSACTION_FLAGS:
            if batch.is_control:
                raise UnsupportedBatch("control batches are the broker's own")
            transaction = self.transactions.check_admitted(key, batch)
        check_takes(topic, batch, self._subscribing.count)
        if topic.name in self._counted:
            if transaction is None:
                return self._retention.publish(key, batch, waits=waits)
            may_still = partial(self.transactions.check_admitted, key, serial=transaction)
            return self._retention.publish(key, batch, may_still)
        append = Append(key, batch, owned)
        return self._store.append_plain(append) or only(self._store.append((append,)))

    def publish_together(
        self,
        caller: Caller,
        topic: Topic,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
    ) -> Awaitable[list[Appended]]:
        """Batches of one topic, in no transaction, and cursors with them, as one unit: all of it or
        nothing. Otherwise as `publish`; bytes must stay as they are until it is answered."""
        self._check_open()
        for key, batch, _ in appends:
            check_takes(self._topics.of(key), batch, self._subscribing.count)
        if topic.name in self._counted:
            return self._retention.publish_together(appends, cursors)
        return self._store.append(appends, cursors)

    async def read(
        self,
        caller: Caller,
        reads: Sequence[Read],
        *,
        max_bytes: int,
        min_bytes: int = 1,
        wait_ms: int = 0,
    ) -> list[Slice]:
        """As `Store.read`; see `quackmq.broker.log.committed` for what a committed read leaves out.
        Damage is named in the log, too, once in a while: a peer may have no words for it."""
        slices = await self._read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)
        for (key, offset, _, _), part in zip(reads, slices, strict=True):
            if isinstance(part.error, DamagedData) and key.topic_id in self._topics.by_id:
                end = max(part.error.next_offset or 0, offset + 1)
                name = self._topics.by_id[key.topic_id].name
                self._decoded.quarantine(key, offset, end, name, part.error)
        return slices

    @property
    def pending_bytes(self) -> int:
        """Published and not yet durable; above `limits.PENDING_BYTES` a door awaits `room()`."""
        return self._store.pending_bytes

    async def room(self) -> None:
        self._check_open()
        await self._waits.wait(self._store.room())

    def check_writable(self) -> None:
        """Whether changes are taken at all: BrokerClosing, or what has happened to the store."""
        self._check_open()
        if self._store.failure is not None:
            raise self._store.failure.with_traceback(None)

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

    async def append_times(
        self, caller: Caller, key: PartitionKey, first: int, next: int
    ) -> Sequence[OffsetTime]:
        """From which offset on which append time, as `Store.append_times`: of what the log has."""
        self._check_open()
        self._topics.of(key)
        return await self._store.append_times(key, first, next)

    async def max_timestamp(self, caller: Caller, key: PartitionKey) -> OffsetTime | None:
        """The first of the records with the greatest timestamp; None if no record has one."""
        self._check_open()
        topic = self._topics.of(key)
        return await latest(self._store, self._decoded, key, topic.name)

    async def epoch_end(self, caller: Caller, key: PartitionKey, epoch: int) -> EpochEnd | None:
        """Where a leader's epoch ended; None for one that has not begun."""
        self._check_open()
        self._topics.of(key)
        return await epoch_end(self._store, key, epoch)

    async def producers(self, caller: Caller, key: PartitionKey) -> Mapping[int, Producer]:
        """What a partition remembers of its producers, by id."""
        self._check_open()
        self._topics.of(key)
        return await self._store.producers(key)

    async def trim(self, caller: Caller, key: PartitionKey, before: int) -> int:
        """Let go of what lies before an offset; the first offset that is left. OffsetOutOfRange
        beyond the end. Subscriptions do not hold what is trimmed so."""
        self._check_open()
        self._topics.of(key)
        return await self._changes.carry_through(self._retention.trim(key, before))

    async def new_producer_id(self, caller: Caller) -> int:
        """An id that nobody ever had or will have."""
        self._check_open()
        return await self._changes.carry_through(self._producer_ids.next())

    async def clean(self) -> None:
        """What the cleaner does at its intervals, now."""
        self._check_open()
        await self._cleaner.clean()

    # --- subscriptions ----------------------------------------------------------------------

    async def subscribe(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        start: Start = "end",
        receipts: bool | None = None,
    ) -> bool:
        """A durable subscription, which lasts until `unsubscribe` and holds what it has not read
        (unless the topic drops its oldest). True if it is new; one that is there stays as it is,
        but for the `receipts` that it leaves, if that is said, also where it is a pushed one. The
        topic may come to life by it."""
        self._check_open()
        check_subscriber(name)
        change = self._subscribing.subscribe(name, topic_name, start, receipts)
        return await self._changes.carry_through(change)

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """UnknownSubscription. With its last subscription an ephemeral topic goes."""
        self._check_open()
        await self._changes.carry_through(self._subscribing.unsubscribe(name, topic_name))

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int = 0,
        *,
        raises: bool = False,
    ) -> Message | None:
        """The next message, if `last_id` is the id of the last one sent; otherwise that one again.
        None if there is nothing after `wait_ms`. InvalidMessageId, UnknownSubscription,
        NameInOtherMode; with `raises` also EntriesLost, before a message that has `lost`."""
        self._check_open()
        topic = self.topic(topic_name)
        with self._by_last_id(caller, name, topic):
            message = await self._delivery.get(topic, name, last_id, wait_ms, raises=raises)
        if message is None or not topic.policy.keep_until_consumed:
            return message
        key = PartitionKey(topic.id, message.partition)
        (left,) = self._holds.consumers_left(key, [message.record.offset])
        return dataclasses.replace(message, consumers_left=left)

    async def commit(self, caller: Caller, name: str, topic_name: str, message_id: str) -> None:
        """Everything of the message's partition up to and including it is done with."""
        self._check_open()
        topic = self.topic(topic_name)
        with self._by_last_id(caller, name, topic):
            await self._changes.carry_through(self._delivery.commit(topic, name, message_id))

    async def seek(self, caller: Caller, name: str, topic_name: str, to: Start) -> None:
        """Go on from somewhere else, further on or back."""
        self._check_open()
        topic = self.topic(topic_name)
        with self._by_last_id(caller, name, topic):
            await self._changes.carry_through(self._delivery.seek(topic, name, to))

    async def lag(self, caller: Caller, name: str, topic_name: str) -> int:
        """How many records are still to come, the outstanding one included."""
        return (await self.standing(caller, name, topic_name)).lag

    async def standing(self, caller: Caller, name: str, topic_name: str) -> SubscriptionLag:
        """The lag, and how many records the subscription has lost."""
        self._check_open()
        return await self._subscribing.standing(self.topic(topic_name), name)

    def consumers_left(
        self, caller: Caller, key: PartitionKey, offsets: Sequence[int]
    ) -> list[int]:
        """Of each offset, how many subscriptions, and groups that hold, have yet to consume it."""
        self._topics.of(key)
        return self._holds.consumers_left(key, offsets)

    async def subscriptions(
        self,
        caller: Caller,
        *,
        name: str | None = None,
        topic_name: str | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int | None = None,
    ) -> list[Subscription]:
        """By name and topic; those behind a name and topic, and no more than so many, if asked."""
        self._check_open()
        topic_id = None if topic_name is None else self.topic(topic_name).id
        return self._subscribing.subscriptions(name, topic_id, after, limit)

    # --- helpers ----------------------------------------------------------------------------

    def _by_last_id(self, caller: Caller, name: str, topic: Topic) -> AbstractContextManager[None]:
        self._pushed.check_free(name)
        self._delivery.check_subscribed(topic, name)
        return self._modes.by_last_id(caller, name)

    def _check_open(self) -> None:
        if self._is_closing:
            raise _closing()

    async def _ensure(self, name: str) -> Topic:
        self._check_open()
        topic = self._topics.by_name.get(name)
        if topic is not None:
            return topic
        return await self._changes.carry_through(self._topics.ensure(name, subscribing=False))

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
        self.pushing.follow(topic)
        self._retention.follow(topic)
        if topic.policy.counts_entries:
            self._counted.add(topic.name)
        else:
            self._counted.discard(topic.name)
        for watcher in self.topic_watchers:
            watcher(topic)

    async def _on_topic_deleted(self, topic: Topic) -> None:
        self._counted.discard(topic.name)
        self._retention.forget(topic.id, UnknownTopic(f"topic {topic.name} was deleted"))
        self._cursors.forget(topic.id)
        self.messages.forget(topic)
        if self._archiver is not None:
            self._archiver.forget(topic)
        await self._delivery.forget(topic)
        await self.pushing.forget(topic)
        await self.registrations.forget(topic.id)

    def _make_archiver(self, archive: TieredStore, workshop: FileBuilder | None) -> Archiver:
        from quackmq.archive.archiving.archiver import Archiver

        name_of = self.transactions.name_of
        archiver = Archiver(archive, self.topics, self._clock, name_of, workshop)
        self.topic_watchers.add(archiver.follow)
        return archiver

    def _on_cursor_moved(self, key: PartitionKey) -> None:
        self._retention.cursor_moved(key)


def _closing() -> BrokerClosing:
    return BrokerClosing("the broker is closing: try again when it is back")
