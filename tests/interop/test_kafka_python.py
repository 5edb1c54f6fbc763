"""kafka-python, all of it Python, against the Kafka door."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from kafka import (
    KafkaAdminClient,
    KafkaConsumer,
    KafkaProducer,
    OffsetAndMetadata,
    TopicPartition,
)
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import NoError, TopicAlreadyExistsError

from quackmq.model.policy import Policy
from tests.interop import scenarios
from tests.interop.programs import Client
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker
from tests.interop.table import each_compression

CLIENT: Final = Client(sys.executable, "-m", "tests.interop.python.kafka_python_program")
NEWS: Final = TopicPartition("news", 0)


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


def producer(broker: RunningBroker, **settings: Any) -> Any:
    return closing(KafkaProducer(bootstrap_servers=broker.address, **settings))


def consumer(broker: RunningBroker, **settings: Any) -> Any:
    quiet = {"fetch_max_wait_ms": 50, "auto_offset_reset": "none", "enable_auto_commit": False}
    return closing(KafkaConsumer(bootstrap_servers=broker.address, **{**quiet, **settings}))


def admin(broker: RunningBroker) -> Any:
    return closing(KafkaAdminClient(bootstrap_servers=broker.address))


def publish(broker: RunningBroker, *values: bytes | None, **more: Any) -> None:
    with producer(broker) as client:
        for value in values:
            client.send("news", value, **more).get(DEADLINE_SECONDS)


def take(client: KafkaConsumer, count: int) -> list[Any]:
    """So many records, whatever comes."""
    records: list[Any] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(records) < count:
        assert time.monotonic() < deadline, f"{len(records)} of {count} came"
        for got in client.poll(100, max_records=count - len(records)).values():
            records += got
    return records


def values(client: KafkaConsumer, count: int) -> list[bytes]:
    return [record.value for record in take(client, count)]


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression("kafka-python"))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    sent = [b"%d " % number + b"quack " * 100 for number in range(200)]
    kind = None if compression == "none" else compression
    with producer(broker, compression_type=kind, linger_ms=20) as client:
        futures = [client.send("news", value) for value in sent]
        offsets = [future.get(DEADLINE_SECONDS).offset for future in futures]
    assert offsets == list(range(200))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert broker.values("news") == sent
    with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        assert values(client, 200) == sent


@pytest.mark.proves("kafka-python", "produce")
@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_every_kind_of_acknowledgement_works(broker: RunningBroker, acks: int | str) -> None:
    with producer(broker, acks=acks, enable_idempotence=False) as client:
        for _ in range(100):
            client.send("news", b"quack")
        client.flush(DEADLINE_SECONDS)
    with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        assert values(client, 100) == [b"quack"] * 100


@pytest.mark.proves("kafka-python", "headers and keys")
def test_records_come_back_with_key_headers_and_timestamp(broker: RunningBroker) -> None:
    headers = [("kind", b"duck"), ("kind", b"goose"), ("empty", b"")]
    publish(broker, b"quack", key=b"pond", headers=headers, timestamp_ms=1234)
    publish(broker, None, key=b"pond")
    with consumer(broker) as client:
        client.assign([NEWS])
        client.seek(NEWS, 0)
        first, second = take(client, 2)
    assert (first.key, first.value, list(first.headers)) == (b"pond", b"quack", headers)
    assert first.timestamp == 1234
    assert (second.key, second.value) == (b"pond", None)


@pytest.mark.proves("kafka-python", "consume from start")
@pytest.mark.proves("kafka-python", "from end")
@pytest.mark.proves("kafka-python", "from a time")
def test_a_reader_begins_at_the_start_the_end_or_a_time(broker: RunningBroker) -> None:
    for number in range(10):
        publish(broker, b"%d" % number, timestamp_ms=1000 + 100 * number)
    with consumer(broker) as client:
        client.assign([NEWS])
        client.seek_to_beginning(NEWS)
        assert values(client, 10) == [b"%d" % number for number in range(10)]
        assert client.beginning_offsets([NEWS]) == {NEWS: 0}
        assert client.end_offsets([NEWS]) == {NEWS: 10}
        for time_ms, offset in ((0, 0), (1000, 0), (1001, 1), (1900, 9)):
            assert client.offsets_for_times({NEWS: time_ms})[NEWS].offset == offset
        assert client.offsets_for_times({NEWS: 1901}) == {NEWS: None}
        client.seek(NEWS, 7)
        assert values(client, 3) == [b"7", b"8", b"9"]
        client.seek(NEWS, 0)
        client.seek_to_end(NEWS)
        assert client.position(NEWS) == 10
        publish(broker, b"the latest")
        assert values(client, 1) == [b"the latest"]


def test_an_idempotent_producer_numbers_its_batches(broker: RunningBroker) -> None:
    with producer(broker, enable_idempotence=True) as client:
        for number in range(5):
            sent = client.send("news", b"%d" % number)
            assert sent.get(DEADLINE_SECONDS).offset == number
    batches = broker.batches("news")
    assert {batch.producer_id for batch in batches} != {-1}
    assert [batch.base_sequence for batch in batches] == list(range(5))


@pytest.mark.processes
@pytest.mark.proves("kafka-python", "idempotent produce across kill -9")
def test_a_producer_lives_through_kills_of_the_broker(tmp_path: Path) -> None:
    scenarios.a_producer_lives_through_kills(CLIENT, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.proves("kafka-python", "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("kafka-python", "cooperative rebalance")
def test_a_rebalance_leaves_alone_what_stays() -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("kafka-python", "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("kafka-python", "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(CLIENT, tmp_path / "data")


# --- administration ----------------------------------------------------------------------------


@pytest.mark.proves("kafka-python", "create topics")
def test_topics_are_created_listed_and_deleted(broker: RunningBroker) -> None:
    with admin(broker) as client:
        first = {"num_partitions": 3, "configs": {"retention.ms": "60000"}}
        client.create_topics({"first": first, "second": {}}, wait_for_metadata=True)
        assert sorted(client.list_topics()) == ["first", "second"]
        (described,) = client.describe_topics(["first"])
        assert len(described["partitions"]) == 3
        assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
        with pytest.raises(TopicAlreadyExistsError):
            client.create_topics(["first"])
        client.delete_topics(["first"])
        assert client.list_topics() == ["second"]


@pytest.mark.proves("kafka-python", "admin calls", "configs", "partitions", "delete records")
def test_configs_partitions_and_records_are_administered(broker: RunningBroker) -> None:
    publish(broker, b"0", b"1", b"2")

    def resource(**configs: str) -> ConfigResource:
        names = {name.replace("_", "."): value for name, value in configs.items()}
        return ConfigResource(ConfigResourceType.TOPIC, "news", names or None)

    with admin(broker) as client:
        client.alter_configs([resource(retention_ms="60000")])
        assert broker.broker.topic("news").policy == Policy(keep_for_ms=60_000)
        client.alter_configs([resource(retention_bytes="1000000")])
        assert broker.broker.topic("news").policy == Policy(
            keep_for_ms=60_000, keep_bytes=1_000_000
        )
        told = client.describe_configs([resource()])["topic"]["news"]
        assert {name: config["value"] for name, config in told.items()} == {
            "retention.ms": "60000",
            "retention.bytes": "1000000",
        }
        client.reset_configs([resource(retention_ms="", retention_bytes="")])
        assert broker.broker.topic("news").policy == Policy()

        client.create_partitions({"news": 3})
        assert broker.broker.topic("news").partitions == 3

        deleted = client.delete_records({NEWS: 2})
        assert deleted[NEWS]["low_watermark"] == 2
    with consumer(broker) as client:
        client.assign([NEWS])
        client.seek_to_beginning(NEWS)
        assert values(client, 1) == [b"2"]


@pytest.mark.proves("kafka-python", "admin calls", "groups")
def test_groups_are_administered(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news"))
    publish(broker, b"0", b"1", b"2")
    settings = {"group_id": "ducks", "auto_offset_reset": "earliest"}
    with admin(broker) as client:
        with consumer(broker, **settings) as member:
            member.subscribe(["news"])
            assert values(member, 2) == [b"0", b"1"]
            member.commit({NEWS: OffsetAndMetadata(2, "so far", -1)})
            (listed,) = client.list_groups()
            assert (listed["group_id"], listed["protocol_type"]) == ("ducks", "consumer")
            described = client.describe_groups(["ducks"])["ducks"]
            assert (described["error"], described["group_state"]) == (None, "Stable")
            (one,) = described["members"]
            assert one["member_assignment"]["assigned_partitions"] == [
                {"topic": "news", "partitions": [0]}
            ]
            assert client.delete_groups(["ducks"]) == {"ducks": "NonEmptyGroupError"}
        assert client.describe_groups(["ducks"])["ducks"]["group_state"] == "Empty"
        told = client.list_group_offsets("ducks")["ducks"]
        assert {place: (at.offset, at.metadata) for place, at in told.items()} == {
            NEWS: (2, "so far")
        }
        changed = client.alter_group_offsets("ducks", {NEWS: OffsetAndMetadata(1, "", -1)})
        assert changed == {NEWS: NoError}
        assert client.list_group_offsets("ducks")["ducks"][NEWS].offset == 1
        assert client.delete_group_offsets("ducks", [NEWS]) == {NEWS: NoError}
        assert client.list_group_offsets("ducks") == {"ducks": {}}
        assert client.delete_groups(["ducks"]) == {"ducks": "OK"}
        assert client.list_groups() == []
