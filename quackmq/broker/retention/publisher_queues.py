"""Publishers that wait for room in full topics: one queue per partition, first come, first served.

`quackmq.model.policy` decides whether there is room. Publishers also wait while a partition loads
its facts. A publisher that waits does not affect other partitions. The number of waiting publishers
and their bytes are bounded over all queues.

    enter ── room ──────────────────────────▶ started
      ├───── full, and it does not wait ────▶ TopicFull
      └───── full, or not ready ──▶ queued ── admit: room ────────────────────▶ started
                                      ├────── admit: check or policy refuses ─▶ error
                                      ├────── no room within the time ────────▶ TopicFull
                                      ├────── fail: deleted, closing, damage ─▶ error
                                      └────── cancelled ──────────────────────▶ removed

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle, closing_error
from quackmq.broker.retention.facts import RetentionFacts
from quackmq.broker.retention.partition import Partition
from quackmq.errors import RecordTooLarge, TopicFull
from quackmq.model.policy import WhenFull, has_room
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

_Result = TypeVar("_Result")


class PublisherQueues:
    """Starts publishers at once if there is room, or queues them until there is."""

    def __init__(
        self, store: Store, facts: RetentionFacts, full_topic_wait_ms: int, lifecycle: Lifecycle
    ) -> None:
        self._store = store
        self._facts = facts
        self._full_topic_wait_ms = full_topic_wait_ms
        self._lifecycle = lifecycle
        self._queues: dict[PartitionKey, deque[_Waiter]] = {}
        self._waiting = 0
        self._waiting_bytes = 0

    def enter(
        self,
        partition: Partition,
        batch: Batch,
        start: Callable[[Partition, Batch], asyncio.Future[_Result]],
        check: Callable[[Batch], object] | None = None,
        wait_for_room: bool = True,
    ) -> asyncio.Future[_Result]:
        """Call `start` now if there is room and nobody waits; otherwise queue the publisher, and
        call `check` and `start` when it is the first and there is room. Return the result of
        `start`, which is carried out even if the publisher is cancelled. Without `wait_for_room`,
        queue the publisher only until the partition is ready. Raise TopicFull or RecordTooLarge."""
        _check_fits(partition, batch)
        if partition.is_ready:
            is_first = partition.key not in self._queues
            if is_first and self._has_room(partition, batch):
                return asyncio.shield(start(partition, batch))
            refuses = is_first and partition.topic.policy.when_full is WhenFull.REFUSE
            if refuses or not wait_for_room:
                raise _full_error(partition)
        self._check_waiting(partition, batch)
        return self._queue(_Waiter(partition, batch, check, start, wait_for_room))

    def partitions(self) -> Iterator[Partition]:
        """Yield the partitions for which publishers wait."""
        for queue in self._queues.values():
            yield queue[0].partition

    def stop(self) -> None:
        """Fail all waiting publishers with BrokerClosing."""
        for key in list(self._queues):
            self.fail(key, closing_error())

    def admit(self, partition: Partition) -> None:
        """Admit queued publishers in order, as far as there is room."""
        while (queue := self._queues.get(partition.key)) is not None and partition.is_ready:
            waiter = queue[0]
            if waiter.woken.cancelled():
                return  # `_remove_waiter` removes it, and then admits the next one
            try:
                if waiter.check is not None:
                    waiter.check(waiter.batch)
                _check_fits(partition, waiter.batch)
                if not self._has_room(partition, waiter.batch):
                    if partition.topic.policy.waits_when_full and waiter.wait_for_room:
                        # It stays first in the queue. Those behind it that do not wait fail now.
                        self._fail_nonwaiting(partition)
                        return
                    raise _full_error(partition)
                waiter.outcome = waiter.start(partition, waiter.batch)
            except Exception as error:
                waiter.outcome = error
            self._dequeue(waiter)
            waiter.woken.set_result(None)

    def admit_after_change(self, partition: Partition) -> None:
        """Admit publishers that need not wait under the topic's new policy."""
        if partition.key not in self._queues:
            return
        if partition.topic.policy.counts_entries:
            self.start_preparing(partition)
        else:
            partition.is_ready = True
            self.admit(partition)

    def fail(self, key: PartitionKey, error: Exception) -> None:
        """Fail the publishers that wait for a partition."""
        for waiter in list(self._queues.get(key, ())):
            self._fail_waiter(waiter, error)

    def start_preparing(self, partition: Partition) -> asyncio.Task[None]:
        """Load the facts of a partition, unless a task does so already; return that task."""
        if partition.preparing is None:
            partition.preparing = start_quietly(self._lifecycle, self._prepare(partition))
        return partition.preparing

    # --- helpers ------------------------------------------------------------------------------

    def _check_waiting(self, partition: Partition, batch: Batch) -> None:
        """Raise BrokerClosing, or TopicFull if too many publishers wait already."""
        self._lifecycle.check_open()
        if (
            self._waiting >= limits.WAITING_PUBLISHERS
            or self._waiting_bytes + batch.size > limits.WAITING_PUBLISH_BYTES
        ):
            raise TopicFull(
                f"{_full_error(partition)}; {self._waiting} publishers already wait for room, with "
                f"{self._waiting_bytes} bytes"
            )

    def _queue(self, waiter: _Waiter) -> asyncio.Task[Any]:
        """Queue a publisher; return the task that waits for its result."""
        partition = waiter.partition
        self._queues.setdefault(partition.key, deque()).append(waiter)
        self._waiting += 1
        self._waiting_bytes += waiter.batch.size
        if not partition.is_ready:
            self.start_preparing(partition)
        task = start_quietly(self._lifecycle, self._wait(waiter))
        task.add_done_callback(lambda _: self._remove_waiter(waiter))
        return task

    async def _wait(self, waiter: _Waiter) -> Any:
        """Wait until a publisher is admitted; return the result, or raise TopicFull."""
        partition = waiter.partition
        if partition.preparing is not None:
            await asyncio.wait([partition.preparing])
        try:
            async with asyncio.timeout(self._full_topic_wait_ms / 1000):
                await waiter.woken
        except TimeoutError:
            # The publisher may have been admitted at the same moment at which its time ran out.
            if waiter.outcome is None:
                waited = f"waited {self._full_topic_wait_ms} ms for room"
                raise TopicFull(f"{_full_error(partition)}; {waited}") from None
        assert waiter.outcome is not None, "a waiter is woken with an outcome"
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return await asyncio.shield(waiter.outcome)

    def _remove_waiter(self, waiter: _Waiter) -> None:
        """Remove a publisher that was cancelled or timed out, and admit the next one."""
        if waiter.outcome is None:
            self._dequeue(waiter)
            self.admit(waiter.partition)

    async def _prepare(self, partition: Partition) -> None:
        """Load the facts that the partition's policy needs; then admit waiting publishers."""
        try:
            while not partition.is_ready:
                topic = partition.topic
                await self._facts.load(partition)
                # If the topic was altered meanwhile, its new policy may need other facts.
                partition.is_ready = partition.topic is topic
        except Exception as error:
            self.fail(partition.key, error)
            raise
        finally:
            partition.preparing = None
        self.admit(partition)

    def _has_room(self, partition: Partition, batch: Batch) -> bool:
        """Return whether a batch can be appended now. Try cheap facts first."""
        policy = partition.topic.policy
        if not policy.refuses_or_waits:
            return True
        entries = batch.record_count + partition.in_flight
        facts = partition.least_facts()
        if has_room(policy, facts, entries):
            return True
        facts = self._facts.collect(partition)
        # A repeated batch takes no room: it is in the log already.
        return has_room(policy, facts, entries) or self._store.is_repeat(
            Append(partition.key, batch)
        )

    def _fail_nonwaiting(self, partition: Partition) -> None:
        """Fail, with TopicFull, the queued publishers that chose not to wait for room."""
        for waiter in [each for each in self._queues[partition.key] if not each.wait_for_room]:
            self._fail_waiter(waiter, _full_error(partition))

    def _dequeue(self, waiter: _Waiter) -> None:
        """Remove a publisher from the queue of its partition, if it is still there."""
        queue = self._queues[waiter.partition.key]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.partition.key]
        self._waiting -= 1
        self._waiting_bytes -= waiter.batch.size

    def _fail_waiter(self, waiter: _Waiter, error: Exception) -> None:
        self._dequeue(waiter)
        waiter.outcome = error
        if not waiter.woken.done():
            waiter.woken.set_result(None)


class _Waiter:
    """A queued publisher. When it is woken, `outcome` is its started append, or the error."""

    __slots__ = ("batch", "check", "outcome", "partition", "start", "wait_for_room", "woken")

    def __init__(
        self,
        partition: Partition,
        batch: Batch,
        check: Callable[[Batch], object] | None,
        start: Callable[[Partition, Batch], asyncio.Future[Any]],
        wait_for_room: bool = True,
    ) -> None:
        self.partition = partition
        self.wait_for_room = wait_for_room
        self.check = check
        self.start = start
        self.batch = Batch.peek(bytes(batch.view))  # a copy: the caller may reuse its buffer
        self.outcome: asyncio.Future[Any] | Exception | None = None
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def start_quietly(
    lifecycle: Lifecycle, work: Coroutine[Any, Any, _Result]
) -> asyncio.Task[_Result]:
    """Start a task whose error counts as retrieved: its publisher gets it, unless cancelled."""
    task = lifecycle.start(work)
    task.add_done_callback(_mark_retrieved)
    return task


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _check_fits(partition: Partition, batch: Batch) -> None:
    """Raise RecordTooLarge if a batch has more records than its topic can ever hold."""
    policy = partition.topic.policy
    max_entries = policy.live_entries if policy.refuses_or_waits else math.inf
    if max_entries is not None and batch.record_count > max_entries:
        raise RecordTooLarge(
            f"a batch of {batch.record_count} records never fits into topic "
            f"{partition.topic.name}, which holds {max_entries}: send smaller ones"
        )


def _full_error(partition: Partition) -> TopicFull:
    """Return the error for a publisher that finds no room in a partition."""
    topic = partition.topic
    return TopicFull(
        f"topic {topic.name}, partition {partition.key.partition} is full: "
        f"it holds {topic.policy.live_entries} live entries"
    )
