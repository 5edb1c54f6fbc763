"""Publishing: what is taken, what is refused, where records go; producer ids; offsets by time."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.broker.staging.stage_log import StagedBatch
from quackmq.errors import (
    CorruptBatch,
    InvalidTransactionState,
    NoSubscriber,
    OffsetOutOfRange,
    OutOfOrderSequence,
    QuackError,
    RecordTooLarge,
    StateChanged,
    UnknownPartition,
    UnsupportedBatch,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, OffsetTime, PartitionKey, State
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    SlowStore,
    key_of,
    open_broker,
    poison_batch,
    publish,
    values_in,
)
from tests.kit.support import START_MS, Clock, batch_of
from tests.kit.tables import each


async def test_batches_are_appended_in_order_and_read_back() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        assert await publish(broker, b"a", b"b") == 0
        assert await publish(broker, b"c") == 2
        assert await values_in(broker) == [b"a", b"b", b"c"]


async def test_publishes_in_flight_keep_the_order_of_their_calls() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        batches = [batch_of(b"%d" % number) for number in range(20)]
        calls = [broker.publish(CALLER, topic, 0, batch) for batch in batches]
        answers = [await call for call in reversed(calls)]
        assert [answer.base_offset for answer in answers] == list(reversed(range(20)))


async def test_a_repeat_is_answered_like_the_first_and_a_gap_is_refused() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        first = batch_of(b"a", b"b", producer_id=7, producer_epoch=0, base_sequence=0)
        answer = await broker.publish(CALLER, topic, 0, first)
        repeat = await broker.publish(CALLER, topic, 0, first)
        assert (repeat.base_offset, repeat.repeated) == (answer.base_offset, True)
        gap = batch_of(b"c", producer_id=7, producer_epoch=0, base_sequence=5)
        with pytest.raises(OutOfOrderSequence):
            await broker.publish(CALLER, topic, 0, gap)
        assert await values_in(broker) == [b"a", b"b"]


@pytest.mark.parametrize("partition", [-1, 2])
async def test_a_partition_that_is_not_there_is_refused(partition: int) -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        with pytest.raises(UnknownPartition):
            await broker.publish(CALLER, topic, partition, batch_of(b"x"))
        with pytest.raises(UnknownPartition):
            await broker.offsets(CALLER, PartitionKey(topic.id, partition))
        with pytest.raises(UnknownPartition):
            await broker.trim(CALLER, PartitionKey(topic.id, partition), 0)


@pytest.mark.parametrize(
    ("flag", "error"), [("control", UnsupportedBatch), ("transactional", InvalidTransactionState)]
)
async def test_control_batches_and_those_of_no_transaction_are_refused(
    flag: str, error: type[QuackError]
) -> None:
    records = [Record(0, START_MS, b"key", b"x")]
    is_control = flag == "control"
    batch = Batch.parse(codec.encode(records, control=is_control, transactional=not is_control))
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(error):
            await broker.publish(CALLER, topic, 0, batch)
        assert await values_in(broker) == []


@pytest.mark.parametrize("record_count", [0, 1, 3])
async def test_a_batch_whose_count_is_wrong_is_refused(record_count: int) -> None:
    batch = batch_of(b"a", b"b")._replace(record_count=record_count)
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(CorruptBatch):
            await broker.publish(CALLER, topic, 0, batch)


async def test_a_topic_that_needs_a_subscriber_refuses_while_there_is_none() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(needs_subscriber=True))
        with pytest.raises(NoSubscriber):
            await publish(broker, b"x")
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish(broker, b"y")
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        with pytest.raises(NoSubscriber):
            await publish(broker, b"z")
        assert await values_in(broker) == [b"y"]


async def test_a_batch_beyond_what_the_topic_takes_is_refused() -> None:
    async with open_broker() as broker:
        small = batch_of(b"a" * 100)
        policy = Policy(batch_bytes=small.size)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.publish(CALLER, topic, 0, small)
        with pytest.raises(RecordTooLarge, match=f"accepts at most {small.size}"):
            await broker.publish(CALLER, topic, 0, batch_of(b"a" * 101))
        assert await values_in(broker) == [b"a" * 100]


@each("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_q5_an_entry_beyond_what_the_topic_takes_is_refused_in_any_batch(
    compression: str,
) -> None:
    def batch(*records: Record) -> Batch:
        return Batch.parse(codec.encode(records, compression=compression))

    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(entry_bytes=100))
        none, largest, larger = (
            Record(0, 0, None, value) for value in (None, b"a" * 100, b"a" * 101)
        )
        by_key = Record(0, 0, b"k" * 200, b"a" * 100, (("h", b"h" * 200),))
        await broker.publish(CALLER, topic, 0, batch(none, largest, by_key))
        with pytest.raises(RecordTooLarge, match="an entry of 101 bytes; topic .* at most 100"):
            await broker.publish(CALLER, topic, 0, batch(none, largest, by_key, larger))
        key = PartitionKey(topic.id, 0)
        with pytest.raises(RecordTooLarge):
            await broker.publish_together(CALLER, topic, [Append(key, batch(larger))])
        with pytest.raises(RecordTooLarge):
            await broker.staging.stage(CALLER, "job", "a", 0, [StagedBatch(key, batch(larger))])
        assert await values_in(broker) == [None, b"a" * 100, b"a" * 100]


async def test_a_batch_that_inflates_beyond_what_is_checked_is_refused() -> None:
    most = broker_limits.CHECKED_BATCH_BYTES

    def batch(size: int, compression: str = "zstd") -> Batch:
        return Batch.parse(codec.encode([Record(0, 0, None, b"a" * size)], compression=compression))

    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(entry_bytes=2 * most))
        await broker.publish(CALLER, topic, 0, batch(most - 100))
        with pytest.raises(RecordTooLarge, match="send smaller batches"):
            await broker.publish(CALLER, topic, 0, batch(most))
        await broker.publish(CALLER, topic, 0, batch(most, "none"))


async def test_a_topic_without_a_policy_hands_on_the_stores_own_future() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        tasks = asyncio.all_tasks()
        answer = broker.publish(CALLER, topic, 0, batch_of(b"x"))
        assert not isinstance(answer, asyncio.Task)
        assert asyncio.all_tasks() == tasks
        assert (await answer).base_offset == 0


async def test_a_store_that_answers_with_a_coroutine_is_as_good() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        assert (await broker.publish(CALLER, topic, 0, batch_of(b"x"))).base_offset == 0


async def test_a_publisher_that_goes_away_takes_nothing_with_it() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        answer = broker.publish(CALLER, topic, 0, batch_of(b"x"))
        assert isinstance(answer, asyncio.Future)
        answer.cancel()
        assert await publish(broker, b"y") == 1


# --- records ------------------------------------------------------------------------------------


# --- producer ids -------------------------------------------------------------------------------


async def test_producer_ids_never_repeat_also_after_a_crash() -> None:
    store = MemoryStore()
    ids: list[int] = []
    for _ in range(3):
        async with open_broker(store) as broker:
            wanted = broker_limits.PRODUCER_ID_BLOCK + 5
            ids += await asyncio.gather(*(broker.new_producer_id(CALLER) for _ in range(wanted)))
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 0


async def test_a_block_of_producer_ids_that_another_took_is_left_to_it() -> None:
    class Shared(MemoryStore):
        rival: int | None = None

        async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
            if self.rival is None:
                self.rival = 500
                await super().put_state(key, b"500", expected_version)
                raise StateChanged("somebody was faster")
            return await super().put_state(key, value, expected_version)

    async with open_broker(Shared()) as broker:
        assert await broker.new_producer_id(CALLER) == 500


async def test_a_producer_that_leaves_while_ids_are_reserved_holds_nobody_up(pond: Pond) -> None:
    async with pond.open() as broker:
        leaving = asyncio.create_task(broker.new_producer_id(CALLER))
        staying = asyncio.create_task(broker.new_producer_id(CALLER))
        await asyncio.sleep(0)  # the reservation is on its way to disk
        leaving.cancel()
        assert await staying < broker_limits.PRODUCER_ID_BLOCK, "a block was lost"


# --- offsets and times --------------------------------------------------------------------------


async def _publish_times(broker: Broker, *timestamps: int) -> None:
    topic = broker.topic(TOPIC)
    records = [Record(0, timestamp, None, b"x" * 10) for timestamp in timestamps]
    await broker.publish(CALLER, topic, 0, Batch.parse(codec.encode(records)))


async def test_the_offset_of_a_time_is_exact_to_the_record() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await _publish_times(broker, 100, 200, 300)
        await _publish_times(broker, 400, 350, 500)
        expected = {0: (0, 100), 100: (0, 100), 101: (1, 200), 300: (2, 300), 301: (3, 400)}
        expected |= {401: (5, 500), 500: (5, 500)}
        for timestamp_ms, (offset, found_ms) in expected.items():
            found = await broker.offset_for_time(CALLER, key, timestamp_ms)
            assert found == OffsetTime(offset, found_ms)
        assert await broker.offset_for_time(CALLER, key, 501) is None


async def test_records_that_were_trimmed_are_not_found_by_time() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await _publish_times(broker, 100, 900, 300)
        await _publish_times(broker, 800)
        await broker.trim(CALLER, key, 2)
        assert await broker.offset_for_time(CALLER, key, 300) == OffsetTime(2, 300)
        assert await broker.offset_for_time(CALLER, key, 500) == OffsetTime(3, 800)
        assert await broker.offset_for_time(CALLER, key, 850) is None


async def test_a_batch_that_cannot_be_opened_is_found_by_its_first_offset() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await _publish_times(broker, 100, 200)
        await broker.publish(CALLER, topic, 0, poison_batch(b"a", b"b", timestamp_ms=300))
        found = await broker.offset_for_time(CALLER, key_of(topic), 250)
        assert found == OffsetTime(2, 300)


async def test_trimming_moves_the_beginning_and_not_beyond_the_end() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await publish(broker, b"a", b"b", b"c")
        assert await broker.trim(CALLER, key, 2) == 2
        assert await broker.trim(CALLER, key, 1) == 2
        assert await values_in(broker) == [b"c"]
        with pytest.raises(OffsetOutOfRange):
            await broker.trim(CALLER, key, 4)
