"""What only @platformatic/kafka is tried with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.interop.clients.interface import TOPIC
from tests.interop.clients.platformatic import Platformatic
from tests.interop.driver import Driver
from tests.interop.running import RunningBroker

pytestmark = pytest.mark.needs("@platformatic/kafka")


@pytest.fixture
def client(broker: RunningBroker, platformatic_driver: Driver) -> Iterator[Platformatic]:
    with closing(Platformatic(platformatic_driver)) as opened:
        yield opened


def test_topics_are_described_when_they_are_created(
    client: Platformatic, broker: RunningBroker
) -> None:
    configs = [{"name": "retention.ms", "value": "60000"}]
    wanted = {"topics": ["first", "second"], "partitions": 2, "configs": configs}
    created = client.driven_admin(broker.address).method("createTopics", wanted)
    assert [(topic["name"], topic["partitions"]) for topic in created] == [
        ("first", 2),
        ("second", 2),
    ]
    assert created[0]["configuration"]["retention.ms"] == "60000"


def test_offsets_and_sizes_are_told(client: Platformatic, broker: RunningBroker) -> None:
    publisher = client.publisher(broker.address)
    for number in range(10):
        publisher.put(TOPIC, str(number), timestamp=1000 + 100 * number)
    admin = client.driven_admin(broker.address)
    for wanted, found in {-2: (0, -1), -1: (10, -1), -3: (9, 1900), 1450: (5, 1500)}.items():
        partitions = [{"partitionIndex": 0, "timestamp": {"bigint": wanted}}]
        asked: dict[str, Any] = {"topics": [{"name": TOPIC, "partitions": partitions}]}
        (topic,) = admin.method("listOffsets", asked)
        (partition,) = topic["partitions"]
        assert (partition["offset"], partition["timestamp"]) == found
    asked = {"topics": [{"name": TOPIC, "partitions": [0]}]}
    (told,) = admin.method("describeLogDirs", asked)
    ((topic,),) = [result["topics"] for result in told["results"]]
    assert topic["partitions"][0]["partitionSize"] > 0


def test_a_static_member_is_described_by_its_name_and_a_group_by_its_kind(
    client: Platformatic, broker: RunningBroker
) -> None:
    client.publisher(broker.address).put(TOPIC, "quack")
    settings = {"groupId": "ducks", "groupInstanceId": "ann"}
    member = client.open("consumer", broker.address, settings)
    member.call("subscribe", topics=[TOPIC])
    assert member.values(1) == ["quack"]
    admin = client.driven_admin(broker.address)
    listed = admin.method("listGroups")["ducks"]
    assert (listed["state"].upper(), listed["groupType"]) == ("STABLE", "classic")
    described = admin.method("describeGroups", {"groups": ["ducks"]})["ducks"]
    (one,) = described["members"].values()
    assert one["groupInstanceId"] == "ann"
