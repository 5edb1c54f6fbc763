"""The administration client of confluent-kafka against the Kafka door."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from quackmq.broker import BrokerSettings
from quackmq.model.policy import Policy
from tests.interop.confluent import Reader, admin, produced, producer
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


# --- topics --------------------------------------------------------------------------------------


@pytest.mark.proves("confluent-kafka", "create topics")
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
    assert str(listed.cluster_id) == broker.broker.cluster_id
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


# --- configs, partitions, records ----------------------------------------------------------------


def config(name: str, value: str | None, change: AlterConfigOpType) -> ConfigEntry:
    return ConfigEntry(name, value, incremental_operation=change)


@pytest.mark.proves("confluent-kafka", "admin calls", "configs")
def test_configs_are_changed_and_told(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news"))
    client = admin(broker)

    def change(*entries: ConfigEntry) -> None:
        resource = ConfigResource(ResourceType.TOPIC, "news", incremental_configs=list(entries))
        (done,) = client.incremental_alter_configs([resource]).values()
        done.result(DEADLINE_SECONDS)

    change(config("retention.ms", "60000", AlterConfigOpType.SET))
    change(config("quackmq.live_entries", "5", AlterConfigOpType.SET))
    assert broker.broker.topic("news").policy == Policy(keep_for_ms=60_000, live_entries=5)
    (told,) = client.describe_configs([ConfigResource(ResourceType.TOPIC, "news")]).values()
    entries = told.result(DEADLINE_SECONDS)
    assert entries["retention.ms"].value == "60000"
    assert {name for name, entry in entries.items() if not entry.is_default} == {
        "retention.ms",
        "quackmq.live_entries",
    }
    change(config("retention.ms", None, AlterConfigOpType.DELETE))
    assert broker.broker.topic("news").policy == Policy(live_entries=5)
    with pytest.raises(KafkaException) as raised:
        change(config("no.such", "1", AlterConfigOpType.SET))
    assert raised.value.args[0].code() == KafkaError.INVALID_CONFIG


@pytest.mark.proves("confluent-kafka", "admin calls", "partitions")
def test_partitions_are_added(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    client = admin(broker)
    client.create_partitions([NewPartitions("news", 4)])["news"].result(DEADLINE_SECONDS)
    assert len(client.list_topics("news").topics["news"].partitions) == 4
    with pytest.raises(KafkaException) as raised:
        client.create_partitions([NewPartitions("news", 3)])["news"].result(DEADLINE_SECONDS)
    assert raised.value.args[0].code() == KafkaError.INVALID_PARTITIONS


@pytest.mark.proves("confluent-kafka", "admin calls", "delete records")
def test_records_are_deleted(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"0", b"1", b"2")
    client = admin(broker)
    (deleted,) = client.delete_records([TopicPartition("news", 0, 2)]).values()
    assert deleted.result(DEADLINE_SECONDS).low_watermark == 2
    with Reader(broker, "news", OFFSET_BEGINNING) as reader:
        assert reader.values(1) == [b"2"]
    (refused,) = client.delete_records([TopicPartition("news", 0, 4)]).values()
    with pytest.raises(KafkaException) as raised:
        refused.result(DEADLINE_SECONDS)
    assert raised.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.proves("confluent-kafka", "admin calls", "groups")
def test_groups_are_listed_described_moved_and_deleted(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"0", b"1", b"2")
    client = admin(broker)
    settings = {"group.id": "ducks", "auto.offset.reset": "earliest", "client.id": "a duck"}
    member = Consumer(
        {"bootstrap.servers": broker.address, "enable.auto.commit": False, **settings}
    )
    member.subscribe(["news"])
    assert [message.value() for message in member.consume(2, DEADLINE_SECONDS)] == [b"0", b"1"]
    member.commit(offsets=[TopicPartition("news", 0, 2)], asynchronous=False)

    (listed,) = client.list_consumer_groups().result(DEADLINE_SECONDS).valid
    assert (listed.group_id, listed.state) == ("ducks", ConsumerGroupState.STABLE)
    described = client.describe_consumer_groups(["ducks"])["ducks"].result(DEADLINE_SECONDS)
    assert described.state == ConsumerGroupState.STABLE
    (one,) = described.members
    assert one.client_id == "a duck"
    assert [(at.topic, at.partition) for at in one.assignment.topic_partitions] == [("news", 0)]
    with pytest.raises(KafkaException) as raised:
        client.delete_consumer_groups(["ducks"])["ducks"].result(DEADLINE_SECONDS)
    assert raised.value.args[0].code() == KafkaError.NON_EMPTY_GROUP
    member.close()

    def committed() -> list[tuple[str, int, int]]:
        asked = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions("ducks")])
        places = asked["ducks"].result(DEADLINE_SECONDS).topic_partitions
        return [(place.topic, place.partition, place.offset) for place in places]

    assert committed() == [("news", 0, 2)]
    moved = ConsumerGroupTopicPartitions("ducks", [TopicPartition("news", 0, 1)])
    client.alter_consumer_group_offsets([moved])["ducks"].result(DEADLINE_SECONDS)
    assert committed() == [("news", 0, 1)]
    client.delete_consumer_groups(["ducks"])["ducks"].result(DEADLINE_SECONDS)
    assert client.list_consumer_groups().result(DEADLINE_SECONDS).valid == []
