"""What only kafkajs is tried with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.interop.clients.interface import TOPIC
from tests.interop.clients.kafkajs import Kafkajs
from tests.interop.driver import Driver
from tests.interop.running import RunningBroker

pytestmark = pytest.mark.needs("kafkajs")


@pytest.fixture
def client(broker: RunningBroker, kafkajs_driver: Driver) -> Iterator[Kafkajs]:
    with closing(Kafkajs(kafkajs_driver)) as opened:
        yield opened


def test_the_cluster_and_the_leaders_of_partitions_are_described(
    client: Kafkajs, broker: RunningBroker
) -> None:
    admin = client.driven_admin(broker.address)
    admin.method("createTopics", {"topics": [{"topic": TOPIC, "numPartitions": 2}]})
    (described,) = admin.method("fetchTopicMetadata", {"topics": [TOPIC]})["topics"]
    leaders = [(part["partitionId"], part["leader"]) for part in described["partitions"]]
    assert sorted(leaders) == [(0, 1), (1, 1)]
    cluster = admin.method("describeCluster")
    assert (cluster["clusterId"], cluster["controller"]) == (broker.broker.cluster_id, 1)


def test_a_group_is_described_with_its_assignor_and_an_unknown_one_as_dead(
    client: Kafkajs, broker: RunningBroker
) -> None:
    client.publisher(broker.address).put(TOPIC, "quack")
    assert client.member(broker.address, "ducks").texts(1) == ["quack"]
    admin = client.driven_admin(broker.address)
    described, none = admin.method("describeGroups", ["ducks", "none"])["groups"]
    assert (described["state"], described["protocol"]) == ("Stable", "RoundRobinAssigner")
    assert none["state"] == "Dead"
