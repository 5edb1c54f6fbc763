"""Consumers that committed under a leader's epoch go on after a crash has begun another one.

A broker that was killed starts with a higher leader epoch. Clients send the epoch of what they read
with each commit, get it back, and ask where that epoch ended before they read on: a wrong answer
would make them believe that the log was cut off, and send them back or ahead. None of these
consumers has a reset policy, so each such step is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as Partition

from tests.interop.driver import Driver, Session
from tests.interop.running import DEADLINE_SECONDS
from tests.real.broker import Broker
from tests.real.clients import QUIET, create_topics

pytestmark = pytest.mark.processes

TOPIC = "pond"
FIRST, SECOND, THIRD, LAST = (
    [f"{part}-{number}" for number in range(5)] for part in ("first", "second", "third", "last")
)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data") as running:
        running.start()
        create_topics(running.address, {TOPIC: 1})
        yield running


def crash(broker: Broker) -> None:
    broker.kill()
    broker.start()


def produce(broker: Broker, values: list[str]) -> None:
    producer = Producer({"bootstrap.servers": broker.address, **QUIET})
    for value in values:
        producer.produce(TOPIC, value)
    assert producer.flush(DEADLINE_SECONDS) == 0


def consumer(broker: Broker, group: str, reset: str = "error") -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": reset,
            "session.timeout.ms": 45_000,
            **QUIET,
        }
    )


def take(reader: Consumer, count: int) -> list[str]:
    """The values of so many records. A broker that is away for a while is no failure."""
    values: list[str] = []
    while len(values) < count:
        message = reader.poll(DEADLINE_SECONDS)
        assert message is not None, f"{len(values)} of {count} records came"
        if (error := message.error()) is None:
            values.append((message.value() or b"").decode())
        else:
            assert error.retriable(), error
    return values


def committed_epoch(broker: Broker, group: str) -> int:
    reader = consumer(broker, group)
    (place,) = reader.committed([Partition(TOPIC, 0)], timeout=DEADLINE_SECONDS)
    reader.close()
    epoch: int = place.leader_epoch
    return epoch


def test_confluent_kafka_goes_on_with_an_epoch_from_before_a_crash(broker: Broker) -> None:
    produce(broker, FIRST)
    stays = consumer(broker, "stays", "earliest")
    stays.subscribe([TOPIC])
    leaves = consumer(broker, "leaves", "earliest")
    leaves.subscribe([TOPIC])
    for reader in (stays, leaves):
        assert take(reader, 5) == FIRST
        reader.commit(asynchronous=False)
    leaves.close()
    before = committed_epoch(broker, "leaves")
    assert before >= 0

    # The committed offset is where the next epoch begins.
    crash(broker)
    assert committed_epoch(broker, "leaves") == before
    produce(broker, SECOND)
    crash(broker)
    produce(broker, THIRD)
    returns = consumer(broker, "leaves")
    returns.subscribe([TOPIC])
    for reader in (stays, returns):
        assert take(reader, 10) == SECOND + THIRD
        reader.commit(asynchronous=False)
        reader.close()
    assert committed_epoch(broker, "leaves") > before

    # Nothing was written since the last epoch began.
    crash(broker)
    crash(broker)
    again = consumer(broker, "leaves")
    again.subscribe([TOPIC])
    produce(broker, LAST)
    assert take(again, 5) == LAST
    again.close()


@pytest.mark.needs("kafka-clients")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_java_client_goes_on_with_an_epoch_from_before_a_crash(
    java_driver: Driver, broker: Broker, protocol: str
) -> None:
    settings: dict[str, Any] = {
        "group.id": "java",
        "group.protocol": protocol,
        "enable.auto.commit": False,
    }
    with Session(java_driver, broker.address) as session:
        produce(broker, FIRST)
        leaves = session.consumer(**settings, **{"auto.offset.reset": "earliest"})
        leaves.call("subscribe", topics=[TOPIC])
        assert leaves.values(5) == FIRST
        leaves.call("commit")
        before = committed_epoch(broker, "java")
        assert before >= 0
        leaves.close()

        crash(broker)
        assert committed_epoch(broker, "java") == before
        produce(broker, SECOND)
        crash(broker)
        produce(broker, THIRD)
        returns = session.consumer(**settings, **{"auto.offset.reset": "none"})
        returns.call("subscribe", topics=[TOPIC])
        assert returns.values(10) == SECOND + THIRD
        returns.call("commit")
        assert committed_epoch(broker, "java") > before

        # This one stays, and nothing was written since the last epoch began.
        crash(broker)
        crash(broker)
        produce(broker, LAST)
        assert returns.values(5) == LAST
        said = [line for line in session.complaints() if "truncat" in line.lower()]
        assert said == []
