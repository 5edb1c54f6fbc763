"""What only confluent-kafka is tried with. The proofs of all clients are in suite.py's modules."""

from __future__ import annotations

import random
import socket
from functools import partial

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError
from confluent_kafka.admin import NewPartitions, NewTopic

from quackmq import limits
from quackmq.broker import BrokerSettings
from tests.interop import scenarios
from tests.interop.confluent import (
    Reader,
    admin,
    has_partitions,
    member,
    produced,
    producer,
    wait_for,
)
from tests.interop.running import DEADLINE_SECONDS, RunningBroker

# --- topics and records --------------------------------------------------------------------------


def test_the_cluster_is_listed_under_its_id(broker: RunningBroker) -> None:
    listed = admin(broker).list_topics(timeout=DEADLINE_SECONDS)
    assert str(listed.cluster_id) == broker.broker.cluster_id


def test_a_reader_hears_of_an_unknown_topic_and_does_not_create_it(broker: RunningBroker) -> None:
    with Reader(broker, "none", OFFSET_BEGINNING) as reader:
        assert reader.error_of("none") == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert "none" not in broker.broker.topics()


def test_where_topics_are_not_created_by_use_a_producer_hears_of_an_unknown_one() -> None:
    with RunningBroker(BrokerSettings(auto_create_topics=False)) as broker:
        client = producer(broker, topic_metadata_propagation_max_ms=0)
        assert produced(client, "none", b"quack") == [KafkaError.UNKNOWN_TOPIC_OR_PART]


def test_a_record_above_the_limit_is_refused_and_others_are_not(broker: RunningBroker) -> None:
    client = producer(broker, message_max_bytes=64 * limits.MIB, queue_buffering_max_kbytes=200_000)
    too_large = bytes(limits.BATCH_BYTES)
    assert produced(client, "news", b"small") == [0]
    assert produced(client, "news", too_large) == [KafkaError.MSG_SIZE_TOO_LARGE]
    large = bytes(limits.BATCH_BYTES - 1000)
    assert produced(client, "news", large, b"small") == [1, 2]
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(3) == [b"small", large, b"small"]


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_hear_of_new_topics_and_partitions_by_a_regular_expression(
    broker: RunningBroker, protocol: str
) -> None:
    scenarios.set_times(broker.address, scenarios.LONG_SESSION_MS)
    administrator = admin(broker)
    with member(broker, "^news.*", group_protocol=protocol) as client:
        for wanted, count in ((NewTopic("news"), 1), (NewTopic("newsletter", 2), 3)):
            administrator.create_topics([wanted])[wanted.topic].result(DEADLINE_SECONDS)
            wait_for(client, partial(has_partitions, client, count))
        grown = administrator.create_partitions([NewPartitions("news", 3)])
        grown["news"].result(DEADLINE_SECONDS)
        wait_for(client, lambda: len(client.assignment()) == 5)


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
