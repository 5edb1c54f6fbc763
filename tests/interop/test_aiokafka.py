"""aiokafka, a client for asyncio, against the Kafka door."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from quackmq.model.policy import Policy
from tests.interop import scenarios
from tests.interop.programs import Client
from tests.interop.running import TESTER, RunningBroker
from tests.interop.table import each_compression

CLIENT: Final = Client(sys.executable, "-m", "tests.interop.python.aiokafka_program")
NEWS: Final = TopicPartition("news", 0)


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@asynccontextmanager
async def producer(broker: RunningBroker, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    made = AIOKafkaProducer(bootstrap_servers=broker.address, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def consumer(
    broker: RunningBroker, *topics: str, **settings: Any
) -> AsyncIterator[AIOKafkaConsumer]:
    settings = {"fetch_max_wait_ms": 50, "auto_offset_reset": "none", **settings}
    made = AIOKafkaConsumer(*topics, bootstrap_servers=broker.address, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def admin(broker: RunningBroker) -> AsyncIterator[AIOKafkaAdminClient]:
    made = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def publish(broker: RunningBroker, *values: bytes | None, **more: Any) -> None:
    async with producer(broker) as client:
        for value in values:
            await client.send_and_wait("news", value, **more)


async def values(client: AIOKafkaConsumer, count: int) -> list[bytes]:
    return [(await client.getone()).value for _ in range(count)]


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression("aiokafka"))
async def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    sent = [b"%d " % number + b"quack " * 100 for number in range(200)]
    kind = None if compression == "none" else compression
    async with producer(broker, compression_type=kind, linger_ms=20) as client:
        futures = [await client.send("news", value) for value in sent]
        assert [(await future).offset for future in futures] == list(range(200))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert broker.values("news") == sent
    async with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        assert await values(client, 200) == sent


@pytest.mark.proves("aiokafka", "produce")
@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_every_kind_of_acknowledgement_works(broker: RunningBroker, acks: int | str) -> None:
    async with producer(broker, acks=acks) as client:
        for _ in range(100):
            await client.send("news", b"quack")
    async with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        assert await values(client, 100) == [b"quack"] * 100


@pytest.mark.proves("aiokafka", "headers and keys")
async def test_records_come_back_with_key_headers_and_timestamp(broker: RunningBroker) -> None:
    headers = [("kind", b"duck"), ("kind", b"goose"), ("empty", b"")]
    await publish(broker, b"quack", key=b"pond", headers=headers, timestamp_ms=1234)
    await publish(broker, None, key=b"pond")
    async with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        first, second = await client.getone(), await client.getone()
    assert (first.key, first.value, list(first.headers)) == (b"pond", b"quack", headers)
    assert first.timestamp == 1234
    assert (second.key, second.value) == (b"pond", None)


@pytest.mark.proves("aiokafka", "consume from start")
@pytest.mark.proves("aiokafka", "from end")
@pytest.mark.proves("aiokafka", "from a time")
async def test_a_reader_begins_at_the_start_the_end_or_a_time(broker: RunningBroker) -> None:
    for number in range(10):
        await publish(broker, b"%d" % number, timestamp_ms=1000 + 100 * number)
    async with consumer(broker) as client:
        client.assign([NEWS])
        await client.seek_to_beginning(NEWS)
        assert await values(client, 10) == [b"%d" % number for number in range(10)]
        assert await client.beginning_offsets([NEWS]) == {NEWS: 0}
        assert await client.end_offsets([NEWS]) == {NEWS: 10}
        for time_ms, offset in ((0, 0), (1000, 0), (1001, 1), (1900, 9)):
            found = await client.offsets_for_times({NEWS: time_ms})
            assert found[NEWS].offset == offset
        assert await client.offsets_for_times({NEWS: 1901}) == {NEWS: None}
        client.seek(NEWS, 7)
        assert await values(client, 3) == [b"7", b"8", b"9"]
        client.seek(NEWS, 0)
        await client.seek_to_end(NEWS)
        assert await client.position(NEWS) == 10
        await publish(broker, b"the latest")
        assert await values(client, 1) == [b"the latest"]


async def test_an_idempotent_producer_numbers_its_batches(broker: RunningBroker) -> None:
    async with producer(broker, enable_idempotence=True) as client:
        for number in range(5):
            assert (await client.send_and_wait("news", b"%d" % number)).offset == number
    batches = broker.batches("news")
    assert {batch.producer_id for batch in batches} != {-1}
    assert [batch.base_sequence for batch in batches] == list(range(5))


@pytest.mark.processes
@pytest.mark.proves("aiokafka", "idempotent produce across kill -9")
def test_a_producer_lives_through_kills_of_the_broker(tmp_path: Path) -> None:
    scenarios.a_producer_lives_through_kills(CLIENT, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.proves("aiokafka", "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("aiokafka", "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("aiokafka", "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(CLIENT, tmp_path / "data")


# --- administration ----------------------------------------------------------------------------


@pytest.mark.proves("aiokafka", "create topics")
async def test_topics_are_created_listed_and_deleted(broker: RunningBroker) -> None:
    async with admin(broker) as client:
        first = NewTopic("first", 3, 1, topic_configs={"retention.ms": "60000"})
        made = await client.create_topics([first, NewTopic("second", 1, 1)])
        assert [(topic, code) for topic, code, *_ in made.topic_errors] == [
            ("first", 0),
            ("second", 0),
        ]
        assert sorted(await client.list_topics()) == ["first", "second"]
        (described,) = await client.describe_topics(["first"])
        assert len(described["partitions"]) == 3
        assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
        await client.delete_topics(["first"])
        assert await client.list_topics() == ["second"]


@pytest.mark.proves("aiokafka", "admin calls", "configs", "partitions", "delete records")
async def test_configs_partitions_and_records_are_administered(broker: RunningBroker) -> None:
    await publish(broker, b"0", b"1", b"2")
    async with admin(broker) as client:
        resource = ConfigResource(ConfigResourceType.TOPIC, "news", {"retention.ms": "60000"})
        await client.alter_configs([resource])
        assert broker.broker.topic("news").policy == Policy(keep_for_ms=60_000)
        asked = ConfigResource(ConfigResourceType.TOPIC, "news", {"retention.ms": ""})
        (answer,) = await client.describe_configs([asked])
        ((code, *_, entries),) = answer.resources
        assert code == 0
        assert [entry[:2] for entry in entries] == [("retention.ms", "60000")]

        await client.create_partitions({"news": NewPartitions(3)})
        assert broker.broker.topic("news").partitions == 3

        assert await client.delete_records({NEWS: RecordsToDelete(before_offset=2)}) == {NEWS: 2}
    async with consumer(broker) as reader:
        reader.assign([NEWS])
        await reader.seek_to_beginning(NEWS)
        assert await values(reader, 1) == [b"2"]


@pytest.mark.proves("aiokafka", "admin calls", "groups")
async def test_groups_are_administered(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news"))
    await publish(broker, b"0", b"1", b"2")
    settings = {"group_id": "ducks", "auto_offset_reset": "earliest"}
    async with admin(broker) as client, consumer(broker, "news", **settings) as member:
        assert await values(member, 2) == [b"0", b"1"]
        await member.commit({NEWS: 2})
        assert await client.list_consumer_groups() == [("ducks", "consumer")]
        (answer,) = await client.describe_consumer_groups(["ducks"])
        ((code, name, state, *_),) = answer.groups
        assert (code, name, state) == (0, "ducks", "Stable")
        offsets = await client.list_consumer_group_offsets("ducks")
        assert {place: told.offset for place, told in offsets.items()} == {NEWS: 2}
