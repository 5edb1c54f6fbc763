"""confluent-kafka, that is librdkafka, against the Kafka door."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from quackmq import limits
from quackmq.broker import BrokerSettings
from quackmq.policy import Policy
from quackmq.record import COMPRESSIONS
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


def quiet(kafka_error: KafkaError) -> None:
    """Lost connections, when the broker closes, are not worth a line on stderr."""


def producer(broker: RunningBroker, **settings: Any) -> Producer:
    return Producer(
        {"bootstrap.servers": broker.address, "error_cb": quiet, "log_level": 0}
        | {name.replace("_", "."): value for name, value in settings.items()}
    )


def produced(client: Producer, topic: str, *values: bytes, **more: Any) -> list[Any]:
    """What became of each record: its offset, or the error."""
    outcomes: list[Any] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        outcomes.append(message.offset() if error is None else error.code())

    for value in values:
        client.produce(topic, value, on_delivery=delivered, **more)
    assert client.flush(DEADLINE_SECONDS) == 0
    return outcomes


class Reader:
    """A consumer of one partition."""

    def __init__(self, broker: RunningBroker, topic: str, offset: int, partition: int = 0) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": "nobody",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": 50,
                "error_cb": quiet,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, offset)])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._consumer.close()

    def take(self, count: int) -> list[Any]:
        """So many messages, whatever comes."""
        messages: list[Any] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(messages) < count:
            assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
            messages += self._consumer.consume(count - len(messages), 0.1)
        return messages

    def values(self, count: int) -> list[bytes]:
        messages = self.take(count)
        assert [message.error() for message in messages] == [None] * count
        return [message.value() for message in messages]

    def offset_for_time(self, topic: str, timestamp: int) -> int:
        wanted = [TopicPartition(topic, 0, timestamp)]
        (found,) = self._consumer.offsets_for_times(wanted, DEADLINE_SECONDS)
        return found.offset

    def error_of(self, topic: str) -> int:
        told = self._consumer.list_topics(topic, DEADLINE_SECONDS).topics[topic]
        return told.error.code()

    def watermarks(self, topic: str) -> tuple[int, int]:
        return self._consumer.get_watermark_offsets(TopicPartition(topic, 0), DEADLINE_SECONDS)


def admin(broker: RunningBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.address, "error_cb": quiet, "log_level": 0})


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    client = producer(broker, compression_type=compression, linger_ms=50)
    values = [b"%d " % number + b"quack " * 100 for number in range(200)]
    assert produced(client, "news", *values) == list(range(200))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(200) == values


def test_records_come_back_with_key_headers_and_timestamp(broker: RunningBroker) -> None:
    client = producer(broker)
    headers = [("kind", b"duck"), ("empty", None)]
    produced(client, "news", b"quack", key=b"pond", headers=headers, timestamp=1234)
    produced(client, "news", None, key=b"pond")
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        first, second = reader.take(2)
    assert (first.key(), first.value(), first.headers()) == (b"pond", b"quack", headers)
    assert first.timestamp()[1] == 1234
    assert (second.key(), second.value()) == (b"pond", None)


def test_a_reader_begins_at_the_start_the_end_an_offset_or_a_time(broker: RunningBroker) -> None:
    client = producer(broker)
    for number in range(10):
        produced(client, "news", b"%d" % number, timestamp=1000 + 100 * number)
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(10) == [b"%d" % number for number in range(10)]
        assert reader.watermarks("news") == (0, 10)
        found = [reader.offset_for_time("news", at) for at in (0, 1000, 1001, 1900, 1901)]
        assert found == [0, 0, 1, 9, OFFSET_END]
    with Reader(broker, "news", 7) as reader:
        assert reader.values(3) == [b"7", b"8", b"9"]
    broker.wait_for_reads(0)
    with Reader(broker, "news", OFFSET_END) as reader:
        # When it reads it has found the end, and what is published now comes after it.
        broker.wait_for_reads(1)
        produced(client, "news", b"the latest")
        assert reader.values(1) == [b"the latest"]


def test_an_offset_out_of_range_is_told(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"quack")
    with Reader(broker, "news", 1000) as reader:
        (message,) = reader.take(1)
        assert message.error().code() == KafkaError._AUTO_OFFSET_RESET


def test_partitions_are_kept_apart_and_each_in_order(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=4))
    client = producer(broker, linger_ms=5)
    for number in range(400):
        client.produce("news", b"%d" % number, partition=number % 4)
    assert client.flush(DEADLINE_SECONDS) == 0
    for partition in range(4):
        with Reader(broker, "news", OFFSET_BEGINNING, partition) as reader:
            values = [int(value) for value in reader.values(100)]
        assert values == list(range(partition, 400, 4))


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_kind_of_acknowledgement_works(broker: RunningBroker, acks: str) -> None:
    produced(producer(broker, acks=acks), "news", *[b"quack"] * 100)
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(100) == [b"quack"] * 100


def test_an_idempotent_producer_numbers_its_batches(broker: RunningBroker) -> None:
    client = producer(broker, enable_idempotence=True)
    for number in range(5):
        assert produced(client, "news", b"%d" % number) == [number]
    batches = broker.batches("news")
    assert {batch.producer_id for batch in batches} != {-1}
    assert [batch.base_sequence for batch in batches] == list(range(5))
    other = producer(broker, enable_idempotence=True)
    produced(other, "news", b"5")
    assert broker.batches("news")[-1].producer_id != batches[0].producer_id


def test_a_transactional_producer_is_told_that_there_are_no_transactions(
    broker: RunningBroker,
) -> None:
    client = producer(broker, transactional_id="t")
    with pytest.raises(KafkaException) as raised:
        client.init_transactions(DEADLINE_SECONDS)
    assert raised.value.args[0].fatal()


def test_a_record_above_the_limit_is_refused_and_others_are_not(broker: RunningBroker) -> None:
    client = producer(broker, message_max_bytes=64 * limits.MIB, queue_buffering_max_kbytes=200_000)
    too_large = bytes(limits.BATCH_BYTES)
    assert produced(client, "news", b"small") == [0]
    assert produced(client, "news", too_large) == [KafkaError.MSG_SIZE_TOO_LARGE]
    large = bytes(limits.BATCH_BYTES - 1000)
    assert produced(client, "news", large, b"small") == [1, 2]
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(3) == [b"small", large, b"small"]


# --- topics --------------------------------------------------------------------------------------


def test_topics_are_created_listed_and_deleted(broker: RunningBroker) -> None:
    client = admin(broker)
    wanted = [NewTopic("first", 3, config={"retention.ms": "60000"}), NewTopic("second")]
    for created in client.create_topics(wanted).values():
        created.result(DEADLINE_SECONDS)
    listed = client.list_topics(timeout=DEADLINE_SECONDS)
    assert {name: len(topic.partitions) for name, topic in listed.topics.items()} == {
        "first": 3,
        "second": 1,
    }
    assert listed.cluster_id == broker.broker.cluster_id
    assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
    client.delete_topics(["first"])["first"].result(DEADLINE_SECONDS)
    assert list(client.list_topics(timeout=DEADLINE_SECONDS).topics) == ["second"]


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (NewTopic("taken"), KafkaError.TOPIC_ALREADY_EXISTS),
        (NewTopic("a b"), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("new", replication_factor=3), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("new", config={"no.such": "1"}), KafkaError.INVALID_CONFIG),
    ],
)
def test_what_cannot_be_created_is_told_with_the_code_of_kafka(
    broker: RunningBroker, wanted: NewTopic, code: int
) -> None:
    broker.call(broker.broker.create_topic(TESTER, "taken"))
    client = admin(broker)
    with pytest.raises(KafkaException) as raised:
        client.create_topics([wanted])[wanted.topic].result(DEADLINE_SECONDS)
    assert raised.value.args[0].code() == code


def test_a_topic_that_is_not_there_is_unknown(broker: RunningBroker) -> None:
    client = admin(broker)
    with pytest.raises(KafkaException) as raised:
        client.delete_topics(["none"])["none"].result(DEADLINE_SECONDS)
    assert raised.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    with Reader(broker, "none", OFFSET_BEGINNING) as reader:
        assert reader.error_of("none") == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert "none" not in broker.broker.topics()


def test_where_topics_are_not_created_by_use_a_producer_hears_of_an_unknown_one() -> None:
    with RunningBroker(BrokerSettings(auto_create_topics=False)) as broker:
        client = producer(broker, topic_metadata_propagation_max_ms=0)
        assert produced(client, "none", b"quack") == [KafkaError.UNKNOWN_TOPIC_OR_PART]


def test_a_topic_made_anew_has_nothing_of_the_old_one(broker: RunningBroker) -> None:
    client, administrator = producer(broker), admin(broker)
    produced(client, "news", b"old")
    administrator.delete_topics(["news"])["news"].result(DEADLINE_SECONDS)
    administrator.create_topics([NewTopic("news")])["news"].result(DEADLINE_SECONDS)
    produced(producer(broker), "news", b"new")
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(1) == [b"new"]


# --- bad neighbours ------------------------------------------------------------------------------


def test_a_client_notices_nothing_of_others_that_send_garbage(broker: RunningBroker) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    host, port = broker.address.split(":")
    client = producer(broker)
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        for number in range(100):
            with socket.create_connection((host, int(port)), DEADLINE_SECONDS) as stranger:
                stranger.sendall(garbage(generator))
                assert produced(client, "news", b"%d" % number) == [number]
                if generator.random() < 0.5:
                    stranger.shutdown(socket.SHUT_WR)
        assert reader.values(100) == [b"%d" % number for number in range(100)]


def garbage(generator: random.Random) -> bytes:
    """Bytes that mean nothing, the first few of them sometimes like those of a request."""
    data = generator.randbytes(generator.randrange(1, 2000))
    if generator.random() < 0.5:
        return data
    api_key = generator.choice([0, 1, 2, 3, 10, 18, 19, 20, 22])
    version = generator.randrange(13)
    head = api_key.to_bytes(2, "big") + version.to_bytes(2, "big") + b"\0\0\0\1\xff\xff\0"
    return (len(head) + len(data)).to_bytes(4, "big") + head + data
