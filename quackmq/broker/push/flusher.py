"""Write the progress of all push subscriptions, together with their receipts.

Writes follow each other, at most one every `limits.PUSHED_FLUSH_MS`. The progress of a subscription
and its receipts become durable together or not at all. A write that failed is tried again later.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from quackmq.broker import limits
from quackmq.broker.push.push_subscription import Part
from quackmq.broker.push.receipt_ranges import PendingReceipts, ReceiptBatch
from quackmq.broker.subscriptions.receipts import ReceiptEvent, Receipts
from quackmq.broker.topics import Topics
from quackmq.errors import BrokerClosing, QuackError
from quackmq.model.topic import StatePut

log = logging.getLogger(__name__)


class ProgressFlusher:
    def __init__(self, topics: Topics, receipts: Receipts, written: Callable[[Part], None]) -> None:
        """`written` is called with each part whose durable low-water mark has moved."""
        #: Held during a write, and by others that must not run at the same time as a write.
        self.alone = asyncio.Lock()
        self._topics = topics
        self._receipts = receipts
        self._written = written
        self._dirty: dict[Part, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        #: When the next write may start, and how many parts the last one wrote.
        self._next_s = 0.0
        self._count = 0
        self._has_failed = False

    def add(self, part: Part) -> None:
        part.is_dirty = True
        self._dirty[part] = None
        self._arm()

    async def flush(self) -> None:
        if self._task is not None:  # it may have begun before the last change
            await asyncio.wait([self._task])
        if self._dirty or self._task is not None:
            await asyncio.shield(self._task or self._start())

    async def settle(self) -> None:
        """Wait for the running write only. A full flush could deadlock: it may wait for the
        deletion of the receipts topic, which waits for this."""
        async with self.alone:
            pass

    async def close(self) -> None:
        try:
            await self.flush()
        except QuackError as error:
            log.warning(
                "acknowledgements in %d partitions were not saved, entries will be redelivered: %s",
                len(self._dirty),
                error,
            )
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is None and self._task is None and self._dirty:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_s), self._start)

    def _start(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._write())
        self._task.add_done_callback(self._ended)
        return self._task

    async def _write(self) -> None:
        parts = list(self._dirty)
        self._dirty.clear()
        self._count = len(parts)
        try:
            while parts:
                await self._topics.retry_on_topic_deletion(partial(self._write_some, parts))
        except BaseException:
            for part in parts:
                part.is_dirty = True
                self._dirty[part] = None
            raise

    async def _write_some(self, parts: list[Part]) -> None:
        """Write some of the last parts, and remove them from the list; if this fails, the list is
        complete again. NotFound if the receipts topic was deleted meanwhile."""
        if any(part.untold is not None for part in parts):
            await self._receipts.ready()
        async with self.alone:
            told, puts, lows, size = ReceiptWrite(()), [], [], 0
            while parts and size < limits.PUSHED_FLUSH_BYTES:
                part = parts.pop()
                part.is_dirty = False
                if part.is_kept and part.key.topic_id in self._topics.by_id:
                    value = part.leases.encode()
                    size += len(value) + told.add(part) * limits.RECEIPT_BYTES
                    puts.append(StatePut(part.state_key, value, part.version))
                    lows.append((part, part.leases.low_water_mark))
            try:
                await self._receipts.append(told.steps, (), puts)
            except BaseException:
                told.failed()
                parts += (part for part, _ in lows)
                raise
            told.succeeded()
            for part, low in lows:
                part.version += 1
                if part.durable != low:
                    part.durable = low
                    self._written(part)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            each_ms = self._count * limits.PUSHED_FLUSH_EACH_MS
            wait_ms = max(limits.PUSHED_FLUSH_MS, min(each_ms, limits.PUSHED_LONGEST_FLUSH_MS))
        else:
            wait_ms = limits.PUSHED_RETRY_MS
        self._next_s = asyncio.get_running_loop().time() + wait_ms / 1000
        if error is not None and not self._has_failed:
            log.error("cannot save acknowledgements of push subscriptions; trying again: %s", error)
        self._has_failed = error is not None
        if not isinstance(error, BrokerClosing):
            self._arm()


class ReceiptWrite:
    """The receipts of some parts, during one write."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.steps: list[ReceiptEvent] = []
        self._each: list[tuple[PendingReceipts, ReceiptBatch]] = []
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> int:
        """Add the receipts of a part; return their number."""
        if part.untold is None:
            return 0
        held = part.held
        told = part.untold.tell(held.name, held.topic, part.key.partition, part.leases)
        self.steps += told.steps
        self._each.append((part.untold, told))
        return len(told.steps)

    def succeeded(self) -> None:
        for untold, told in self._each:
            untold.was_told(told)

    def failed(self) -> None:
        for untold, told in self._each:
            untold.was_not_told(told)
