"""What only the client of Java is tried with: what its Admin does or shows beyond the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from tests.interop.clients.interface import TOPIC
from tests.interop.clients.java import CLASSIC_GROUP, Java
from tests.interop.driver import Client as Driven
from tests.interop.driver import ClientFailure, Driver
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

pytestmark = pytest.mark.needs("kafka-clients")

NOT_THERE: Final = "UnknownTopicOrPartitionException"


@pytest.fixture
def client(broker: RunningBroker, java_driver: Driver) -> Iterator[Java]:
    with closing(Java(java_driver)) as opened:
        yield opened


@pytest.fixture
def admin(broker: RunningBroker, client: Java) -> Driven:
    return client.driven_admin(broker.address)


def failure(client: Driven, what: str, **arguments: Any) -> str:
    """Return the client's name for what went wrong."""
    with pytest.raises(ClientFailure) as raised:
        client.call(what, **arguments)
    return raised.value.name


def publish_with_times(broker: RunningBroker, client: Java) -> None:
    """Publish "0" to "9", each in a batch of its own and 0.1 s after the one before."""
    publisher = client.publisher(broker.address)
    for number in range(10):
        publisher.put(TOPIC, str(number), timestamp=1000 + 100 * number)


# --- the cluster and its topics ----------------------------------------------------------------


def test_the_cluster_is_described(admin: Driven, broker: RunningBroker) -> None:
    node = {"id": 1, "address": broker.address}
    described = {"id": broker.broker.cluster_id, "controller": node, "nodes": [node]}
    assert admin.call("describe_cluster") == described


def test_topics_are_described_when_they_are_created_and_later(admin: Driven) -> None:
    first = {"name": "first", "partitions": 3, "configs": {"retention.ms": "60000"}}
    created = admin.call("create_topics", topics=[first, {"name": "second"}])
    assert {name: topic["partitions"] for name, topic in created.items()} == {
        "first": 3,
        "second": 1,
    }
    assert created["first"]["configs"]["retention.ms"] == "60000"
    described = admin.call("describe_topics", topics=["first"])["first"]
    assert described["partitions"] == [
        {"number": number, "leader": 1, "replicas": [1], "in_sync": [1]} for number in range(3)
    ]
    admin.call("delete_topics", topics=["first"])
    assert failure(admin, "describe_topics", topics=["first"]) == NOT_THERE


def test_a_topic_that_is_only_tried_out_is_not_created(
    admin: Driven, broker: RunningBroker
) -> None:
    wanted = [{"name": "new", "partitions": 2}]
    created = admin.call("create_topics", topics=wanted, validate_only=True)
    assert created["new"]["partitions"] == 2
    assert broker.broker.topics() == {}


def test_configs_are_described_with_their_defaults(admin: Driven, broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC))
    described = admin.call("describe_configs", kind="TOPIC", name=TOPIC)
    assert described["retention.ms"]["value"] == "-1"
    assert described["retention.ms"]["source"] == "DEFAULT_CONFIG"
    assert failure(admin, "describe_configs", kind="TOPIC", name="none") == NOT_THERE


def test_the_configs_of_the_broker_are_described(admin: Driven) -> None:
    described = admin.call("describe_configs", kind="BROKER", name="1")
    assert described
    assert all(config["value"] is not None for config in described.values())


def test_all_records_are_deleted_below_the_offset_minus_one(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    publish_with_times(broker, client)
    assert admin.call("delete_records", partitions=[[TOPIC, 0, -1]]) == [10]


def test_offsets_are_listed_by_place_and_by_time(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    publish_with_times(broker, client)
    client.publisher(broker.address).put(TOPIC, "from long ago", timestamp=5)
    found = {
        what: admin.call("list_offsets", partitions=[[TOPIC, 0, what]])[0]
        for what in ("start", "end", "max_timestamp", 1450, 2000)
    }
    assert found == {
        "start": [0, -1],
        "end": [11, -1],
        "max_timestamp": [9, 1900],
        1450: [5, 1500],
        2000: [-1, -1],
    }
    client.session.expect("unknown topic error")
    client.session.expect(NOT_THERE)
    assert failure(admin, "list_offsets", partitions=[["none", 0, "end"]]) == NOT_THERE


def test_the_directories_of_the_log_are_described(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    publish_with_times(broker, client)
    ((_, sizes),) = admin.call("describe_log_dirs", node=1).items()
    assert list(sizes) == ["news-0"]
    assert sizes["news-0"] > 0


# --- groups ------------------------------------------------------------------------------------


def test_a_group_is_described_with_its_assignor_and_where_its_members_are(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    member = join(client, broker, partitions=2)
    assert admin.call("list_groups") == {"ducks": {"state": "Stable", "protocol": "consumer"}}
    described = admin.call("describe_groups", groups=["ducks"])["ducks"]
    assert (described["state"], described["type"]) == ("Stable", "Classic")
    assert (described["assignor"], described["coordinator"]) == ("range", 1)
    (one,) = described["members"]
    assert one["id"] == member.call("member")["id"]
    assert (one["client"], one["host"]) == ("ann", "/127.0.0.1")
    assert one["partitions"] == [[TOPIC, 0], [TOPIC, 1]]
    assert failure(admin, "describe_groups", groups=["none"]) == "GroupIdNotFoundException"


def test_offsets_of_several_partitions_are_listed_altered_and_deleted(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    member = join(client, broker, partitions=2)
    member.call("commit", offsets=[[TOPIC, 0, 3, "half-way"], [TOPIC, 1, 5]])
    committed = [[TOPIC, 0, 3, "half-way"], [TOPIC, 1, 5, ""]]
    assert sorted(admin.call("group_offsets", group="ducks")) == committed
    assert sorted(member.call("committed", partitions=[[TOPIC, 0], [TOPIC, 1]])) == committed
    member.close()
    moved = [[TOPIC, 1, 1, "back"]]
    admin.call("alter_group_offsets", group="ducks", offsets=moved)
    admin.call("delete_group_offsets", group="ducks", partitions=[[TOPIC, 0]])
    assert admin.call("group_offsets", group="ducks") == moved
    # A group that nobody ever joined is made by altering its offsets.
    admin.call("alter_group_offsets", group="geese", offsets=moved)
    assert admin.call("group_offsets", group="geese") == moved
    assert admin.call("group_offsets", group="nobody") == []


def test_members_are_removed_by_name_and_all_at_once(
    admin: Driven, client: Java, broker: RunningBroker
) -> None:
    joined = [join(client, broker, partitions=3, instance=name) for name in ("a", "b", "c")]
    for member in joined:
        # Who has a name does not leave when it goes.
        member.close()
    assert instances(admin) == ["a", "b", "c"]
    admin.call("remove_members", group="ducks", instances=["b"])
    assert instances(admin) == ["a", "c"]
    admin.call("remove_members", group="ducks")
    assert instances(admin) == []


def join(
    client: Java, broker: RunningBroker, *, partitions: int = 1, instance: str | None = None
) -> Driven:
    """Join the group "ducks" and wait until the member has partitions of the topic."""
    if TOPIC not in broker.broker.topics():
        broker.call(broker.broker.create_topic(TESTER, TOPIC, partitions=partitions))
    settings = {"client.id": "ann", "group.id": "ducks", "auto.offset.reset": "earliest"}
    if instance is not None:
        settings["group.instance.id"] = instance
    member = client.open("consumer", broker.address, {**CLASSIC_GROUP, **settings})
    member.call("subscribe", topics=[TOPIC])
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not member.call("member")["partitions"]:
        assert time.monotonic() < deadline, "nothing was assigned"
        time.sleep(0.01)
    return member


def instances(admin: Driven) -> list[str]:
    """Return the names of the static members of "ducks"."""
    described = admin.call("describe_groups", groups=["ducks"])["ducks"]
    return sorted(member["instance"] for member in described["members"])
