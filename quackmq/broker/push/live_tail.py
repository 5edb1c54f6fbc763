"""New entries of topics with push subscriptions: one reader per topic, for all of them.

A live tail waits for appends to a topic and holds the newest batches in a window for each partition
(`window.py`). Then it notifies all listeners, once for all batches that arrived together. A hundred
subscribers of a topic therefore cost one read and one decoding of each batch. A live tail exists
while it has listeners.

It also knows which entries are live: a topic's `live_for_ms` and `live_entries` decide which
offsets a live subscription skips. The age of an entry is the time since its append. Ages may lag by
a thousandth of δ and by the time of a wake-up, so an entry may be live a moment too long, but never
too short.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Protocol

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.lifecycle import Waits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.page import Reader
from quackmq.broker.log.service import LogService
from quackmq.broker.push.window import Window
from quackmq.broker.retention.marks import AppendAgeIndex
from quackmq.clock import Clock
from quackmq.errors import BrokerClosing, NotFound, QuackError
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class Listener(Protocol):
    def tell(self) -> None:
        """Notify the listener that there may be new entries."""


class Feeds:
    def __init__(
        self,
        store: Store,
        log_service: LogService,
        clock: Clock,
        decoded: DecodedBatches,
    ) -> None:
        self.store = store
        self.decoded = decoded
        self._read = log_service.read
        self._clock = clock
        self._feeds: dict[uuid.UUID, LiveTail] = {}

    async def listen(self, topic: Topic, listener: Listener) -> LiveTail:
        """Register a listener; return the topic's live tail, which knows the present end of each
        partition."""
        feed = self._feeds.get(topic.id)
        if feed is None:
            feed = self._feeds[topic.id] = LiveTail(topic, self.store, self._read, self._clock)
            self._share()
        feed.listeners[listener] = None
        try:
            await feed.ready()
        except BaseException:
            self.leave(feed, listener)
            raise
        return feed

    def leave(self, feed: LiveTail, listener: Listener) -> None:
        feed.listeners.pop(listener, None)
        if not feed.listeners and self._feeds.get(feed.topic.id) is feed:
            del self._feeds[feed.topic.id]
            feed.stop()
            self._share()

    async def first_live(self, topic: Topic, partition: int) -> int:
        """Return the first live offset of a partition; its end if there is none. Ask the store; no
        live tail is needed."""
        policy, key = topic.policy, PartitionKey(topic.id, partition)
        offsets = await self.store.offsets(key)
        first, end = offsets.first, offsets.stable  # records of open transactions come later
        if policy.live_for_ms is not None:
            since_ms = self._clock.before(policy.live_for_ms) + 1
            found = await self.store.offset_for_time(key, since_ms, "append")
            first = end if found is None else max(first, min(found.offset, end))
        if policy.live_entries is not None:
            first = max(first, end - policy.live_entries)
        return first

    def topic_changed(self, topic: Topic) -> None:
        """Give the live tail of an altered topic its new partitions and policy."""
        feed = self._feeds.get(topic.id)
        if feed is not None:
            feed.follow(topic)

    def trimmed(self, key: PartitionKey, first: int) -> None:
        """Follow a trim: stop serving trimmed entries from memory."""
        feed = self._feeds.get(key.topic_id)
        if feed is not None and key.partition < len(feed.windows):
            window = feed.windows[key.partition]
            window.first = max(window.first, first)

    def topic_deleted(self, topic_id: uuid.UUID) -> None:
        """Stop the live tail of a deleted topic."""
        feed = self._feeds.pop(topic_id, None)
        if feed is not None:
            feed.stop()
            self._share()

    async def close(self) -> None:
        feeds = list(self._feeds.values())
        self._feeds.clear()
        for feed in feeds:
            feed.stop()
        tasks = [feed.task for feed in feeds if feed.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _share(self) -> None:
        share = limits.FEED_BYTES // max(1, len(self._feeds))
        for feed in self._feeds.values():
            feed.max_bytes = max(limits.FEED_TOPIC_BYTES, share)


class LiveTail:
    def __init__(self, topic: Topic, store: Store, read: Reader, clock: Clock) -> None:
        self.topic = topic
        self.windows: list[Window] = []
        self.listeners: dict[Listener, None] = {}
        self.max_bytes = limits.FEED_BYTES
        self.task: asyncio.Task[None] | None = None
        self._ages: list[AppendAgeIndex | None] = []
        self._store = store
        self._read = read
        self._clock = clock
        self._waits = Waits()
        self._lock = asyncio.Lock()
        self._is_stopped = False

    async def ready(self) -> None:
        """Wait until the offsets of every partition are known; then start reading."""
        while len(self.windows) < self.topic.partitions:
            async with self._lock:
                await self._begin_windows()
        if self.task is None and not self._is_stopped:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def follow(self, topic: Topic) -> None:
        """Follow an altered topic: its new partitions and its policy."""
        if topic.policy.live_for_ms != self.topic.policy.live_for_ms:
            self._ages = [self._new_ages(topic, window.end) for window in self.windows]
        self.topic = topic
        self._waits.end(_Altered())

    def stop(self) -> None:
        self._is_stopped = True
        if self.task is not None:
            self.task.cancel()

    @property
    def lets_age(self) -> bool:
        """Return whether entries can become too old for a live subscription."""
        policy = self.topic.policy
        return policy.live_for_ms is not None or policy.live_entries is not None

    def live_from(self, partition: int) -> int:
        """Return the first live offset of a partition, as far as is known."""
        policy, window, ages = self.topic.policy, self.windows[partition], self._ages[partition]
        live_from = 0 if ages is None else ages.advance(self._now_for(ages))
        if policy.live_entries is not None:
            live_from = max(live_from, window.end - policy.live_entries)
        return min(live_from, window.end)

    async def look_at_ages(self, partition: int) -> None:
        """Ask the store for the age of entries from before this live tail, if it is time to ask."""
        ages = self._ages[partition]
        if ages is None or (time_ms := ages.asks(self._now_for(ages))) is None:
            return
        key = self.windows[partition].key
        found = await self._store.offset_for_time(key, time_ms, "append")
        ages.learn(found, self._now_for(ages))

    def asks_ages(self, partition: int) -> bool:
        ages = self._ages[partition]
        return ages is not None and ages.asks(self._now_for(ages)) is not None

    # --- implementation -----------------------------------------------------------------------

    def _now_for(self, ages: AppendAgeIndex) -> int:
        """Return the time by which this index judges ages."""
        return self._clock.before(ages.age_ms) + ages.age_ms

    async def _begin_windows(self) -> None:
        while len(self.windows) < self.topic.partitions:
            key = PartitionKey(self.topic.id, len(self.windows))
            offsets = await self._store.offsets(key)
            self._ages.append(self._new_ages(self.topic, offsets.stable))
            self.windows.append(Window(key, offsets.first, offsets.stable))

    def _new_ages(self, topic: Topic, end: int) -> AppendAgeIndex | None:
        live_for_ms = topic.policy.live_for_ms
        return None if live_for_ms is None else AppendAgeIndex(live_for_ms, end)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow_log()
            except _Altered:
                continue
            except (BrokerClosing, NotFound):
                return  # the push registry informs the channels
            except QuackError as error:
                log.warning("new entries of topic %s wait: %s", self.topic.name, error)
            except Exception:
                log.exception("following topic %s failed; it is tried again", self.topic.name)
            await asyncio.sleep(limits.FEED_RETRY_MS / 1000)

    async def _follow_log(self) -> None:
        while True:
            if len(self.windows) < self.topic.partitions:
                await self.ready()
                self._tell()
            reads = [
                Read(window.key, window.end, limits.FEED_READ_BYTES, committed=True)
                for window in self.windows
            ]
            slices = await self._waits.wait(
                self._read(
                    reads, max_bytes=limits.FEED_READ_BYTES, wait_ms=shared_limits.READ_WAIT_MS
                )
            )
            is_changed = False
            try:
                for window, part in zip(self.windows, slices, strict=False):
                    if part.chunks or part.error is not None:
                        is_changed |= await self._take_in(window, part)
            finally:  # notify listeners of the other partitions even if one cannot be read
                if is_changed:
                    self._tell()

    async def _take_in(self, window: Window, part: Slice) -> bool:
        if part.error is not None:
            offsets = await self._store.offsets(window.key)
            if offsets.stable <= window.end and offsets.first <= window.end:
                raise part.error
            # A subscription that reads the skipped offsets gets their error.
            window.begin_anew(offsets.first, offsets.stable)
        elif not window.follow(part):
            return False
        window.shrink(self.max_bytes // len(self.windows))
        ages = self._ages[window.key.partition]
        if ages is not None:
            ages.add(window.end, self._clock.now_ms())
        return True

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener.tell()


class _Altered(Exception):
    """The topic was altered while its live tail waited for a read."""
