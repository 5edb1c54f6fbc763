"""confluent-kafka, that is librdkafka, against the Kafka door."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError
from confluent_kafka.admin import NewPartitions, NewTopic

from quackmq import limits
from tests.interop import scenarios
from tests.interop.confluent import (
    Reader,
    admin,
    has_partitions,
    produced,
    producer,
    quiet,
    wait_for,
)
from tests.interop.programs import Client
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker
from tests.interop.table import each_compression

CLIENT: Final = Client(sys.executable, "-m", "tests.interop.python.confluent_program")


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression("confluent-kafka"))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    client = producer(broker, compression_type=compression, linger_ms=50)
    values = [b"%d " % number + b"quack " * 100 for number in range(200)]
    assert produced(client, "news", *values) == list(range(200))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert broker.values("news") == values
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(200) == values


@pytest.mark.proves("confluent-kafka", "headers and keys")
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


@pytest.mark.proves("confluent-kafka", "consume from start")
@pytest.mark.proves("confluent-kafka", "from end")
@pytest.mark.proves("confluent-kafka", "from a time")
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


@pytest.mark.proves("confluent-kafka", "produce")
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


def test_a_record_above_the_limit_is_refused_and_others_are_not(broker: RunningBroker) -> None:
    client = producer(broker, message_max_bytes=64 * limits.MIB, queue_buffering_max_kbytes=200_000)
    too_large = bytes(limits.BATCH_BYTES)
    assert produced(client, "news", b"small") == [0]
    assert produced(client, "news", too_large) == [KafkaError.MSG_SIZE_TOO_LARGE]
    large = bytes(limits.BATCH_BYTES - 1000)
    assert produced(client, "news", large, b"small") == [1, 2]
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(3) == [b"small", large, b"small"]


@pytest.mark.processes
@pytest.mark.proves("confluent-kafka", "idempotent produce across kill -9")
def test_a_producer_lives_through_kills_of_the_broker(tmp_path: Path) -> None:
    scenarios.a_producer_lives_through_kills(CLIENT, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.proves("confluent-kafka", "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("confluent-kafka", "cooperative rebalance")
def test_a_rebalance_leaves_alone_what_stays() -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("confluent-kafka", "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(CLIENT)


@pytest.mark.processes
@pytest.mark.proves("confluent-kafka", "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    """M8: offsets are committed after processing, and a group goes on from there."""
    scenarios.a_group_goes_on_after_the_broker_died(CLIENT, tmp_path / "data")


def test_a_second_instance_of_a_static_member_takes_its_place(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"quack")
    with member(broker, "news", group_instance_id="duck") as first:
        wait_for(first, lambda: len(first.assignment()) == 1)
        with member(broker, "news", group_instance_id="duck") as second:
            wait_for(second, lambda: len(second.assignment()) == 1)
            told: list[KafkaError] = []
            wait_for(first, lambda: bool(told), told)
            assert told[0].code() == KafkaError._FATAL
            assert "fenced" in told[0].str()


def test_members_hear_of_new_topics_and_partitions(broker: RunningBroker) -> None:
    administrator = admin(broker)
    with member(broker, "^news.*") as client:
        for wanted, count in ((NewTopic("news"), 1), (NewTopic("newsletter", 2), 3)):
            administrator.create_topics([wanted])[wanted.topic].result(DEADLINE_SECONDS)
            wait_for(client, partial(has_partitions, client, count))
        grown = administrator.create_partitions([NewPartitions("news", 3)])
        grown["news"].result(DEADLINE_SECONDS)
        wait_for(client, lambda: len(client.assignment()) == 5)


@contextmanager
def member(broker: RunningBroker, topic: str, **settings: Any) -> Iterator[Consumer]:
    """A consumer in a group that looks often for news of topics."""
    made = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "ducks",
            "heartbeat.interval.ms": 100,
            "topic.metadata.refresh.interval.ms": 100,
            "auto.offset.reset": "earliest",
            "error_cb": quiet,
            "log_level": 0,
        }
        | {name.replace("_", "."): value for name, value in settings.items()}
    )
    made.subscribe([topic])
    try:
        yield made
    finally:
        made.close()


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
