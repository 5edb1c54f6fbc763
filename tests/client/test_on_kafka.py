"""The same program against a Kafka cluster, by its address alone: the whole tour (M12)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.kafka import Kafka
from quackmq import Client, QuackTimeout, errors
from quackmq.model.partitioning import Partitioner, choose_partition

pytestmark = pytest.mark.needs("kafka")

#: A fresh cluster makes its own topics with the first group and the first transaction.
TIMEOUT_S = 60


class SmallKafka(Kafka):
    """Groups do not wait three seconds for members that start with the first."""

    properties = "group.initial.rebalance.delay.ms=0\noffsets.topic.num.partitions=1\n" + (
        "transaction.state.log.num.partitions=1\n"
    )


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with SmallKafka().started(tmp_path_factory.mktemp("kafka")) as server:
        server.wait_until_it_listens()
        yield server.address


def test_the_tour_is_the_same_on_a_kafka_cluster(kafka: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"serialiser": "str", "timeout": TIMEOUT_S, "directory": tmp_path}
    with Client(kafka, "billing", **options) as client:
        client.create_topic("news", partitions=2, retention_ms=3_600_000)
        assert client.topics() == ["news"]
        with pytest.raises(errors.UnknownSubscription):
            client.get("news")
        assert client.subscribe("news") is True
        assert client.subscribe("news") is False
        assert client.subscriptions() == ["news"]
        put = [client.put("news", str(number), key=str(number)) for number in range(10)]
        assert client.size("news") == 10
        got = [client.get("news") for _ in range(4)]
        got += islice(client.listen("news"), 3)
    with Client(kafka, "billing", **options) as client:
        got += islice(client.listen("news"), 3)
        assert sorted(message.id for message in got) == sorted(put)
        # There keys are placed as the Java client places them.
        expected = [choose_partition(Partitioner.MURMUR2, message.key, 2) for message in got]
        assert [message.partition for message in got] == expected
        client.seek("news", "beginning")
        first = client.get("news", after=None)
        assert client.get("news", after=None).id == first.id
        assert client.get("news", after=first.id).id != first.id
        stored = client.put("news", "numbered", sequence=1)
        assert client.put("news", "numbered", sequence=1) == stored
        assert client.last_sequence("news") == 1
        client.unsubscribe("news")
        assert client.subscriptions() == []
        with pytest.raises(errors.UnknownSubscription):
            client.get("news")
        client.delete_topic("news")
        with pytest.raises((errors.UnknownTopic, QuackTimeout)):
            client.get("news", timeout=5)
