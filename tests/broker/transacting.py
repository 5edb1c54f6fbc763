"""A transactional producer that does as clients do, in the older way or the newer one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiokafka.record.default_records import DefaultRecordBatch

from quackmq.broker import Broker, Commit, MemberRef, ProducerEpoch, ProducerRef, TransactionState
from quackmq.errors import QuackError
from quackmq.model.topic import AppendResult, PartitionKey, Read, Slice
from tests.broker.flock import GROUP, NOBODY
from tests.broker.support import CALLER, TOPIC, key_of
from tests.kit.support import batch_of, batches_of

ID = "duck"
TIMEOUT_MS = 60_000
OTHER_TOPIC = "targets"


class Transactor:
    """With `implicit` the newer way: partitions are added by writing, and every end takes the next
    epoch."""

    def __init__(
        self, broker: Broker, transactional_id: str = ID, *, implicit: bool = True
    ) -> None:
        self.broker = broker
        self.transactional_id = transactional_id
        self.implicit = implicit
        self.producer = ProducerEpoch(-1, -1)
        self._sequences: dict[PartitionKey, int] = {}

    @property
    def ref(self) -> ProducerRef:
        return ProducerRef(self.transactional_id, *self.producer)

    async def init(self, timeout_ms: int = TIMEOUT_MS, *, named: bool = False) -> ProducerEpoch:
        named_as = self.producer if named else ProducerEpoch(-1, -1)
        init = self.broker.transactions.init(CALLER, self.transactional_id, timeout_ms, *named_as)
        self._become(await init)
        return self.producer

    async def add(self, *keys: PartitionKey) -> None:
        outcomes = await self.broker.transactions.add_partitions(CALLER, self.ref, keys)
        assert outcomes == [None] * len(keys)

    async def send(self, *values: bytes, topic: str = TOPIC, partition: int = 0) -> AppendResult:
        """Adds the partition first, if that is its way."""
        if not self.implicit:
            await self.add(key_of(self.broker.topic(topic), partition))
        return await self.write(*values, topic=topic, partition=partition)

    async def write(self, *values: bytes, topic: str = TOPIC, partition: int = 0) -> AppendResult:
        found = self.broker.topic(topic)
        key = key_of(found, partition)
        sequence = self._sequences.get(key, 0)
        batch = batch_of(
            *values,
            producer_id=self.producer.producer_id,
            producer_epoch=self.producer.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        self.broker.transactions.admit(
            CALLER, batch, found, partition, self.transactional_id, implicit=self.implicit
        )
        appended = await self.broker.publish(CALLER, found, partition, batch)
        self._sequences[key] = sequence + len(values)
        return appended

    async def send_offsets(
        self,
        offsets: Mapping[PartitionKey, int],
        group: str = GROUP,
        member: MemberRef = NOBODY,
        metadata: str = "",
    ) -> list[QuackError | None]:
        if not self.implicit:
            await self.broker.transactions.add_offsets(CALLER, self.ref, group)
        commits = [Commit(key, offset, metadata) for key, offset in offsets.items()]
        return await self.broker.transactions.commit_offsets(
            CALLER, self.ref, group, member, commits, implicit=self.implicit
        )

    async def commit(self) -> ProducerEpoch:
        return await self._end(commit=True)

    async def abort(self) -> ProducerEpoch:
        return await self._end(commit=False)

    async def _end(self, *, commit: bool) -> ProducerEpoch:
        end = self.broker.transactions.end(CALLER, self.ref, commit, bump_epoch=self.implicit)
        self._become(await end)
        return self.producer

    def _become(self, producer: ProducerEpoch) -> None:
        if producer != self.producer:
            self._sequences = {}
        self.producer = producer


async def committed_values(broker: Broker, topic: str = TOPIC, partition: int = 0) -> list[bytes]:
    """What a Kafka consumer that reads committed records sees from the beginning."""
    key = key_of(broker.topic(topic), partition)
    offsets = await broker.offsets(CALLER, key)
    reads = [Read(key, offsets.first, 2**20, committed=True)]
    (part,) = await broker.read(CALLER, reads, max_bytes=2**20)
    assert part.error is None
    return list(as_clients_see(part))


def as_clients_see(part: Slice) -> Iterator[bytes]:
    """The records of a committed read, as clients find them: whole batches, of which they leave out
    markers and those of a producer from where its aborted transaction begins to its marker."""
    to_come = sorted(part.aborted, key=lambda aborted: aborted.first_offset)
    aborting: set[int] = set()
    for batch in batches_of(part.chunks):
        while to_come and to_come[0].first_offset < batch.next_offset:
            aborting.add(to_come.pop(0).producer_id)
        if batch.is_control:
            aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            yield from (record.value for record in DefaultRecordBatch(bytearray(batch.view)))


async def topics(broker: Broker, partitions: int = 2) -> None:
    """The two that transactions write to."""
    for name in (TOPIC, OTHER_TOPIC):
        await broker.create_topic(CALLER, name, partitions=partitions)


async def stable(broker: Broker, topic: str = TOPIC, partition: int = 0) -> int:
    return (await broker.offsets(CALLER, key_of(broker.topic(topic), partition))).stable


def state_of(broker: Broker, transactional_id: str = ID) -> TransactionState:
    return broker.transactions.describe(CALLER, transactional_id).state
