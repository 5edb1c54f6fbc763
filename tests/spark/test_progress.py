"""A query as the broker shows it (S4): a consumer group with offsets and lag, which holds what it
has not read."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from quackmq.client.kafka.cluster import read_metadata
from quackmq.errors import NameInOtherMode, QuackTimeout
from quackmq.model.offset_notes import parse_lease_ms
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.spark import limits as spark_limits
from quackmq.spark import release
from quackmq.spark.broker.http import Access
from quackmq.spark.broker.progress import Progress
from quackmq.spark.source.offsets import Position, TopicPosition
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S
from tests.spark.serving import Broker, Query

Stream = Callable[..., Query]


@pytest.fixture
def group(topic: str) -> str:
    return f"flock-{topic}"


@pytest.fixture
def stream(broker: Broker, topic: str, group: str) -> Iterator[Stream]:
    made: list[Query] = []

    def make(log: Any = None, **options: object) -> Query:
        options = {"groupId": group, "startingOffsets": "earliest", **options}
        made.append(Query(broker.options(topic, **options), log))
        return made[-1]

    yield make
    for query in made:
        query.close()


def committed(broker: Broker, group: str, topic: str) -> int:
    """As Kafka's tools ask for it."""
    admin = AdminClient({"bootstrap.servers": broker.address})
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    told = admin.list_consumer_group_offsets([wanted])[group].result(DEADLINE_S)
    return int(told.topic_partitions[0].offset)


def test_a_query_shows_as_a_group_with_its_offsets_also_when_it_is_idle_s4(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    broker.publish(topic, ["a", "b", "c"])
    query = stream(maxOffsetsPerTrigger=2)
    assert query.step() == 2
    assert query.step() == 1
    wait_until(lambda: committed(broker, group, topic) == 2)
    assert query.step() is None
    wait_until(lambda: committed(broker, group, topic) == 3)
    admin = AdminClient({"bootstrap.servers": broker.address})
    listed = admin.list_consumer_groups().result(DEADLINE_S).valid
    assert group in {each.group_id for each in listed}
    assert broker.run(broker.broker.lag(CALLER, group, topic)) == 0
    broker.publish(topic, ["d"])
    assert broker.run(broker.broker.lag(CALLER, group, topic)) == 1


def test_a_query_that_has_had_no_batch_yet_is_told_again_now_and_then(
    broker: Broker, topic: str, group: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever forgets groups that say nothing must not forget where it begins."""
    broker.publish(topic, ["before"])
    query = stream(startingOffsets="latest")
    assert query.step() is None
    admin = AdminClient({"bootstrap.servers": broker.address})
    assert release(broker.address, group) == [], "it holds nothing yet"
    admin.delete_consumer_groups([group])[group].result(DEADLINE_S)
    assert committed(broker, group, topic) < 0
    monkeypatch.setattr(spark_limits, "SPARK_REPORT_MS", 0)
    assert query.step() is None
    wait_until(lambda: committed(broker, group, topic) == 1)
    broker.publish(topic, ["a"])
    again = stream(startingOffsets="latest")
    assert again.step() == 1, "it begins where it began"


def test_a_query_that_is_stopped_says_how_far_it_got(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    broker.publish(topic, ["a"])
    query = stream()
    query.drain()
    query.close()
    assert committed(broker, group, topic) == 1


def test_a_query_that_is_to_end_has_said_so_when_it_does(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    """With `availableNow`: Spark does not stop a source, it kills its process."""
    broker.publish(topic, ["a", "b", "c"])
    query = stream(maxOffsetsPerTrigger=2)
    query.reader.prepareForTriggerAvailableNow()
    query.drain()
    assert committed(broker, group, topic) == 3


def test_a_query_without_a_name_keeps_the_one_it_was_given_through_restarts(
    broker: Broker, topic: str
) -> None:
    broker.publish(topic, ["a"])
    first = Query(broker.options(topic, startingOffsets="earliest"))
    first.drain()
    name = first.log[-1]["group"]
    first.close()
    broker.publish(topic, ["b"])
    second = Query(broker.options(topic), first.log)
    second.drain()
    second.close()
    assert second.log[-1]["group"] == name
    assert committed(broker, name, topic) == 2


def test_a_query_without_a_name_that_repeats_its_first_batch_leaves_no_other_name_behind(
    broker: Broker, topic: str
) -> None:
    broker.publish(topic, ["a"])
    options = broker.options(topic, startingOffsets="earliest")
    first = Query(options)
    assert first.step() == 1
    again = Query(options, first.log)
    assert again.repeat() == 1
    first.close()
    again.close()
    admin = AdminClient({"bootstrap.servers": broker.address})
    groups = [each.group_id for each in admin.list_consumer_groups().result(DEADLINE_S).valid]
    known = [each for each in groups if committed(broker, each, topic) >= 0]
    assert known == [first.log[-1]["group"]]


def first_offset(broker: Broker, topic: str) -> int:
    key = PartitionKey(broker.broker.topic(topic).id, 0)
    return broker.run(broker.broker.offsets(CALLER, key)).first


def with_a_batch(broker: Broker, topic: str, group: str, stream: Stream) -> Query:
    """A query that has committed its first batch, of one record."""
    broker.create(topic)
    query = stream()
    broker.publish(topic, ["first"])
    assert query.step() == 1
    assert query.step() is None
    wait_until(lambda: committed(broker, group, topic) == 1)
    return query


def test_retention_keeps_what_a_query_has_not_read_until_it_is_released_s4(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    query = with_a_batch(broker, topic, group, stream)
    broker.publish(topic, ["a", "b", "c"])
    policy = Policy(keep_bytes=0)
    broker.run(broker.broker.alter_topic(CALLER, topic, policy=policy))
    broker.run(broker.broker.clean())
    assert first_offset(broker, topic) == 1, "it has not read them"
    query.close()
    broker.run(broker.broker.clean())
    assert first_offset(broker, topic) == 1, "nor when it is stopped: its checkpoint lives"
    client = broker.client()
    described = client.get(f"/v1/topics/{topic}").json["held_back"]
    assert [(each["name"], each["offset"], each["end_offset"]) for each in described] == [
        (group, 1, 4)
    ]
    listed = client.get("/v1/topics?limit=1000").json["topics"]
    assert [each["held_back"] for each in listed if each["name"] == topic] == [described]
    (told,) = [each for each in client.get("/v1/health").json["held_back"] if group in each]
    assert "offsets 1 to 3 are past their retention" in told and "at offset 1 since 2" in told
    client.close()
    assert release(broker.address, group) == [topic]
    broker.run(broker.broker.clean())
    assert first_offset(broker, topic) == 4
    assert release(broker.address, group) == []


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_query_that_fails_before_its_first_batch_is_committed_holds_nothing(
    broker: Broker, topic: str, group: str, stream: Stream, start: str
) -> None:
    broker.create(topic)
    query = stream(startingOffsets=start)
    assert query.step() is None
    broker.publish(topic, ["a", "b", "c"])
    assert query.step() == 3
    query.close()
    policy = Policy(keep_bytes=0)
    broker.run(broker.broker.alter_topic(CALLER, topic, policy=policy))
    broker.run(broker.broker.clean())
    assert first_offset(broker, topic) == 3
    assert broker.run(broker.broker.subscriptions(CALLER, topic_name=topic)) == []


def test_a_query_asks_to_be_waited_for_so_long_after_its_last_word(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    with_a_batch(broker, topic, group, stream)
    assert lease_of(broker, topic, group) == spark_limits.SPARK_HOLD_MS
    other = stream(groupId=f"{group}-other", holdRetentionFor="36h")
    assert other.step() == 1
    assert other.step() is None
    wait_until(lambda: committed(broker, f"{group}-other", topic) == 1)
    assert lease_of(broker, topic, f"{group}-other") == 36 * 3_600_000


def lease_of(broker: Broker, topic: str, group: str) -> int | None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    told = admin.list_consumer_group_offsets([wanted])[group].result(DEADLINE_S)
    return parse_lease_ms(read_metadata(told.topic_partitions[0]))


def test_a_query_that_is_not_to_hold_anything_does_not(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    policy = Policy(keep_bytes=0)
    broker.run(broker.broker.create_topic(CALLER, topic, partitions=1, policy=policy))
    query = stream(holdRetention="false")
    assert query.step() is None
    broker.publish(topic, ["a"])
    broker.run(broker.broker.clean())
    assert first_offset(broker, topic) == 1
    assert committed(broker, group, topic) == 0


def test_a_name_that_consumers_use_is_refused_with_the_option_quoted(
    broker: Broker, topic: str, group: str, stream: Stream
) -> None:
    broker.publish(topic, ["a"])
    consumer = Consumer(
        {"bootstrap.servers": broker.address, "group.id": group, "auto.offset.reset": "earliest"}
    )
    try:
        consumer.subscribe([topic])
        assert consumer.poll(DEADLINE_S) is not None
        with pytest.raises(NameInOtherMode, match=f"groupId cannot be '{group}'"):
            stream().step()
    finally:
        consumer.close()


def test_a_request_that_nobody_answers_is_dropped_and_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not time out inside librdkafka, which ends the driver when the broker is back."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        progress = Progress(Access(address, address, retry_ms=200), None)
        first, second, third = (
            Position("cluster", "flock", {"news": TopicPosition("id", {0: offset})})
            for offset in (7, 8, 9)
        )
        with pytest.raises(QuackTimeout, match="where flock begins"):
            progress.saved_start("flock", first.topics)
        progress.report(first)
        request = progress._in_flight
        progress.report(second)
        assert progress._in_flight is request
        monkeypatch.setattr(spark_limits, "SPARK_RESPONSE_MS", 0)
        progress.report(third)
        assert progress._in_flight is not request
        monkeypatch.setattr(spark_limits, "SPARK_STOP_MS", 1)
        progress.close(third)
