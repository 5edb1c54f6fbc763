"""Topic policies carried out: who may publish now, who waits, and what the cleaner lets go of.

Only topics whose policy counts entries are known here; publishing to any other does not come this
way. The decisions are `quackmq.policy`'s. This module gathers the facts, a partition at a time, and
does what was decided:

- A publisher to a full topic waits in its partition's queue, first come, first served, and is
  admitted at the moment that makes room: a trim, a cursor that moves, entries that expire (noticed
  by the cleaner, at most an interval late). Other partitions and topics do not notice.
- Entries on their way to the store count as there, so publishers at once do not overfill a topic.
- A publish to a topic that drops its oldest is answered when they are dropped. If dropping fails,
  the publish stands, and the cleaner tries again.
- The cleaner looks at partitions in which something may be due. An error is logged with the topic's
  name, once until it goes away, and stops neither the other topics nor the cleaner.

What a partition knows of itself is asked from the store when it is first needed, and kept up from
what is appended and trimmed through here.

Who may call: the broker's loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from quackmq import limits
from quackmq.broker.partition import Partition
from quackmq.errors import BrokerClosing, QuackError, RecordTooLarge, TopicFull
from quackmq.policy import WhenFull, has_room, trim_before
from quackmq.record import Batch, spans
from quackmq.stores.base import Store
from quackmq.topic import Append, Appended, Cursor, PartitionKey, Read, Topic

log = logging.getLogger(__name__)

_Done = TypeVar("_Done")
_CLOSING: Final = "the broker is closing: publish again when it is back"


class Retention:
    def __init__(
        self,
        store: Store,
        now_ms: Callable[[], int],
        held_from: Callable[[PartitionKey], int | None],
        full_topic_wait_ms: int,
    ) -> None:
        """`held_from` tells the least cursor of a partition's subscriptions."""
        self._store = store
        self._now_ms = now_ms
        self._held_from = held_from
        self._full_topic_wait_ms = full_topic_wait_ms
        self._partitions: dict[uuid.UUID, list[Partition]] = {}
        self._queues: dict[PartitionKey, deque[_Waiter]] = {}
        self._waiting = 0
        self._waiting_bytes = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reported: dict[uuid.UUID, type[Exception]] = {}

    # --- topics -----------------------------------------------------------------------------

    def follow(self, topic: Topic) -> None:
        """A topic is there, new or altered."""
        partitions = self._partitions.setdefault(topic.id, [])
        for partition in partitions:
            policy_changed = partition.topic.policy != topic.policy
            partition.topic = topic
            if policy_changed:
                partition.forget()
                self._admit_after_change(partition)
        if not topic.policy.counts_entries:
            del self._partitions[topic.id]
            return
        for index in range(len(partitions), topic.partitions):
            partitions.append(Partition(topic, PartitionKey(topic.id, index)))

    def forget(self, topic_id: uuid.UUID, error: Exception) -> None:
        """A topic is gone; who waits for room in it is told so."""
        for partition in self._partitions.pop(topic_id, []):
            self._fail_queue(partition.key, error)
        self._reported.pop(topic_id, None)

    # --- publishing and trimming --------------------------------------------------------------

    def publish(
        self, key: PartitionKey, batch: Batch, check: Callable[[Batch], object] | None = None
    ) -> Awaitable[Appended]:
        """Append when there is room. Raises, here or when awaited, TopicFull and RecordTooLarge
        beside what the store raises. The bytes are copied before this returns. If it has to wait,
        `check` is asked once more when its turn comes, and raises if it came too late."""
        partition = self._partitions[key.topic_id][key.partition]
        policy = partition.topic.policy
        _check_fits(partition, batch)
        if not partition.is_ready or key in self._queues:
            return self._wait_for_turn(partition, batch, check, self._append)
        if self._has_room(partition, batch):
            # The append happens, whether or not its publisher stays to hear of it.
            return asyncio.shield(self._append(partition, batch))
        if policy.when_full is WhenFull.REFUSE:
            raise _full(partition)
        return self._wait_for_turn(partition, batch, check, self._append)

    def publish_together(
        self, appends: Sequence[Append], cursors: Sequence[Cursor]
    ) -> Awaitable[list[Appended]]:
        """The same for several batches of a topic, and cursors with them, as one unit. Room is
        taken in one partition after the other, always in the same order, so that no two wait for
        each other."""
        partitions = [self._partitions[key.topic_id][key.partition] for key, _, _ in appends]
        return asyncio.shield(self._start(self._publish_together(partitions, appends, cursors)))

    def note(self, key: PartitionKey, answer: Appended, size: int) -> None:
        """Something was appended that did not come this way: a marker, or what was staged."""
        partitions = self._partitions.get(key.topic_id)
        if partitions is not None and partitions[key.partition].is_ready:
            partitions[key.partition].appended(answer, size)
            partitions[key.partition].due_ms = 0

    def cursor_moved(self, key: PartitionKey) -> None:
        """A subscription moved or went: what it held may be let go of."""
        partitions = self._partitions.get(key.topic_id)
        if partitions is not None:
            partitions[key.partition].due_ms = 0
            self._admit(partitions[key.partition])

    async def trim(self, key: PartitionKey, before: int) -> int:
        partitions = self._partitions.get(key.topic_id)
        if partitions is None:
            return await self._store.trim(key, before)
        partition = partitions[key.partition]
        async with partition.lock:
            return await self._trim(partition, before)

    # --- the cleaner ------------------------------------------------------------------------

    async def clean(self) -> None:
        """Let go of whatever the policies do not keep, and admit those who wait for it."""
        due = self._due()
        failed: set[uuid.UUID] = set()
        for start in range(0, len(due), limits.CHANGES_AT_ONCE):
            some = due[start : start + limits.CHANGES_AT_ONCE]
            results = await asyncio.gather(*map(self._clean, some), return_exceptions=True)
            for partition, result in zip(some, results, strict=True):
                # A topic that was deleted meanwhile needs no cleaning.
                if isinstance(result, Exception) and partition.topic.id in self._partitions:
                    failed.add(partition.topic.id)
                    self._report(partition, result)
        for topic_id in {partition.topic.id for partition in due} - failed:
            self._reported.pop(topic_id, None)

    async def close(self) -> None:
        """Who waits for room gets BrokerClosing; what is on its way to the store arrives."""
        for key in list(self._queues):
            self._fail_queue(key, BrokerClosing(_CLOSING))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _due(self) -> list[Partition]:
        now_ms = self._now_ms()
        due = [
            partition
            for partitions in self._partitions.values()
            for partition in partitions
            if partition.due_ms <= now_ms
        ]
        waited_for = (queue[0].partition for queue in self._queues.values())
        due.extend(partition for partition in waited_for if partition.due_ms > now_ms)
        return due

    async def _clean(self, partition: Partition) -> None:
        if not partition.is_ready:
            await asyncio.shield(self._make_ready(partition))
        async with partition.lock:
            now_ms = self._now_ms()
            partition.due_ms = math.inf
            try:
                partition.follow(await self._store.offsets(partition.key), now_ms)
                await self._ask_history(partition, now_ms)
                trimmed = await self._trim_due(partition, now_ms)
            except BaseException:
                partition.due_ms = 0
                raise
            partition.schedule(now_ms, again=trimmed)
        self._admit(partition)

    async def _trim_due(self, partition: Partition, now_ms: int) -> bool:
        facts = partition.facts(now_ms, self._held_from(partition.key))
        before = trim_before(partition.topic.policy, facts)
        gone_bytes = None
        sizes = partition.sizes
        if before <= partition.first and sizes is not None and sizes.surplus_is_in_history:
            before, gone_bytes = await self._walk(partition, sizes.surplus_bytes, facts.held_from)
        if before <= partition.first:
            return False
        await self._trim(partition, before, gone_bytes)
        return True

    async def _walk(
        self, partition: Partition, surplus_bytes: int, held_from: int | None
    ) -> tuple[int, int]:
        """How far the oldest batches are a surplus that nobody holds, and how many bytes."""
        before, gone_bytes = partition.first, 0
        if held_from is not None and held_from <= before:
            return before, gone_bytes
        max_bytes = min(surplus_bytes, limits.CLEAN_READ_BYTES)
        read = Read(partition.key, partition.first, max_bytes)
        (part,) = await self._store.read([read], max_bytes=max_bytes)
        if part.error is not None:
            raise part.error
        for chunk in part.chunks:
            for span in spans(chunk):
                is_held = held_from is not None and span.next_offset > held_from
                if is_held or gone_bytes + span.size > surplus_bytes:
                    return before, gone_bytes
                before, gone_bytes = span.next_offset, gone_bytes + span.size
        return before, gone_bytes

    def _report(self, partition: Partition, error: Exception) -> None:
        topic = partition.topic
        if self._reported.get(topic.id) is type(error):
            return
        self._reported[topic.id] = type(error)
        log.error(
            "cleaning topic %s, partition %d: %s",
            topic.name,
            partition.key.partition,
            error,
            exc_info=None if isinstance(error, QuackError) else error,
        )

    # --- one partition ----------------------------------------------------------------------

    def _make_ready(self, partition: Partition) -> asyncio.Task[None]:
        if partition.preparing is None:
            partition.preparing = self._start(self._prepare(partition))
        return partition.preparing

    async def _prepare(self, partition: Partition) -> None:
        """Ask the store for all that the partition's policy needs to know."""
        try:
            while not partition.is_ready:
                topic = partition.topic
                partition.begin(await self._store.offsets(partition.key), self._now_ms())
                await self._ask_history(partition, self._now_ms())
                partition.is_ready = partition.topic is topic
        except Exception as error:
            self._fail_queue(partition.key, error)
            raise
        finally:
            partition.preparing = None
        self._admit(partition)

    async def _ask_history(self, partition: Partition, now_ms: int) -> None:
        for ages in partition.ages():
            if (time_ms := ages.asks(now_ms)) is not None:
                found = await self._store.offset_for_time(partition.key, time_ms, "append")
                ages.learn(found, now_ms)

    async def _trim(self, partition: Partition, before: int, gone_bytes: int | None = None) -> int:
        first = await self._store.trim(partition.key, before)
        partition.trimmed(first, gone_bytes)
        self._admit(partition)
        return first

    def _has_room(self, partition: Partition, batch: Batch) -> bool:
        policy = partition.topic.policy
        if not policy.refuses_or_waits:
            return True
        entries = batch.record_count + partition.in_flight
        facts = partition.least_facts()
        if has_room(policy, facts, entries):
            return True
        facts = partition.facts(self._now_ms(), self._held_from(partition.key))
        # A repeat takes no room: the log has it.
        return has_room(policy, facts, entries) or self._store.is_repeat(
            Append(partition.key, batch)
        )

    async def _publish_together(
        self,
        partitions: Sequence[Partition],
        appends: Sequence[Append],
        cursors: Sequence[Cursor],
    ) -> list[Appended]:
        taken: list[tuple[Partition, Batch]] = []
        both = [
            (partition, each.batch) for partition, each in zip(partitions, appends, strict=True)
        ]
        try:
            for partition, batch in sorted(both, key=lambda pair: pair[0].key.partition):
                await self._take_room(partition, batch)
                taken.append((partition, batch))
            answers = await self._store.append(appends, cursors)
            for (partition, batch), answer in zip(both, answers, strict=True):
                partition.appended(answer, batch.size)
        finally:
            for partition, batch in taken:
                partition.in_flight -= batch.record_count
                self._admit(partition)
        for partition in partitions:
            if partition.topic.policy.drops_oldest:
                await self._drop_oldest(partition)
        return answers

    async def _take_room(self, partition: Partition, batch: Batch) -> None:
        """Return when there is room, and the batch counts as on its way."""
        _check_fits(partition, batch)
        if not partition.is_ready or partition.key in self._queues:
            await self._wait_for_turn(partition, batch, None, self._hold)
        elif self._has_room(partition, batch):
            self._hold(partition, batch)
        elif partition.topic.policy.when_full is WhenFull.REFUSE:
            raise _full(partition)
        else:
            await self._wait_for_turn(partition, batch, None, self._hold)

    def _hold(self, partition: Partition, batch: Batch) -> asyncio.Future[None]:
        partition.in_flight += batch.record_count
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.set_result(None)
        return held

    def _append(self, partition: Partition, batch: Batch) -> asyncio.Task[Appended]:
        appended = self._store.append([Append(partition.key, batch)])
        partition.in_flight += batch.record_count
        return self._start(self._count(partition, batch.record_count, batch.size, appended))

    async def _count(
        self, partition: Partition, entries: int, size: int, appended: Awaitable[list[Appended]]
    ) -> Appended:
        try:
            (answer,) = await appended
            partition.appended(answer, size)
        finally:
            partition.in_flight -= entries
            self._admit(partition)
        if partition.topic.policy.drops_oldest:
            await self._drop_oldest(partition)
        return answer

    async def _drop_oldest(self, partition: Partition) -> None:
        try:
            # Whoever comes first here trims for all whose appends have arrived.
            async with partition.lock:
                if not partition.is_ready:
                    return  # the policy is a new one; the cleaner will look into it
                facts = partition.facts(self._now_ms(), self._held_from(partition.key))
                before = trim_before(partition.topic.policy, facts)
                if before > partition.first:
                    await self._trim(partition, before)
        except QuackError as error:
            partition.due_ms = 0
            self._report(partition, error)

    # --- who waits --------------------------------------------------------------------------

    def _wait_for_turn(
        self,
        partition: Partition,
        batch: Batch,
        check: Callable[[Batch], object] | None,
        begin: Callable[[Partition, Batch], asyncio.Future[_Done]],
    ) -> Awaitable[_Done]:
        """In its turn, when there is room, what `begin` begins."""
        if (
            self._waiting >= limits.WAITING_PUBLISHERS
            or self._waiting_bytes + batch.size > limits.WAITING_PUBLISH_BYTES
        ):
            raise TopicFull(
                f"{_full(partition)}; and {self._waiting} publishers of {self._waiting_bytes} "
                "bytes are waiting for room already"
            )
        waiter = _Waiter(partition, batch, check, begin)
        self._queues.setdefault(partition.key, deque()).append(waiter)
        self._waiting += 1
        self._waiting_bytes += batch.size
        if not partition.is_ready:
            self._make_ready(partition)
        task = self._start(self._wait(waiter))
        task.add_done_callback(lambda _: self._left(waiter))
        return task

    async def _wait(self, waiter: _Waiter) -> Any:
        partition = waiter.partition
        if partition.preparing is not None:
            await asyncio.wait([partition.preparing])
        try:
            async with asyncio.timeout(self._full_topic_wait_ms / 1000):
                await waiter.woken
        except TimeoutError:
            # It may have been admitted at the very moment at which its time was over.
            if waiter.outcome is None:
                waited = f"waited {self._full_topic_wait_ms} ms for room"
                raise TopicFull(f"{_full(partition)}; {waited}") from None
        assert waiter.outcome is not None, "a waiter is woken with an outcome"
        if isinstance(waiter.outcome, Exception):
            raise waiter.outcome
        return await asyncio.shield(waiter.outcome)

    def _left(self, waiter: _Waiter) -> None:
        """A publisher has gone; if nothing came of its waiting, the next has its place."""
        if waiter.outcome is None:
            self._dequeue(waiter)
            self._admit(waiter.partition)

    def _admit(self, partition: Partition) -> None:
        """Append for those in the queue, in order, as far as there is room."""
        while (queue := self._queues.get(partition.key)) is not None and partition.is_ready:
            waiter = queue[0]
            if waiter.woken.cancelled():
                return  # it is about to leave, and then the next is admitted
            try:
                if waiter.check is not None:
                    waiter.check(waiter.batch)
                _check_fits(partition, waiter.batch)
                if not self._has_room(partition, waiter.batch):
                    if partition.topic.policy.when_full is WhenFull.WAIT:
                        return
                    raise _full(partition)
                waiter.outcome = waiter.begin(partition, waiter.batch)
            except Exception as error:
                waiter.outcome = error
            self._dequeue(waiter)
            waiter.woken.set_result(None)

    def _admit_after_change(self, partition: Partition) -> None:
        """The policy is another one: who waits may no longer have to."""
        if partition.key not in self._queues:
            return
        if partition.topic.policy.counts_entries:
            self._make_ready(partition)
        else:
            partition.is_ready = True
            self._admit(partition)

    def _dequeue(self, waiter: _Waiter) -> None:
        queue = self._queues[waiter.partition.key]
        queue.remove(waiter)
        if not queue:
            del self._queues[waiter.partition.key]
        self._waiting -= 1
        self._waiting_bytes -= waiter.batch.size

    def _fail_queue(self, key: PartitionKey, error: Exception) -> None:
        for waiter in list(self._queues.get(key, ())):
            self._dequeue(waiter)
            waiter.outcome = error
            if not waiter.woken.done():
                waiter.woken.set_result(None)

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; if they have left, nobody needs to know


class _Waiter:
    """A publisher in a queue, with a copy of its batch. The outcome is there when it is woken: its
    append, which has begun, or why there is none."""

    __slots__ = ("batch", "begin", "check", "outcome", "partition", "woken")

    def __init__(
        self,
        partition: Partition,
        batch: Batch,
        check: Callable[[Batch], object] | None,
        begin: Callable[[Partition, Batch], asyncio.Future[Any]],
    ) -> None:
        self.partition = partition
        self.check = check
        self.begin = begin
        self.batch = Batch.peek(bytes(batch.view))
        self.outcome: asyncio.Future[Any] | Exception | None = None
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def _check_fits(partition: Partition, batch: Batch) -> None:
    policy = partition.topic.policy
    most = policy.live_entries if policy.refuses_or_waits else math.inf
    if most is not None and batch.record_count > most:
        raise RecordTooLarge(
            f"a batch of {batch.record_count} records never fits into topic "
            f"{partition.topic.name}, which holds {most}: send smaller ones"
        )


def _full(partition: Partition) -> TopicFull:
    topic = partition.topic
    return TopicFull(
        f"topic {topic.name}, partition {partition.key.partition} is full: "
        f"it holds {topic.policy.live_entries} live entries"
    )
