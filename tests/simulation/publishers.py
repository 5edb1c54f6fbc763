"""Random clients that publish: one that numbers its batches and repeats them, one that does not.

What they are about to send they write down in the model, and what became of it; what a crash leaves
open, the first sends again in the next life, with the same numbers, and must find it there once.
"""

from __future__ import annotations

import asyncio
from collections import deque

from quackmq import limits
from quackmq.errors import (
    OutOfOrderSequence,
    ProducerFenced,
    QuackError,
    Refused,
    RepeatForgotten,
    UnknownProducer,
    UnknownTopic,
    WriteFailed,
)
from quackmq.model.policy import Policy
from quackmq.model.subscription import parse_position
from quackmq.model.topic import AppendResult, PartitionKey
from quackmq.records.batch import Batch, Record
from tests.simulation.life import CALLER, Life
from tests.simulation.model import Attempt, Violation, make_body, make_values

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


async def mind_room(life: Life) -> None:
    """As a listener does, though not always: the store must bear it."""
    if life.source.random() < 0.7:
        await life.broker.room()


async def publish(life: Life, attempt: Attempt) -> AppendResult:
    """One call, its outcome written down."""
    topic = life.broker.topic_by_id(attempt.key.topic_id)
    body = attempt.body
    assert body is not None
    repeat = attempt.calls > 0
    # A buffer that is handed over may be kept by the store, and is nobody else's any more.
    owned = life.source.random() < 0.3
    batch = Batch.parse(bytearray(body) if owned else body)
    life.counts["buffers handed over"] += owned and len(body) >= limits.KEPT_BATCH_BYTES
    with life.model.calling(attempt):
        answer = await life.broker.publish(CALLER, topic, attempt.key.partition, batch, owned=owned)
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
        await mind_room(life)
        answers = await asyncio.gather(
            *(publish(life, attempt) for attempt in attempts), return_exceptions=True
        )
        unknown: QuackError | None = None
        refused = False
        for attempt, answer in zip(list(attempts), answers, strict=True):
            if isinstance(answer, AppendResult):
                self._settle(key, attempt)
            elif isinstance(answer, UnknownTopic):
                life.excuse(key, answer)
            elif isinstance(answer, Refused):
                refused = True  # the topic is full; all of it is sent again later, in order
            elif isinstance(answer, OutOfOrderSequence | UnknownProducer) and refused:
                continue
            elif isinstance(answer, _SEQUENCE_ERRORS):
                raise Violation(f"{attempt} was refused: {answer!r}") from answer
            elif isinstance(answer, WriteFailed):
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
                await self._put(life, key)
            else:
                await self._publish_batches(life, key)
        except UnknownTopic as error:
            life.excuse(key, error)
        except Refused:
            life.counts["publishes refused by a full topic"] += 1

    async def _publish_batches(self, life: Life, key: PartitionKey) -> None:
        await mind_room(life)
        attempts = [new_attempt(life, key) for _ in range(life.source.choice((1, 1, 1, 3, 8)))]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_publish_quietly(life, each)) for each in attempts]
        for task in tasks:
            error = task.result()
            if error is not None:
                raise error

    async def _put(self, life: Life, key: PartitionKey) -> None:
        name = life.broker.topic_by_id(key.topic_id).name
        sizes = [life.source.randint(0, 100) for _ in range(life.source.choice((1, 1, 3)))]
        values = make_values(len(life.model.attempts), sizes)
        attempt = life.model.attempt(key, values, None, ordered=False)
        records = [Record(0, life.now_ms(), b"key", value) for value in values]
        with life.model.calling(attempt):
            put = await life.broker.messages.put(CALLER, name, records, partition=key.partition)
            base_offset = parse_position(put.ids[0], key.topic_id).offset
            life.model.acknowledge(attempt, base_offset, base_offset + len(put.ids))


async def _publish_quietly(life: Life, attempt: Attempt) -> QuackError | None:
    """A task group would cancel the others for one error, and they are not to blame."""
    try:
        await publish(life, attempt)
    except QuackError as error:
        return error
    return None
