"""Subscribing through the Kafka listener, with a client that knows of nothing but commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, TopicPartition

from quackmq.client.kafka.cluster import read_metadata
from quackmq.model.offset_notes import SUBSCRIBED, UNSUBSCRIBED, find_note
from tests.interop.confluent import produced, producer, quiet
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

TOPIC, NAME = "ducks", "puddles"


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        running.call(running.broker.create_topic(TESTER, TOPIC, partitions=2))
        yield running


@contextmanager
def consumer(broker: RunningBroker) -> Iterator[Consumer]:
    client = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": NAME,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": quiet,
            "log_level": 0,
        }
    )
    try:
        yield client
    finally:
        client.close()


def note(client: Consumer, metadata: str, *offsets: int) -> None:
    committed = client.commit(
        offsets=[
            TopicPartition(TOPIC, partition, offset, metadata)
            for partition, offset in enumerate(offsets)
        ],
        asynchronous=False,
    )
    assert [each.error for each in committed] == [None] * len(offsets)


def noted(client: Consumer) -> list[tuple[int, str | None]]:
    wanted = [TopicPartition(TOPIC, partition) for partition in range(2)]
    found = client.committed(wanted, DEADLINE_SECONDS)
    return [(each.offset, find_note(read_metadata(each))) for each in found]


def subscriptions(broker: RunningBroker) -> dict[str, tuple[int, ...]]:
    found = broker.call(broker.broker.subscriptions(TESTER, topic_name=TOPIC))
    return {each.name: each.cursors for each in found}


def test_a_commit_with_the_note_subscribes_and_one_with_the_other_unsubscribes(
    broker: RunningBroker,
) -> None:
    assert produced(producer(broker), TOPIC, b"a", b"b", partition=0) == [0, 1]
    with consumer(broker) as client:
        note(client, SUBSCRIBED, 1, 0)
        assert subscriptions(broker) == {NAME: (1, 0)}
        assert noted(client) == [(1, SUBSCRIBED), (0, SUBSCRIBED)]
        assert broker.call(broker.broker.lag(TESTER, NAME, TOPIC)) == 1
        note(client, UNSUBSCRIBED, 2, 0)
        assert subscriptions(broker) == {}
        assert [offset for offset, _ in noted(client)] == [-1001, -1001], "none is left"


def test_a_member_of_the_group_subscribes_reads_and_unsubscribes(broker: RunningBroker) -> None:
    with consumer(broker) as client:
        note(client, SUBSCRIBED, 0, 0)
        assert produced(producer(broker), TOPIC, b"a", partition=1) == [0]
        client.subscribe([TOPIC])
        message = client.poll(DEADLINE_SECONDS)
        assert message is not None
        assert (message.error(), message.value()) == (None, b"a")
        client.commit(message=message, asynchronous=False)
        assert subscriptions(broker) == {NAME: (0, 1)}
        note(client, UNSUBSCRIBED, 0, 1)
        assert subscriptions(broker) == {}
        assert noted(client) == [(0, UNSUBSCRIBED), (1, UNSUBSCRIBED)]
