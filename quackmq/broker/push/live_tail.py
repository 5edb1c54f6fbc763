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
    def notify(self) -> None:
        """Notify the listener that there may be new entries."""


class LiveTails:
    """The live tails of all topics that have listeners. They share one memory bound."""

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
        self._live_tails: dict[uuid.UUID, LiveTail] = {}

    async def listen(self, topic: Topic, listener: Listener) -> LiveTail:
        """Register a listener; return the topic's live tail. It knows the current end of each
        partition."""
        live_tail = self._live_tails.get(topic.id)
        if live_tail is None:
            live_tail = self._live_tails[topic.id] = LiveTail(
                topic, self.store, self._read, self._clock
            )
            self._share_memory()
        live_tail.listeners[listener] = None
        try:
            await live_tail.start()
        except BaseException:
            self.leave(live_tail, listener)
            raise
        return live_tail

    def leave(self, live_tail: LiveTail, listener: Listener) -> None:
        """Remove a listener; stop the live tail if it was the last one."""
        live_tail.listeners.pop(listener, None)
        if not live_tail.listeners and self._live_tails.get(live_tail.topic.id) is live_tail:
            del self._live_tails[live_tail.topic.id]
            live_tail.stop()
            self._share_memory()

    async def first_live(self, topic: Topic, partition: int) -> int:
        """Return the first live offset of a partition; its end if there is none. This asks the
        store, and needs no live tail."""
        policy, key = topic.policy, PartitionKey(topic.id, partition)
        offsets = await self.store.offsets(key)
        first, end = offsets.first, offsets.stable  # records of open transactions come later
        if policy.live_for_ms is not None:
            # `before` returns the last append time that is too old: the next one is live.
            since_ms = self._clock.before(policy.live_for_ms) + 1
            match = await self.store.offset_for_time(key, since_ms, "append")
            first = end if match is None else max(first, min(match.offset, end))
        if policy.live_entries is not None:
            first = max(first, end - policy.live_entries)
        return first

    def topic_changed(self, topic: Topic) -> None:
        """Give the live tail of an altered topic its new partitions and policy."""
        live_tail = self._live_tails.get(topic.id)
        if live_tail is not None:
            live_tail.update_topic(topic)

    def trimmed(self, key: PartitionKey, first: int) -> None:
        """Stop serving trimmed entries from memory. The log now begins at `first`."""
        live_tail = self._live_tails.get(key.topic_id)
        if live_tail is not None and key.partition < len(live_tail.windows):
            window = live_tail.windows[key.partition]
            window.first = max(window.first, first)

    def topic_deleted(self, topic_id: uuid.UUID) -> None:
        """Stop the live tail of a deleted topic."""
        live_tail = self._live_tails.pop(topic_id, None)
        if live_tail is not None:
            live_tail.stop()
            self._share_memory()

    async def close(self) -> None:
        """Stop all live tails and wait until their tasks have ended."""
        live_tails = list(self._live_tails.values())
        self._live_tails.clear()
        for live_tail in live_tails:
            live_tail.stop()
        tasks = [live_tail.task for live_tail in live_tails if live_tail.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def _share_memory(self) -> None:
        """Divide the memory for windows among the live tails."""
        share = limits.LIVE_TAIL_BYTES // max(1, len(self._live_tails))
        for live_tail in self._live_tails.values():
            live_tail.max_bytes = max(limits.LIVE_TAIL_TOPIC_BYTES, share)


class LiveTail:
    """The reader of one topic's new entries, with a window for each partition."""

    def __init__(self, topic: Topic, store: Store, read: Reader, clock: Clock) -> None:
        self.topic = topic
        self.windows: list[Window] = []
        self.listeners: dict[Listener, None] = {}
        self.max_bytes = limits.LIVE_TAIL_BYTES
        self.task: asyncio.Task[None] | None = None
        self._ages: list[AppendAgeIndex | None] = []
        self._store = store
        self._read = read
        self._clock = clock
        self._waits = Waits()
        self._lock = asyncio.Lock()
        self._is_stopped = False

    async def start(self) -> None:
        """Wait until the offsets of every partition are known; then start reading."""
        # The topic may get more partitions while this waits.
        while len(self.windows) < self.topic.partitions:
            async with self._lock:
                await self._begin_windows()
        if self.task is None and not self._is_stopped:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def update_topic(self, topic: Topic) -> None:
        """Apply an altered topic: its new partitions and its policy."""
        if topic.policy.live_for_ms != self.topic.policy.live_for_ms:
            self._ages = [self._new_ages(topic, window.end) for window in self.windows]
        self.topic = topic
        self._waits.end(_Altered())

    def stop(self) -> None:
        self._is_stopped = True
        if self.task is not None:
            self.task.cancel()

    @property
    def has_live_limit(self) -> bool:
        """Return whether entries can become too old for a live subscription."""
        policy = self.topic.policy
        return policy.live_for_ms is not None or policy.live_entries is not None

    def live_from(self, partition: int) -> int:
        """Return the first live offset of a partition. It may be too low until the ages of entries
        are known, see `needs_ages`."""
        policy, window, ages = self.topic.policy, self.windows[partition], self._ages[partition]
        live_from = 0 if ages is None else ages.advance(self._now_for(ages))
        if policy.live_entries is not None:
            live_from = max(live_from, window.end - policy.live_entries)
        return min(live_from, window.end)

    async def update_ages(self, partition: int) -> None:
        """Ask the store for the age of entries from before this live tail, if it is time to ask."""
        ages = self._ages[partition]
        if ages is None or (time_ms := ages.time_to_query(self._now_for(ages))) is None:
            return
        key = self.windows[partition].key
        match = await self._store.offset_for_time(key, time_ms, "append")
        ages.learn(match, self._now_for(ages))

    def needs_ages(self, partition: int) -> bool:
        """Return whether `update_ages` must ask the store before `live_from` is up to date."""
        ages = self._ages[partition]
        return ages is not None and ages.time_to_query(self._now_for(ages)) is not None

    # --- implementation -----------------------------------------------------------------------

    def _now_for(self, ages: AppendAgeIndex) -> int:
        """Return the time by which this index judges ages."""
        return self._clock.before(ages.age_ms) + ages.age_ms

    async def _begin_windows(self) -> None:
        """Begin a window at the current end of each partition that has none yet. Earlier entries
        are read from the log on demand."""
        while len(self.windows) < self.topic.partitions:
            key = PartitionKey(self.topic.id, len(self.windows))
            offsets = await self._store.offsets(key)
            self._ages.append(self._new_ages(self.topic, offsets.stable))
            self.windows.append(Window(key, offsets.first, offsets.stable))

    def _new_ages(self, topic: Topic, end: int) -> AppendAgeIndex | None:
        live_for_ms = topic.policy.live_for_ms
        return None if live_for_ms is None else AppendAgeIndex(live_for_ms, end)

    async def _run(self) -> None:
        """Follow the log until the broker closes or the topic is deleted. Try again after any other
        error."""
        while True:
            try:
                await self._follow_log()
            # Read again at once, with the new partitions.
            except _Altered:
                continue
            except (BrokerClosing, NotFound):
                return  # the push registry informs the channels
            except QuackError as error:
                log.warning(
                    "cannot read new entries of topic %s; trying again: %s", self.topic.name, error
                )
            except Exception:
                log.exception("cannot follow topic %s; trying again", self.topic.name)
            await asyncio.sleep(limits.LIVE_TAIL_RETRY_MS / 1000)

    async def _follow_log(self) -> None:
        """Read new batches into the windows, again and again, and notify the listeners after each
        read. Raise `_Altered` if the topic was altered during a read."""
        while True:
            if len(self.windows) < self.topic.partitions:
                await self.start()
                self._notify()
            reads = [
                Read(window.key, window.end, limits.LIVE_TAIL_READ_BYTES, committed=True)
                for window in self.windows
            ]
            slices = await self._waits.wait(
                self._read(
                    reads, max_bytes=limits.LIVE_TAIL_READ_BYTES, wait_ms=shared_limits.READ_WAIT_MS
                )
            )
            is_changed = False
            try:
                # `windows` may have grown during the read.
                for window, log_slice in zip(self.windows, slices, strict=False):
                    if log_slice.chunks or log_slice.error is not None:
                        is_changed |= await self._add_slice(window, log_slice)
            finally:  # notify listeners of the other partitions even if one cannot be read
                if is_changed:
                    self._notify()

    async def _add_slice(self, window: Window, log_slice: Slice) -> bool:
        """Add the batches that were read to a window; return whether the window has changed. If
        they could not be read, move the window to the end of the log. Raise the error of the read
        if there is nothing after it."""
        if log_slice.error is not None:
            offsets = await self._store.offsets(window.key)
            if offsets.stable <= window.end and offsets.first <= window.end:
                raise log_slice.error
            # A subscription that reads the skipped offsets gets their error.
            window.restart_at(offsets.first, offsets.stable)
        elif not window.append(log_slice):
            return False
        window.shrink(self.max_bytes // len(self.windows))
        ages = self._ages[window.key.partition]
        if ages is not None:
            ages.add(window.end, self._clock.now_ms())
        return True

    def _notify(self) -> None:
        for listener in list(self.listeners):
            listener.notify()


class _Altered(Exception):
    """The topic was altered while its live tail waited for a read."""
