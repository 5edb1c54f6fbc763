"""The broker: builds its parts and offers them to protocols. Every call names its caller.

A topic is a partitioned, append-only log of record batches. Protocols that work with batches
publish and read them here. Protocols that work with single messages use `broker.messages`,
subscriptions and `broker.pushing`. Only the store keeps durable state.

`Broker.__init__` builds the parts in the order in which they use each other: each part receives
only parts that were built before it.

Promised: a change is durable when its call returns, as the store promises it. A change that has
begun is finished, also if its caller is cancelled. Publishing to a topic whose policy counts
nothing costs nothing extra. No wait polls. Calls after `close`, and waits during it, raise
BrokerClosing.

Not thread-safe: call from the event loop that `open` ran on. Time is passed in: a `Clock` for
timestamps and ages; waits use the loop's clock.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quackmq.broker.archive.service import Archives
from quackmq.broker.connections import Connections
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.groups.service import Groups
from quackmq.broker.housekeeping import Cleaner
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.listener_notes import Notes
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.epoch_lookup import EpochEnd
from quackmq.broker.log.live_reads import LiveReads
from quackmq.broker.log.service import LogService
from quackmq.broker.publish.messages import Messages
from quackmq.broker.publish.producer_ids import ProducerIds
from quackmq.broker.publish.service import PublishService
from quackmq.broker.push.flusher import ProgressFlusher
from quackmq.broker.push.live_tail import LiveTails
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.service import PushService
from quackmq.broker.push.unacknowledged import Unacknowledged
from quackmq.broker.queue_registrations import Registrations
from quackmq.broker.retention.hold_leases import HoldLeases
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.staging.service import Staging
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.group_cursors import GroupCursors
from quackmq.broker.subscriptions.name_modes import NameModes
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.subscriptions.receipts import Receipts
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.subscriptions.service import SubscriptionService
from quackmq.broker.timekeeping import Timekeeping
from quackmq.broker.topic_defaults import TopicDefaults
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.service import Transactions
from quackmq.clock import Clock
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.subscription import Message, Start, Subscription, SubscriptionLag
from quackmq.model.topic import (
    Append,
    AppendResult,
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

if TYPE_CHECKING:  # these load pyarrow, which a broker without an archive does not need
    from quackmq.archive.archiving.archiver import Archiver
    from quackmq.archive.archiving.builder import FileBuilder
    from quackmq.archive.tiered_store import TieredStore


class Broker:
    def __init__(
        self,
        store: Store,
        settings: BrokerSettings = BrokerSettings(),  # noqa: B008  (frozen)
        clock: Callable[[], int] | None = None,
        archive: TieredStore | None = None,
        file_builder: FileBuilder | None = None,
    ) -> None:
        """`clock` is the store's clock; the default is the system's. `archive` is `store` if that
        has an archive; `file_builder` builds its files, by default in a thread of this process."""
        self.settings = settings
        self._store = store
        #: Names the store in messages.
        self.store_kind = store.kind
        self._clock = clock = Clock.of_system() if clock is None else Clock.of(clock)
        now_ms = clock.now_ms

        # Each part is built after the parts that it calls.
        self._lifecycle = lifecycle = Lifecycle()
        self.topic_defaults = topic_defaults = TopicDefaults(store, settings, lifecycle)
        self._topics = topics = Topics(store, settings, topic_defaults)
        self.timekeeping = Timekeeping(store, clock, lifecycle)

        # Reading, and what holds retention.
        self._decoded = decoded = DecodedBatches()
        self._log = log = LogService(store, topics, decoded, lifecycle)
        self.live_reads = LiveReads(store)
        live_tails = LiveTails(store, log, clock, decoded)
        self._cursors = cursors = Cursors(store, topics.by_id)
        self._registry = registry = SubscriptionRegistry()
        self._holds = holds = Holds(registry, cursors)
        self._retention = retention = Retention(
            store,
            clock,
            holds,
            settings.full_topic_wait_ms,
            live_tails.trimmed,
            lifecycle,
            archive,
        )
        #: What keeps topics from being trimmed: errors, and holds.
        self.retention_failures = retention.failures
        self.held_back = retention.held_back

        # Subscriptions and groups.
        receipts = Receipts(store, topics, now_ms, cursors, retention)
        self._coordinator = coordinator = Coordinator(
            store, topics, now_ms, settings.group_initial_delay_ms, lifecycle
        )
        names = NameModes(registry, coordinator)
        self._pull = pull = PullService(
            store,
            decoded,
            now_ms,
            log,
            topics.by_id,
            cursors,
            registry,
            names,
            coordinator,
            receipts,
            holds,
            retention,
        )
        self._flusher = flusher = ProgressFlusher(topics, receipts, holds, retention)
        self._push = push = PushRegistry(
            store, topics, receipts, registry, holds, retention, flusher
        )
        self._subscriptions = subscriptions = SubscriptionService(
            topics, registry, pull, push, cursors, names, holds, topic_defaults, now_ms, lifecycle
        )
        self.pushing = PushService(topics, push, flusher, subscriptions, live_tails, lifecycle)
        self.unacknowledged = Unacknowledged(
            topics, log, push, flusher, holds, self.pushing, clock, lifecycle
        )
        self.groups = Groups(
            coordinator,
            cursors,
            pull,
            subscriptions,
            GroupCursors(store, cursors, registry, receipts, retention),
            names,
            topics,
            clock,
            holds,
            retention,
            lifecycle,
        )

        # Writing.
        self._producer_ids = producer_ids = ProducerIds(store)
        self.transactions = Transactions(
            store, topics, self.groups, producer_ids, clock, retention.count_append, lifecycle
        )
        self.staging = Staging(
            store, topics, producer_ids, clock, retention.count_append, registry.count, lifecycle
        )
        self._publishing = publishing = PublishService(
            store, topics, registry, retention, self.transactions, lifecycle
        )
        self.messages = Messages(
            publishing, store, topics, cursors, coordinator, decoded, log, clock, lifecycle
        )
        self.registrations = Registrations(
            subscriptions, registry, store, topics, topic_defaults, pull, cursors, lifecycle
        )

        # What listeners share.
        self.notes = Notes(store, lifecycle)
        self.connections = Connections()
        #: Addresses of the open listeners, by name.
        self.listener_addresses: dict[str, tuple[str, int]] = {}
        #: Called with each topic that is loaded, created or altered.
        self.topic_watchers = topics.watchers

        self._archiver = None if archive is None else self._make_archiver(archive, file_builder)
        #: None if the store has no archive.
        self.archive: Archives | None = None
        if archive is not None and self._archiver is not None:
            self.archive = Archives(archive, self._archiver, topics, now_ms, settings, lifecycle)

        leases = HoldLeases(topics, cursors, subscriptions, clock, lifecycle)
        self._cleaner = Cleaner(
            (
                leases,
                retention,
                self.pushing,
                self.groups,
                self.transactions,
                self.staging,
                self.timekeeping,
            ),
            settings.clean_interval_ms,
        )
        self._cleaning: asyncio.Task[None] | None = None
        self._archiving: asyncio.Task[None] | None = None

        # Who follows topics, in the order in which they are called.
        topics.on_changed += [
            pull.topic_changed,
            push.topic_changed,
            live_tails.topic_changed,
            retention.topic_changed,
            publishing.topic_changed,
        ]
        topics.on_deleted += [
            publishing.topic_deleted,
            retention.topic_deleted,
            cursors.topic_deleted,
            self.messages.topic_deleted,
        ]
        if self._archiver is not None:
            topics.on_deleted.append(self._archiver.forget)
        topics.on_removal += [
            pull.remove_topic,
            self.pushing.remove_topic,
            self.registrations.remove_topic,
        ]

    async def open(self) -> None:
        """Load the state from the store; start housekeeping and archiving."""
        assert self._cleaning is None, "a broker is opened once"
        await self.timekeeping.load()
        await self.topic_defaults.load()
        await self._topics.load()
        await self._cursors.load()
        await self._coordinator.load()
        await self._pull.load()
        await self._push.load()
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
        """Refuse new calls, end all waits and finish all changes. The caller closes the store."""
        self._lifecycle.begin_closing()
        background = [task for task in (self._cleaning, self._archiving) if task is not None]
        for task in background:
            task.cancel()
        if background:
            await asyncio.wait(background)
        if self.archive is not None:
            await self.archive.stop()

        self._lifecycle.end_waits()
        self.live_reads.close()
        self._coordinator.stop()
        self.transactions.stop()
        self._retention.stop()
        await self.pushing.close()
        await self._lifecycle.finish()

        if self.archive is not None:
            await self.archive.close()
        if self._archiver is not None:
            await self._archiver.close()
        self._coordinator.close()
        self.transactions.close()
        await self._decoded.close()

    @property
    def cluster_id(self) -> str:
        return self._store.cluster_id

    # --- topics -----------------------------------------------------------------------------

    def topics(self) -> Mapping[str, Topic]:
        """Return all topics by name, as a view that follows changes."""
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
        """Create a topic; without `policy` it gets the defaults of its name. With `validate_only`,
        return the topic that would be created, with an id of zeros. TopicExists, IllegalTopicName,
        InvalidRequest, LimitReached."""
        self._lifecycle.check_open()
        partitions = self.settings.default_partitions if partitions is None else partitions
        policy = self.topic_defaults.policy_for(name) if policy is None else policy
        if validate_only:
            self._topics.check_new(name, partitions)
            return Topic(uuid.UUID(int=0), name, partitions, policy, self._clock.now_ms())
        return await self._lifecycle.run_shielded(self._topics.create(name, partitions, policy))

    async def ensure_topic(self, caller: Caller, name: str) -> Topic:
        """Return the topic of this name; create it if topics are created by their first use."""
        return await self._publishing.ensure_topic(name)

    async def alter_topic(
        self,
        caller: Caller,
        name: str,
        *,
        partitions: int | None = None,
        policy: Policy | Callable[[Policy], Policy] | None = None,
    ) -> Topic:
        """Add partitions, or change the policy. A function as `policy` gets the present policy and
        returns the new one; no other change of the topic comes in between. Raise UnknownTopic,
        InvalidRequest or LimitReached."""
        self._lifecycle.check_open()
        return await self._lifecycle.run_shielded(self._topics.alter(name, partitions, policy))

    async def delete_topic(self, caller: Caller, name: str) -> None:
        """Delete a topic with its records and subscriptions. UnknownTopic."""
        self._lifecycle.check_open()
        await self._lifecycle.run_shielded(self._topics.delete(name))

    # --- publishing -------------------------------------------------------------------------

    def publish(
        self,
        caller: Caller,
        topic: Topic,
        partition: int,
        batch: Batch,
        *,
        owned: bool = False,
        wait_for_room: bool = True,
    ) -> asyncio.Future[AppendResult]:
        """Append a batch that has passed `Batch.parse`, under the topic's policy.

        The order of calls is the order in the partition. The bytes are copied before this returns,
        or kept if the caller hands over their buffer (`owned`, see `Append`). Without
        `wait_for_room`, a full topic raises TopicFull at once, even if its policy is to wait.

        Errors are raised here or by the future: UnknownTopic, UnknownPartition, CorruptBatch,
        UnsupportedBatch, NoSubscriber, TopicFull, RecordTooLarge (more bytes than the topic takes,
        or more records than it can ever hold), and those of `Store.append`. A transactional batch
        must have passed `transactions.admit`, else InvalidTransactionState. Callers limit
        `pending_bytes`.
        """
        return self._publishing.publish(
            topic, partition, batch, owned=owned, wait_for_room=wait_for_room
        )

    def publish_together(
        self,
        caller: Caller,
        topic: Topic,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
    ) -> Awaitable[list[AppendResult]]:
        """Append batches of one topic and set cursors as one unit: all of it or nothing. The
        batches are in no transaction, and their bytes must not change until this is done.
        Otherwise as `publish`."""
        return self._publishing.publish_together(topic, appends, cursors)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are published and not yet durable. Above `limits.PENDING_BYTES`, callers await
        `room()` before they publish more."""
        return self._store.pending_bytes

    async def room(self) -> None:
        await self._publishing.room()

    def check_writable(self) -> None:
        """Raise BrokerClosing, the error that made the store read-only, or StoreUnavailable."""
        self._publishing.check_writable()

    async def new_producer_id(self, caller: Caller) -> int:
        """Return a producer id that was never given before."""
        self._lifecycle.check_open()
        return await self._lifecycle.run_shielded(self._producer_ids.next())

    # --- reading ----------------------------------------------------------------------------

    def read(
        self,
        caller: Caller,
        reads: Sequence[Read],
        *,
        max_bytes: int,
        min_bytes: int = 1,
        wait_ms: int = 0,
    ) -> Coroutine[Any, Any, list[Slice]]:
        """Read batches as `Store.read` does; log damaged ones. See
        `quackmq.model.topic.is_committed` for what a reader of committed records leaves out."""
        return self._log.read_reporting_damage(
            reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
        )

    async def offsets(self, caller: Caller, key: PartitionKey) -> Offsets:
        return await self._log.offsets(key)

    async def offset_for_time(
        self, caller: Caller, key: PartitionKey, timestamp_ms: int
    ) -> OffsetTime | None:
        """Return the first record with this timestamp or a later one; None if there is none."""
        return await self._log.offset_for_time(key, timestamp_ms)

    async def append_times(
        self, caller: Caller, key: PartitionKey, first: int, next: int
    ) -> Sequence[OffsetTime]:
        """Return the points at which the append time changes, as `Store.append_times` does."""
        return await self._log.append_times(key, first, next)

    async def max_timestamp(self, caller: Caller, key: PartitionKey) -> OffsetTime | None:
        """Return the first record with the greatest timestamp; None if no record has one."""
        return await self._log.max_timestamp(key)

    async def epoch_end(self, caller: Caller, key: PartitionKey, epoch: int) -> EpochEnd | None:
        """Return where a leader epoch ended; None if it has not begun."""
        return await self._log.epoch_end(key, epoch)

    async def producers(self, caller: Caller, key: PartitionKey) -> Mapping[int, Producer]:
        """Return the state of a partition's producers, by producer id."""
        return await self._log.producers(key)

    # --- retention --------------------------------------------------------------------------

    async def trim(self, caller: Caller, key: PartitionKey, before: int) -> int:
        """Delete the records before an offset, also those that subscriptions hold. Return the first
        offset that is left. Raise OffsetOutOfRange beyond the end."""
        self._lifecycle.check_open()
        self._topics.of(key)
        return await self._lifecycle.run_shielded(self._retention.trim(key, before))

    async def clean(self) -> None:
        """Run all housekeeping now, without waiting for its interval."""
        self._lifecycle.check_open()
        await self._cleaner.clean()

    def consumers_left(
        self, caller: Caller, key: PartitionKey, offsets: Sequence[int]
    ) -> list[int]:
        """Return for each offset how many subscriptions and holding groups have not consumed it."""
        self._topics.of(key)
        return self._holds.consumers_left(key, offsets)

    # --- subscriptions ----------------------------------------------------------------------

    async def subscribe(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        start: Start = "end",
        receipts: bool | None = None,
    ) -> bool:
        """Create a durable subscription; return whether it is new. It may create the topic.

        The subscription lasts until `unsubscribe`. It holds the records that it has not read,
        unless the topic drops its oldest. An existing subscription stays as it is, except that
        `receipts`, if given, sets whether it leaves receipts, also for a push subscription."""
        return await self._subscriptions.subscribe(name, topic_name, start, receipts)

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """End a subscription. An ephemeral topic is deleted with its last subscription.
        UnknownSubscription."""
        await self._subscriptions.unsubscribe(name, topic_name)

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int = 0,
        *,
        raise_on_loss: bool = False,
    ) -> Message | None:
        """Return the next message if `last_id` is the id of the message that was sent last.
        Otherwise, also for an invalid id, return the message that was sent last again. Return None
        if there is no message after `wait_ms`. Raise UnknownSubscription or NameInOtherMode. With
        `raise_on_loss`, raise EntriesLost before a message that has `lost`."""
        return await self._subscriptions.get(
            caller, name, topic_name, last_id, wait_ms, raise_on_loss
        )

    async def commit(self, caller: Caller, name: str, topic_name: str, message_id: str) -> None:
        """Acknowledge a message and all before it in its partition."""
        await self._subscriptions.commit(caller, name, topic_name, message_id)

    async def seek(self, caller: Caller, name: str, topic_name: str, to: Start) -> None:
        """Move a subscription to another place, forward or back."""
        await self._subscriptions.seek(caller, name, topic_name, to)

    async def lag(self, caller: Caller, name: str, topic_name: str) -> int:
        """Return how many records are still to come, including the outstanding one."""
        return (await self.lag_and_losses(caller, name, topic_name)).lag

    async def lag_and_losses(self, caller: Caller, name: str, topic_name: str) -> SubscriptionLag:
        """Return the lag of a subscription, and how many records it has lost."""
        return await self._subscriptions.lag_and_losses(name, topic_name)

    async def subscriptions(
        self,
        caller: Caller,
        *,
        name: str | None = None,
        topic_name: str | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int | None = None,
    ) -> list[Subscription]:
        """Return subscriptions, sorted by name and topic: those after `after`, at most `limit`."""
        return self._subscriptions.subscriptions(name, topic_name, after, limit)

    # --- helpers ----------------------------------------------------------------------------

    def _make_archiver(self, archive: TieredStore, file_builder: FileBuilder | None) -> Archiver:
        """Return a new archiver, which follows the topics of this broker."""
        from quackmq.archive.archiving.archiver import Archiver

        name_of = self.transactions.name_of
        archiver = Archiver(archive, self.topics, self._clock, name_of, file_builder)
        self.topic_watchers.add(archiver.follow)
        return archiver
