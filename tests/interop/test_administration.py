"""Topics, configs, partitions, records and groups, administered by every client that can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from quackmq.model.policy import Policy
from tests.interop.clients.interface import (
    TOPIC,
    Client,
    Committed,
    Group,
    GroupMember,
    Member,
    Refused,
)
from tests.interop.running import TESTER, RunningBroker
from tests.interop.suite import each_client

GROUP: Final = "ducks"

ONLY_REPLACES: Final = "has no IncrementalAlterConfigs, and replaces all configs of a topic"
ONLY_INCREMENTS: Final = "changes configs one by one"
NO_OFFSET_DELETE: Final = "has no call for it"
ONLY_LOOKS: Final = "lists and describes groups, and changes nothing in them"


@contextmanager
def refused(name: str) -> Iterator[None]:
    with pytest.raises(Refused) as raised:
        yield
    assert raised.value.name == name, raised.value


# --- topics --------------------------------------------------------------------------------------


@each_client("create topics")
def test_topics_are_created_listed_and_deleted(broker: RunningBroker, client: Client) -> None:
    admin = client.admin(broker.address)
    admin.create_topic("first", 3, {"retention.ms": "60000"})
    admin.create_topic("second")
    assert admin.topics() == {"first", "second"}
    assert [admin.partitions(name) for name in ("first", "second")] == [3, 1]
    assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
    admin.delete_topic("first")
    assert admin.topics() == {"second"}


@each_client("create topics")
def test_a_topic_that_cannot_be_created_is_refused_as_by_kafka(
    broker: RunningBroker, client: Client
) -> None:
    broker.call(broker.broker.create_topic(TESTER, "taken"))
    admin = client.admin(broker.address)
    with refused("TOPIC_ALREADY_EXISTS"):
        admin.create_topic("taken")
    with refused("INVALID_TOPIC_EXCEPTION"):
        admin.create_topic("a b")
    with refused("INVALID_REPLICATION_FACTOR"):
        admin.create_topic("new", replicas=3)
    with refused("INVALID_PARTITIONS"):
        admin.create_topic("new", 0)
    with refused("INVALID_CONFIG"):
        admin.create_topic("new", configs={"no.such": "1"})
    assert set(broker.broker.topics()) == {"taken"}


@each_client(
    "create topics",
    but={
        "kafkajs": "takes this for a topic of which the broker will hear, and asks for 10 s",
        "@platformatic/kafka": "takes this for a topic of which the broker will hear",
    },
)
def test_a_topic_that_is_not_there_is_unknown(broker: RunningBroker, client: Client) -> None:
    admin = client.admin(broker.address)
    with refused("UNKNOWN_TOPIC_OR_PARTITION"):
        admin.delete_topic("none")
    with refused("UNKNOWN_TOPIC_OR_PARTITION"):
        admin.add_partitions("none", 2)
    assert broker.broker.topics() == {}


@each_client("create topics")
def test_a_topic_made_anew_has_nothing_of_the_old_one(
    broker: RunningBroker, client: Client
) -> None:
    admin = client.admin(broker.address)
    admin.create_topic(TOPIC)
    client.publisher(broker.address).put(TOPIC, "old")
    admin.delete_topic(TOPIC)
    admin.create_topic(TOPIC)
    client.publisher(broker.address).put(TOPIC, "new")
    assert client.reader(broker.address).texts(1) == ["new"]


# --- configs, partitions, records ----------------------------------------------------------------


@each_client("admin calls", "configs", but={"aiokafka": ONLY_REPLACES, "kafkajs": ONLY_REPLACES})
def test_configs_are_changed_one_by_one(broker: RunningBroker, client: Client) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC))
    admin = client.admin(broker.address)
    assert admin.configs(TOPIC) == {}
    admin.set_config(TOPIC, "retention.ms", "60000")
    admin.set_config(TOPIC, "quackmq.live_entries", "5")
    assert broker.broker.topic(TOPIC).policy == Policy(keep_for_ms=60_000, live_entries=5)
    assert admin.configs(TOPIC) == {"retention.ms": "60000", "quackmq.live_entries": "5"}
    admin.set_config(TOPIC, "retention.ms", None)
    assert broker.broker.topic(TOPIC).policy == Policy(live_entries=5)
    with refused("INVALID_CONFIG"):
        admin.set_config(TOPIC, "no.such", "1")


@each_client(
    "admin calls",
    "configs",
    but={
        "confluent-kafka": ONLY_INCREMENTS,
        "kafka-python": ONLY_INCREMENTS,
        "kafka-clients (Java)": ONLY_INCREMENTS,
    },
)
def test_configs_are_replaced(broker: RunningBroker, client: Client) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC))
    admin = client.admin(broker.address)
    admin.replace_configs(TOPIC, {"quackmq.live_entries": "10"})
    assert broker.broker.topic(TOPIC).policy == Policy(live_entries=10)
    admin.replace_configs(TOPIC, {"retention.ms": "60000"})
    assert broker.broker.topic(TOPIC).policy == Policy(keep_for_ms=60_000)
    assert admin.configs(TOPIC) == {"retention.ms": "60000"}
    with refused("INVALID_CONFIG"):
        admin.replace_configs(TOPIC, {"no.such": "1"})


@each_client("admin calls", "partitions")
def test_a_topic_gets_more_partitions_and_never_less(broker: RunningBroker, client: Client) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC))
    admin = client.admin(broker.address)
    admin.add_partitions(TOPIC, 3)
    assert broker.broker.topic(TOPIC).partitions == 3
    assert client.publisher(broker.address).put(TOPIC, "quack", partition=2) == [0]
    assert broker.values(TOPIC, 2) == [b"quack"]
    with refused("INVALID_PARTITIONS"):
        admin.add_partitions(TOPIC, 2)


@each_client("admin calls", "delete records")
def test_records_are_deleted_up_to_an_offset(broker: RunningBroker, client: Client) -> None:
    publish_ten(broker, client)
    admin = client.admin(broker.address)
    assert admin.delete_records(TOPIC, 4) == 4
    reader = client.reader(broker.address)
    assert reader.bounds() == (4, 10)
    assert reader.texts(6) == list("456789")
    with refused("OFFSET_OUT_OF_RANGE"):
        admin.delete_records(TOPIC, 11)


# --- groups --------------------------------------------------------------------------------------


@each_client("admin calls", "groups")
def test_groups_are_listed_and_described_with_their_offsets(
    broker: RunningBroker, client: Client
) -> None:
    admin = client.admin(broker.address)
    member = joined(broker, client)
    member.commit(5, "half-way")
    committed = {(TOPIC, 0): Committed(5, "half-way" if client.commits_notes else "")}
    assert admin.groups() == [GROUP]
    assert admin.group(GROUP) == Group("Stable", [GroupMember(client.client_id, [(TOPIC, 0)])])
    assert admin.committed(GROUP) == committed
    member.close()
    assert admin.group(GROUP) == Group("Empty", [])
    assert admin.committed(GROUP) == committed


@each_client("admin calls", "groups", but={"aiokafka": ONLY_LOOKS})
def test_a_group_is_moved_and_deleted_when_it_has_no_members(
    broker: RunningBroker, client: Client
) -> None:
    admin = client.admin(broker.address)
    member = joined(broker, client)
    member.commit(5)
    with refused("NON_EMPTY_GROUP"):
        admin.delete_group(GROUP)
    member.close()
    admin.move(GROUP, TOPIC, 4)
    assert admin.committed(GROUP) == {(TOPIC, 0): Committed(4)}
    admin.delete_group(GROUP)
    assert admin.groups() == []
    with refused("GROUP_ID_NOT_FOUND"):
        admin.delete_group(GROUP)


@each_client(
    "admin calls",
    "groups",
    but={
        "aiokafka": ONLY_LOOKS,
        "confluent-kafka": NO_OFFSET_DELETE,
        "kafkajs": NO_OFFSET_DELETE,
    },
)
def test_the_offset_of_a_group_is_deleted_when_it_has_no_members(
    broker: RunningBroker, client: Client
) -> None:
    admin = client.admin(broker.address)
    member = joined(broker, client)
    member.commit(5)
    with refused("UNKNOWN_MEMBER_ID"):
        admin.move(GROUP, TOPIC, 4)
    with refused("GROUP_SUBSCRIBED_TO_TOPIC"):
        admin.forget(GROUP, TOPIC)
    member.close()
    admin.forget(GROUP, TOPIC)
    assert admin.committed(GROUP) == {}


def joined(broker: RunningBroker, client: Client) -> Member:
    """Publish ten records and return the only member of the group, which has read them."""
    publish_ten(broker, client)
    member = client.member(broker.address, GROUP)
    assert member.texts(10) == list("0123456789")
    return member


def publish_ten(broker: RunningBroker, client: Client) -> None:
    client.publisher(broker.address).put(TOPIC, *"0123456789")
