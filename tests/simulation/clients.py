"""Random clients that publish, read and keep cursors and state, and write down what they learn.

Each has a single purpose and one writer's discipline: what it changes nobody else changes, so that
after a crash there are few things that its values can be. What it learned it tells the model; what
the model finds impossible it raises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from typing import cast

from quackmq.errors import (
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProducerFenced,
    QuackError,
    Refused,
    RepeatForgotten,
    StateChanged,
    StoreReadOnly,
    TopicExists,
    UnknownProducer,
    UnknownTopic,
)
from quackmq.policy import Policy
from quackmq.record import Batch, Record, batches
from quackmq.topic import Append, Appended, Cursor, CursorKey, PartitionKey, Read, Slice, Topic
from tests.simulation.life import CALLER, Life
from tests.simulation.model import (
    Attempt,
    Register,
    TopicSlot,
    Unit,
    Violation,
    Wish,
    make_body,
    make_values,
)

#: How many batches a producer may have on the way; the broker remembers five.
_PIPELINE = 4
_SEQUENCE_ERRORS = (OutOfOrderSequence, UnknownProducer, RepeatForgotten, ProducerFenced)


def new_attempt(
    life: Life, key: PartitionKey, producer: tuple[int, int, int] | None = None
) -> Attempt:
    """A batch that nobody ever sent, mostly small, now and then too large for the journal."""
    source = life.source
    most = source.choice((20, 60, 60, 300, 300, 3000))
    sizes = [source.randint(0, most) for _ in range(source.choice((1, 1, 1, 2, 5, 12)))]
    values = make_values(len(life.model.attempts), sizes)
    timestamp_ms = life.now_ms() - source.choice((0, 0, 0, 5, 5_000))
    topic = life.model.topic_with(key)
    return life.model.attempt(
        key,
        values,
        make_body(values, timestamp_ms, producer),
        producer,
        # A full topic may make one publisher wait and let the next one pass.
        ordered=topic is not None and topic.policy == Policy(),
    )


async def publish(life: Life, attempt: Attempt) -> Appended:
    """One call, its outcome written down."""
    topic = life.broker.topic_by_id(attempt.key.topic_id)
    body = attempt.body
    assert body is not None
    repeat = attempt.calls > 0
    with life.model.calling(attempt):
        answer = await life.broker.publish(CALLER, topic, attempt.key.partition, Batch.parse(body))
        life.model.acknowledge(attempt, answer.base_offset, answer.next_offset)
        attempt.append_time_ms = answer.append_time_ms
    if answer.repeated and not repeat:
        raise Violation(f"{attempt} was sent once and answered as a repeat")
    life.counts["repeats answered like the first"] += answer.repeated
    return answer


class IdempotentProducer:
    """Numbers its batches and repeats what it is unsure of, also after a crash of the broker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._producer: tuple[int, int] | None = None
        self._sequences: dict[PartitionKey, int] = {}
        self._unsure: dict[PartitionKey, list[Attempt]] = {}
        self._recent: dict[PartitionKey, deque[Attempt]] = {}

    def power_was_cut_in_a_weak_mode(self) -> None:
        """What it numbered may be lost; a producer then starts anew."""
        self._producer = None

    async def step(self, life: Life) -> None:
        if self._producer is None:
            await self._start_anew(life)
        for key in [key for key in self._unsure if key.topic_id in life.model.gone]:
            del self._unsure[key]
        # A topic that somebody is about to delete may survive a crash: until that is known, what
        # was sent to it stays unsure.
        retry = [key for key in self._unsure if key.topic_id not in life.model.doomed]
        if retry:
            key = retry[0]
            life.counts["retries after an unknown outcome"] += len(self._unsure[key])
            await self._send(life, key, self._unsure[key])
            return
        partition = life.some_partition()
        if partition is None:
            return
        if self._recent.get(partition) and life.source.random() < 0.15:
            await self._send(life, partition, [life.source.choice(self._recent[partition])])
            return
        if life.source.random() < 0.02:
            await self._bump_epoch(life, partition)
            return
        attempts = [
            self._number(life, partition) for _ in range(life.source.choice((1, 1, 2, _PIPELINE)))
        ]
        self._unsure[partition] = list(attempts)
        await self._send(life, partition, attempts)

    async def _start_anew(self, life: Life) -> None:
        producer_id = await life.broker.new_producer_id(CALLER)
        if producer_id in life.model.producer_ids and not life.model.lossy:
            raise Violation(f"producer id {producer_id} was given out twice")
        life.model.producer_ids.add(producer_id)
        self._begin(producer_id, 0)

    def _begin(self, producer_id: int, epoch: int) -> None:
        self._producer = (producer_id, epoch)
        self._sequences.clear()
        self._unsure.clear()
        self._recent.clear()

    async def _bump_epoch(self, life: Life, key: PartitionKey) -> None:
        """A new epoch fences the old one, in each partition where it was used."""
        assert self._producer is not None
        producer_id, epoch = self._producer
        known_here = bool(self._recent.get(key))
        self._begin(producer_id, epoch + 1)
        attempt = self._number(life, key)
        self._unsure[key] = [attempt]
        await self._send(life, key, [attempt])
        if attempt.status != "acknowledged" or not known_here:
            return
        late = new_attempt(life, key, (producer_id, epoch, 0))
        try:
            await publish(life, late)
        except ProducerFenced:
            life.counts["fenced producers"] += 1
        except UnknownTopic as error:
            life.excuse(key, error)
        except Refused:
            return
        else:
            raise Violation(f"{late} is of an epoch that was fenced")

    def _number(self, life: Life, key: PartitionKey) -> Attempt:
        assert self._producer is not None
        sequence = self._sequences.get(key, 0)
        attempt = new_attempt(life, key, (*self._producer, sequence))
        self._sequences[key] = sequence + attempt.records
        return attempt

    async def _send(self, life: Life, key: PartitionKey, attempts: list[Attempt]) -> None:
        """All at once, in order, as a client with several requests in flight does."""
        answers = await asyncio.gather(
            *(publish(life, attempt) for attempt in attempts), return_exceptions=True
        )
        unknown: QuackError | None = None
        refused = False
        for attempt, answer in zip(list(attempts), answers, strict=True):
            if isinstance(answer, Appended):
                self._settle(key, attempt)
            elif isinstance(answer, UnknownTopic):
                life.excuse(key, answer)
            elif isinstance(answer, Refused):
                refused = True  # the topic is full; all of it is sent again later, in order
            elif isinstance(answer, OutOfOrderSequence | UnknownProducer) and refused:
                continue
            elif isinstance(answer, _SEQUENCE_ERRORS):
                raise Violation(f"{attempt} was refused: {answer!r}") from answer
            elif isinstance(answer, StoreReadOnly):
                unknown = answer
            elif isinstance(answer, BaseException):
                raise answer
        if unknown is not None:
            raise unknown

    def _settle(self, key: PartitionKey, attempt: Attempt) -> None:
        recent = self._recent.setdefault(key, deque(maxlen=_PIPELINE))
        if attempt not in recent:
            recent.append(attempt)
        unsure = self._unsure.get(key)
        if unsure is not None and attempt in unsure:
            unsure.remove(attempt)
            if not unsure:
                del self._unsure[key]


class PlainPublisher:
    """Publishes without numbers, so it never repeats: what it is unsure of stays unsure."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        key = life.some_partition()
        if key is None:
            return
        try:
            if life.source.random() < 0.25:
                await self._publish_records(life, key)
            else:
                await self._publish_batches(life, key)
        except UnknownTopic as error:
            life.excuse(key, error)
        except Refused:
            life.counts["publishes refused by a full topic"] += 1

    async def _publish_batches(self, life: Life, key: PartitionKey) -> None:
        attempts = [new_attempt(life, key) for _ in range(life.source.choice((1, 1, 1, 3, 8)))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_publish_quietly(life, each)) for each in attempts]
        for task in tasks:
            error = task.result()
            if error is not None:
                raise error

    async def _publish_records(self, life: Life, key: PartitionKey) -> None:
        name = life.broker.topic_by_id(key.topic_id).name
        sizes = [life.source.randint(0, 100) for _ in range(life.source.choice((1, 1, 3)))]
        values = make_values(len(life.model.attempts), sizes)
        attempt = life.model.attempt(key, values, None, ordered=False)
        records = [Record(0, life.now_ms(), b"key", value) for value in values]
        with life.model.calling(attempt):
            answer = await life.broker.publish_records(
                CALLER, name, records, partition=key.partition
            )
            life.model.acknowledge(attempt, answer.base_offset, answer.next_offset)


async def _publish_quietly(life: Life, attempt: Attempt) -> QuackError | None:
    """A task group would cancel the others for one error, and they are not to blame."""
    try:
        await publish(life, attempt)
    except QuackError as error:
        return error
    return None


class AtomicWriter:
    """Appends to several partitions and moves cursors, all in one call to the store."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(2, 4)) if (key := life.some_partition())]
        if not keys:
            return
        attempts = [new_attempt(life, key) for key in keys]
        cursors = [_next_cursor(life, self.name, key) for key in dict.fromkeys(keys)]
        await change_together(life, attempts, cursors)


class CursorKeeper:
    """Commits several cursors in one call, all or none."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        cursors = [_next_cursor(life, self.name, key) for key in dict.fromkeys(keys)]
        if cursors:
            await change_together(life, [], cursors)


def _next_cursor(life: Life, name: str, key: PartitionKey) -> Cursor:
    """Never the same twice: the metadata tells one commit from the next."""
    cursor_key = CursorKey(name, key.topic_id, key.partition)
    offset: int | None = life.source.randint(0, life.model.partition(key).next + 1)
    if life.source.random() < 0.05:
        offset = None
    return Cursor(cursor_key, offset, f"m{life.model.tick()}", life.now_ms())


async def change_together(life: Life, attempts: list[Attempt], cursors: list[Cursor]) -> None:
    model = life.model
    registers = [
        model.cursors.setdefault(each.key, Register(f"cursor {each.key}", (None, "")))
        for each in cursors
    ]
    values = [(each.offset, each.metadata if each.offset is not None else "") for each in cursors]
    unit = Unit(attempts, [(each.key, value) for each, value in zip(cursors, values, strict=True)])
    model.units.append(unit)
    definite = model.read_only
    try:
        with ExitStack() as stack:
            stack.enter_context(model.calling(*attempts))
            for register, value in zip(registers, values, strict=True):
                stack.enter_context(model.changing(register, value))
            if attempts:
                appends = [Append(each.key, Batch.parse(each.body or b"")) for each in attempts]
                answers = await life.store.append(appends, cursors)
                for attempt, answer in zip(attempts, answers, strict=True):
                    model.acknowledge(attempt, answer.base_offset, answer.next_offset)
            else:
                await life.store.set_cursors(cursors)
    except UnknownTopic as error:
        model.units.remove(unit)
        topics = {each.key.topic_id for each in attempts} | {each.key.topic_id for each in cursors}
        if not topics & model.doomed:
            raise Violation("a topic is gone, and nobody deleted it") from error
    except StoreReadOnly:
        if definite:
            model.units.remove(unit)
        raise
    else:
        model.units.remove(unit)
        life.counts["changes made together"] += 1


class StateKeeper:
    """Compares and sets small values; now and then with a version that must be refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        key = f"{self.name}/{life.source.randint(0, 4)}"
        register = life.model.states.setdefault(key, Register(f"state {key}", (None, 0)))
        if register.maybe:  # unsure since a failure in this life: nobody can say the version
            return
        version = register.known[1]
        if life.source.random() < 0.1:
            await self._put_wrongly(life, key, version + 1)
            return
        value: bytes | None = b"%d" % life.model.tick() + b"s" * life.source.choice((0, 50, 600))
        if version and life.source.random() < 0.1:
            value = None
        change = (value, version + 1 if value is not None else 0)
        with life.model.changing(register, change):
            state = await life.store.put_state(key, value, version)
        if (state.value, state.version) != register.known:
            raise Violation(f"{key} was put as {register.known}, the answer is {state}")
        seen = await life.store.state(key)
        register.observe((seen.value, seen.version))

    async def _put_wrongly(self, life: Life, key: str, version: int) -> None:
        try:
            await life.store.put_state(key, b"never", version)
        except StateChanged:
            return
        raise Violation(f"{key} was changed against version {version}, which it does not have")


class Reader:
    """Reads from anywhere, waits at the end, and remembers all that it saw."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def step(self, life: Life) -> None:
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        if not keys:
            return
        reads, expected = [], []
        for key in keys:
            try:
                offsets = await life.broker.offsets(CALLER, key)
            except UnknownTopic as error:
                life.excuse(key, error)
                return
            offset = life.source.randint(offsets.first, offsets.next)
            if life.source.random() < 0.2:
                offset = offsets.next
            reads.append(Read(key, offset, life.source.choice((1, 500, 5_000, 100_000))))
            expected.append(life.model.partition(key).next)
        slices = await life.broker.read(
            CALLER,
            reads,
            max_bytes=life.source.choice((1, 2_000, 100_000)),
            min_bytes=life.source.choice((1, 1, 1, 3_000)),
            wait_ms=life.source.choice((0, 0, 0, 20, 300)),
        )
        for read, found, at_least in zip(reads, slices, expected, strict=True):
            check_slice(life, read, found, at_least)


def check_slice(life: Life, read: Read, found: Slice, at_least: int) -> None:
    """One answer of the store against the model; what it shows is remembered."""
    if isinstance(found.error, UnknownTopic):
        life.excuse(read.key, found.error)
        return
    if isinstance(found.error, OffsetOutOfRange):
        if found.first_offset <= read.offset <= found.next_offset:
            raise Violation(f"{read} is in range, the answer is {found.error}")
        return
    if found.error is not None:
        if life.disk.failed:  # a sync that failed may have cost pages that were only cached
            life.counts["reads that met a failed disk"] += 1
            return
        raise Violation(f"{read} met {found.error!r}") from found.error
    partition = life.model.partition(read.key)
    if found.next_offset < at_least:
        raise Violation(f"{read}: the end is at {found.next_offset}, it was at {at_least}")
    if found.size != sum(len(chunk) for chunk in found.chunks):
        raise Violation(f"{read}: {found.size} bytes announced")
    offset = read.offset
    for batch in (each for chunk in found.chunks for each in batches(chunk)):
        straddles = offset == read.offset and batch.base_offset <= offset < batch.next_offset
        # What lies between may have been trimmed during the read, or taken by a power cut.
        gap = batch.base_offset <= found.first_offset or partition.gaps_allowed
        if batch.base_offset != offset and not straddles and not gap:
            raise Violation(f"{read}: {batch.base_offset} where {offset} was due")
        life.model.observe_batch(read.key, Batch.parse(batch.view))
        offset = batch.next_offset
    if offset > found.next_offset:
        raise Violation(f"{read}: read up to {offset}, beyond the end at {found.next_offset}")


class Administrator:
    """Creates, alters, deletes and trims, and takes names again that were used before."""

    def __init__(self, name: str, names: list[str], policies: list[Policy]) -> None:
        self.name = name
        self._names = names
        self._policies = policies

    async def step(self, life: Life) -> None:
        slot = life.model.topics.setdefault(
            name := life.source.choice(self._names), TopicSlot(name)
        )
        if slot.busy or slot.maybe:
            return
        if slot.known is None:
            await self._create(life, slot)
            return
        fate = life.source.random()
        if fate < 0.05:
            await self._delete(life, slot, slot.known)
        elif fate < 0.25:
            await self._alter(life, slot, slot.known)
        elif fate < 0.65:
            await self._trim(life, slot.known)

    async def _create(self, life: Life, slot: TopicSlot) -> None:
        wish = Wish(life.source.randint(1, 3), life.source.choice(self._policies))
        with life.model.changing_topic(slot, wish):
            topic = await life.broker.create_topic(
                CALLER, slot.name, partitions=wish.partitions, policy=cast("Policy", wish.policy)
            )
        life.model.learn_topic(topic)
        try:
            await life.broker.create_topic(CALLER, slot.name, partitions=1)
        except TopicExists:
            return
        raise Violation(f"{slot.name} was created twice")

    async def _alter(self, life: Life, slot: TopicSlot, topic: Topic) -> None:
        partitions = topic.partitions + (life.source.random() < 0.3)
        policy = life.source.choice(self._policies)
        wish = Topic(topic.id, topic.name, partitions, policy, topic.created_ms)
        with life.model.changing_topic(slot, wish):
            answer = await life.broker.alter_topic(
                CALLER, slot.name, partitions=partitions, policy=policy
            )
        if answer != wish:
            raise Violation(f"{wish} was asked for, {answer} is the answer")
        life.model.learn_topic(answer)

    async def _delete(self, life: Life, slot: TopicSlot, topic: Topic) -> None:
        life.model.doomed.add(topic.id)
        with life.model.changing_topic(slot, None):
            await life.broker.delete_topic(CALLER, slot.name)
        slot.settle(None)
        life.model.gone.add(topic.id)
        life.counts["topics deleted"] += 1
        [found] = await life.broker.read(
            CALLER, [Read(PartitionKey(topic.id, 0), 0, 1000)], max_bytes=1000
        )
        if not isinstance(found.error, UnknownTopic):
            raise Violation(f"{topic} was deleted, and reading it gives {found}")

    async def _trim(self, life: Life, topic: Topic) -> None:
        key = PartitionKey(topic.id, life.source.randrange(topic.partitions))
        partition = life.model.partition(key)
        before = life.source.randint(0, partition.next)
        partition.first_at_most = max(partition.first_at_most, before)
        try:
            first = await life.broker.trim(CALLER, key, before)
        except UnknownTopic as error:
            life.excuse(key, error)
            return
        except OffsetOutOfRange as error:
            if partition.gaps_allowed:
                return
            raise Violation(f"{key} holds {before}, and cannot be trimmed there") from error
        if first < before:
            raise Violation(f"{key} was trimmed before {before} and begins at {first}")
        partition.first = max(partition.first, first)
