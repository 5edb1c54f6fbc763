"""What clients were told, and therefore what a store must still hold: the checker's memory.

Clients write down here what they are about to do before they do it, and what came of it. A call
that never returned has an unknown outcome: its value may be there or not, until somebody looks
after the next recovery; what was seen once must stay. Nothing here asks the store.

Every batch is told apart from every other by its bytes, so one that is found in a log is known at
once: who sent it, where it must lie, whether it may be there at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from quackmq.errors import BrokerClosing, QuackError, QuackTimeout, StorageError
from quackmq.model.topic import CursorKey, PartitionKey, Topic
from quackmq.records import codec
from quackmq.records.batch import Batch, Record

V = TypeVar("V")
#: The next offset that a subscription wants, by partition.
Cursors = tuple[int, ...]

#: Errors after which a change may have happened all the same.
UNKNOWN_OUTCOMES = (StorageError, BrokerClosing, QuackTimeout)
#: The bytes of a batch that the broker may stamp: offset, and leader epoch.
_STAMPED = (slice(0, 8), slice(12, 16))


def leader_epoch_of(metadata: str) -> int:
    """The leader epoch that a cursor with this metadata was set with; some have none."""
    tick = metadata.removeprefix("m")
    return int(tick) % 5 - 1 if metadata.startswith("m") and tick.isdecimal() else -1


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Register(Generic[V]):
    """One durable value with one writer: what was acknowledged last, and what may be there instead
    because nobody learned what became of it."""

    name: str
    known: V
    maybe: list[V] = field(default_factory=list)
    past: list[V] = field(default_factory=list)

    def settle(self, value: V) -> None:
        self.past.append(self.known)
        self.known = value
        self.maybe.clear()

    def observe(self, value: V, *, lossy: bool = False) -> None:
        """Somebody looked, and nothing was under way."""
        allowed = [self.known, *self.maybe, *(self.past if lossy else ())]
        if value not in allowed:
            raise Violation(f"{self.name} is {value!r}, but should be one of {allowed!r}")
        if value != self.known:
            self.settle(value)
        self.maybe.clear()


@dataclass(eq=False)
class Attempt:
    """One batch that somebody tries to publish, however often. `began` and `returned` are ticks."""

    number: int
    key: PartitionKey
    records: int
    #: The batch as sent; None where the broker builds it, until it was seen.
    body: bytes | None
    values: tuple[bytes, ...]
    producer: tuple[int, int, int] | None
    #: Whether its call gave it its place in the order.
    ordered: bool
    began: int = 0
    returned: float = float("inf")
    calls: int = 0
    status: Literal["open", "acknowledged", "refused", "absent"] = "open"
    offset: int | None = None
    #: It cannot lie before this: the end of the partition when it was first sent.
    floor: int = 0
    append_time_ms: int | None = None

    def __str__(self) -> str:
        where = f"{self.key.topic_id.hex[:6]}/{self.key.partition}"
        at = "" if self.offset is None else f" at {self.offset}"
        sent = "" if self.producer is None else f" producer {self.producer}"
        return f"batch {self.number} of {where}, {self.records} records,{sent} {self.status}{at}"


@dataclass(eq=False)
class PartitionModel:
    """What is known of one partition. `at` has every offset that was ever readable."""

    key: PartitionKey
    at: dict[int, Attempt] = field(default_factory=dict)
    first: int = 0
    #: Where the beginning may lie because a trim's outcome is unknown.
    first_at_most: int = 0
    next: int = 0
    epoch: int = 0
    #: Offsets that a power cut took in a weak mode: never to be seen again.
    burned: set[int] = field(default_factory=set)
    #: Whether a policy moves the beginning.
    trims_itself: bool = False
    gaps_allowed: bool = False


@dataclass(eq=False)
class Unit:
    """Changes of one call: all of them are there, or none."""

    attempts: list[Attempt]
    cursors: list[tuple[CursorKey, tuple[int | None, str]]]


@dataclass(frozen=True)
class Wish:
    """A topic as a client asked for it. The store gives the id, so two wishes look alike."""

    partitions: int
    policy: object


@dataclass(eq=False)
class TopicSlot:
    """A topic's name. `maybe` holds what it may be instead: another topic, a wish, or nothing."""

    name: str
    known: Topic | None = None
    maybe: list[Topic | Wish | None] = field(default_factory=list)
    past: list[Topic | None] = field(default_factory=list)
    busy: bool = False

    def settle(self, topic: Topic | None) -> None:
        self.past.append(self.known)
        self.known = topic
        self.maybe.clear()

    def allows(self, topic: Topic | None, *, lossy: bool) -> bool:
        allowed: list[Topic | Wish | None] = [self.known, *self.maybe]
        if lossy:
            allowed += self.past
        return any(_matches(topic, each) for each in allowed)


class Model:
    def __init__(self) -> None:
        self.topics: dict[str, TopicSlot] = {}
        self.partitions: dict[PartitionKey, PartitionModel] = {}
        self.cursors: dict[CursorKey, Register[tuple[int | None, str]]] = {}
        self.subscriptions: dict[tuple[uuid.UUID, str], Register[Cursors | None]] = {}
        self.states: dict[str, Register[tuple[bytes | None, int]]] = {}
        self.attempts: list[Attempt] = []
        self.units: list[Unit] = []
        self.producer_ids: set[int] = set()
        #: The power was cut in a weak mode, some time: what was given once may be given again.
        self.lossy = False
        #: Ids of topics that were deleted, or whose deletion was asked for.
        self.doomed: set[uuid.UUID] = set()
        #: Those of them whose deletion is certain.
        self.gone: set[uuid.UUID] = set()
        self.topic_ids: set[uuid.UUID] = set()
        self.cluster_id: str | None = None
        #: The store of this life has said that it only reads: from now on a refusal is certain.
        self.read_only = False
        self._by_body: dict[bytes, Attempt] = {}
        self._ticks = 0

    def tick(self) -> int:
        """A clock that never stands still, for what came before what."""
        self._ticks += 1
        return self._ticks

    # --- topics -------------------------------------------------------------------------------

    def live_topics(self) -> list[Topic]:
        """Those that certainly exist and nobody is about to delete."""
        return [
            slot.known
            for _, slot in sorted(self.topics.items())
            if slot.known is not None and slot.known.id not in self.doomed
        ]

    def topic_with(self, key: PartitionKey) -> Topic | None:
        return next((each for each in self.live_topics() if each.id == key.topic_id), None)

    def partition(self, key: PartitionKey) -> PartitionModel:
        return self.partitions.setdefault(key, PartitionModel(key))

    @contextmanager
    def changing_topic(self, slot: TopicSlot, wish: Topic | Wish | None) -> Iterator[None]:
        """Around the call that creates, alters or deletes; the caller settles what it was told."""
        definite = self.read_only
        slot.busy = True
        slot.maybe.append(wish)
        try:
            yield
        except QuackError as error:
            if definite or not isinstance(error, UNKNOWN_OUTCOMES):
                slot.maybe.remove(wish)
            raise
        finally:
            slot.busy = False

    def learn_topic(self, topic: Topic, *, again: bool = False) -> None:
        """A topic is there. Ids are never used twice, whatever becomes of names; `again` where a
        power cut may have brought an old one back."""
        slot = self.topics[topic.name]
        if slot.known is None or slot.known.id != topic.id:
            if topic.id in self.topic_ids and not again:
                raise Violation(f"the id of {topic} was used before")
            self.topic_ids.add(topic.id)
        slot.settle(topic)
        policy = topic.policy
        trims = policy.keep_for_ms is not None or policy.keep_bytes is not None
        trims = trims or policy.keep_until_consumed or policy.when_full == "drop_oldest"
        for partition in range(topic.partitions):
            model = self.partition(PartitionKey(topic.id, partition))
            model.trims_itself = model.trims_itself or trims

    # --- cursors and state --------------------------------------------------------------------

    @contextmanager
    def changing(self, register: Register[V], value: V) -> Iterator[None]:
        """Around the call that sets `value`. What ends the block tells the outcome."""
        definite = self.read_only
        register.maybe.append(value)
        try:
            yield
        except QuackError as error:
            if definite or not isinstance(error, UNKNOWN_OUTCOMES):
                register.maybe.remove(value)
            raise
        register.settle(value)

    # --- batches ------------------------------------------------------------------------------

    def attempt(
        self,
        key: PartitionKey,
        values: tuple[bytes, ...],
        body: bytes | None,
        producer: tuple[int, int, int] | None = None,
        *,
        ordered: bool = True,
    ) -> Attempt:
        number = len(self.attempts)
        attempt = Attempt(number, key, len(values), body, values, producer, ordered)
        self.attempts.append(attempt)
        if body is not None:
            self._by_body[_unstamped(body)] = attempt
        return attempt

    @contextmanager
    def calling(self, *attempts: Attempt) -> Iterator[None]:
        """Around a publishing call; on success the caller says where each batch lies."""
        definite = self.read_only
        for attempt in attempts:
            if not attempt.calls:
                attempt.began = self.tick()
                attempt.floor = self.partition(attempt.key).next
            attempt.calls += 1
            attempt.status = "open"
        try:
            yield
        except QuackError as error:
            if isinstance(error, UNKNOWN_OUTCOMES) and not definite:
                raise
            for attempt in attempts:
                if attempt.calls == 1 and attempt.offset is None:
                    attempt.status = "refused"
            raise

    def acknowledge(self, attempt: Attempt, base_offset: int, next_offset: int) -> None:
        if next_offset - base_offset != attempt.records:
            raise Violation(f"{attempt} was given offsets {base_offset} to {next_offset}")
        attempt.returned = self.tick()
        self._place(attempt, base_offset)
        attempt.status = "acknowledged"

    def observe_batch(self, key: PartitionKey, batch: Batch) -> Attempt:
        """A batch was read. It must be one that somebody sent to this partition, unchanged, at a
        place that nobody else ever had."""
        attempt = self.recognise(key, batch)
        if attempt.status in ("refused", "absent"):
            raise Violation(f"{attempt} is readable at {batch.base_offset}")
        self._place(attempt, batch.base_offset)
        return attempt

    def recognise(self, key: PartitionKey, batch: Batch) -> Attempt:
        """Whose batch this is: bytes that somebody sent to this partition, or a Violation."""
        body = _unstamped(batch.view)
        attempt = self._by_body.get(body)
        if attempt is None:
            attempt = self._built_by_broker(batch, body)
        if attempt is None:
            raise Violation(f"nobody sent the batch at {batch.base_offset} of {key}")
        if attempt.key != key:
            raise Violation(f"{attempt} is readable in {key}")
        return attempt

    def held(self, key: PartitionKey) -> list[Attempt]:
        """The batches that a partition is known to hold, in order."""
        partition = self.partition(key)
        held = {
            attempt: None
            for offset, attempt in partition.at.items()
            if offset >= partition.first and offset not in partition.burned
        }
        return sorted(held, key=lambda attempt: attempt.offset or 0)

    def _built_by_broker(self, batch: Batch, body: bytes) -> Attempt | None:
        values = tuple(record.value or b"" for record in codec.decode(batch))
        number = attempt_number(values[0])
        attempt = self.attempts[number] if number < len(self.attempts) else None
        if attempt is None or attempt.body is not None or attempt.values != values:
            return None
        attempt.body = bytes(batch.view)
        self._by_body[body] = attempt
        return attempt

    def _place(self, attempt: Attempt, base_offset: int) -> None:
        if attempt.offset is not None and attempt.offset != base_offset:
            raise Violation(f"{attempt} also lies at {base_offset}: it is there twice")
        partition = self.partition(attempt.key)
        for offset in range(base_offset, base_offset + attempt.records):
            other = partition.at.setdefault(offset, attempt)
            if other is not attempt or offset in partition.burned:
                raise Violation(f"offset {offset} had {other} and has {attempt} now")
        attempt.offset = base_offset
        partition.next = max(partition.next, base_offset + attempt.records)


def make_values(number: int, sizes: list[int]) -> tuple[bytes, ...]:
    """The values of an attempt's records, each different from every other ever made."""
    return tuple(
        b"%d.%d:" % (number, index) + bytes([65 + (number + index) % 26]) * size
        for index, size in enumerate(sizes)
    )


def attempt_number(value: bytes) -> int:
    return int(value.partition(b".")[0])


def make_body(
    values: tuple[bytes, ...],
    timestamp_ms: int,
    producer: tuple[int, int, int] | None,
    *,
    transactional: bool = False,
) -> bytes:
    records = [Record(0, timestamp_ms + index, None, value) for index, value in enumerate(values)]
    if producer is None:
        return codec.encode(records)
    producer_id, epoch, sequence = producer
    return codec.encode(
        records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


def _unstamped(body: bytes | memoryview) -> bytes:
    data = bytearray(body)
    for stamped in _STAMPED:
        data[stamped] = bytes(stamped.stop - stamped.start)
    return bytes(data)


def _matches(topic: Topic | None, allowed: Topic | Wish | None) -> bool:
    if isinstance(allowed, Wish):
        return topic is not None and Wish(topic.partitions, topic.policy) == allowed
    return topic == allowed
