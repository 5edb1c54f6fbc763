"""kafka-clients, Kafka's own client for Java, against the Kafka door: all that its Admin does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from quackmq.model.policy import Policy
from tests.interop import driven
from tests.interop.driver import Client, ClientFailure, Driver, Session
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

pytestmark = pytest.mark.needs("kafka-clients")

JAVA: Final = "kafka-clients (Java)"
NOT_THERE: Final = "UnknownTopicOrPartitionException"
#: As the client does by default today: not the newer protocol, in which the broker assigns.
GROUP_SETTINGS: Final = {
    "group.protocol": "classic",
    "heartbeat.interval.ms": 200,
    "partition.assignment.strategy": "org.apache.kafka.clients.consumer.RangeAssignor",
}


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.fixture
def session(java_driver: Driver, broker: RunningBroker) -> Iterator[Session]:
    """The client is content: what it has to complain about, the broker does wrong."""
    with Session(java_driver, broker.address) as opened:
        yield opened
        assert opened.complaints() == []


@pytest.fixture
def admin(session: Session) -> Client:
    return session.admin()


def failure(client: Client, what: str, **arguments: Any) -> str:
    """The client's name for what went wrong."""
    with pytest.raises(ClientFailure) as raised:
        client.call(what, **arguments)
    return raised.value.name


# --- the cluster and its topics ----------------------------------------------------------------


def test_the_cluster_is_described(admin: Client, broker: RunningBroker) -> None:
    node = {"id": 1, "address": broker.address}
    described = {"id": broker.broker.cluster_id, "controller": node, "nodes": [node]}
    assert admin.call("describe_cluster") == described


@pytest.mark.proves(JAVA, "create topics")
def test_topics_are_created_described_listed_and_deleted(
    admin: Client, broker: RunningBroker
) -> None:
    first = {"name": "first", "partitions": 3, "configs": {"retention.ms": "60000"}}
    created = admin.call("create_topics", topics=[first, {"name": "second"}])
    assert {name: topic["partitions"] for name, topic in created.items()} == {
        "first": 3,
        "second": 1,
    }
    assert created["first"]["configs"]["retention.ms"] == "60000"
    assert broker.broker.topic("first").policy == Policy(keep_for_ms=60_000)
    described = admin.call("describe_topics", topics=["first"])["first"]
    assert described["partitions"] == [
        {"number": number, "leader": 1, "replicas": [1], "in_sync": [1]} for number in range(3)
    ]
    assert sorted(admin.call("list_topics")) == ["first", "second"]
    admin.call("delete_topics", topics=["first"])
    assert admin.call("list_topics") == ["second"]
    assert failure(admin, "describe_topics", topics=["first"]) == NOT_THERE


def test_a_topic_that_is_only_tried_out_is_not_created(
    admin: Client, broker: RunningBroker
) -> None:
    wanted = [{"name": "new", "partitions": 2}]
    created = admin.call("create_topics", topics=wanted, validate_only=True)
    assert created["new"]["partitions"] == 2
    assert broker.broker.topics() == {}


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"name": "taken"}, "TopicExistsException"),
        ({"name": "a b"}, "InvalidTopicException"),
        ({"name": "new", "replicas": 3}, "InvalidReplicationFactorException"),
        ({"name": "new", "partitions": 0}, "InvalidPartitionsException"),
        ({"name": "new", "configs": {"no.such": "1"}}, "InvalidConfigurationException"),
    ],
)
def test_what_cannot_be_created_is_told_as_kafka_tells_it(
    admin: Client, broker: RunningBroker, wanted: dict[str, Any], name: str
) -> None:
    broker.call(broker.broker.create_topic(TESTER, "taken"))
    assert failure(admin, "create_topics", topics=[wanted]) == name


@pytest.mark.proves(JAVA, "admin calls", "configs")
def test_configs_are_described_and_altered_one_by_one(admin: Client, broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news"))
    news = {"kind": "TOPIC", "name": "news"}
    described = admin.call("describe_configs", **news)
    assert described["retention.ms"]["value"] == "-1"
    assert described["retention.ms"]["source"] == "DEFAULT_CONFIG"
    changes = [["retention.ms", "SET", "60000"], ["quackmq.live_entries", "SET", "10"]]
    admin.call("alter_configs", **news, changes=changes)
    assert broker.broker.topic("news").policy == Policy(keep_for_ms=60_000, live_entries=10)
    described = admin.call("describe_configs", **news)
    assert described["retention.ms"]["value"] == "60000"
    assert described["retention.ms"]["source"] == "DYNAMIC_TOPIC_CONFIG"
    admin.call("alter_configs", **news, changes=[["retention.ms", "DELETE"]])
    assert broker.broker.topic("news").policy == Policy(live_entries=10)
    unknown = [["no.such", "SET", "1"]]
    assert failure(admin, "alter_configs", **news, changes=unknown) == (
        "InvalidConfigurationException"
    )
    assert failure(admin, "describe_configs", kind="TOPIC", name="none") == NOT_THERE


def test_the_configs_of_the_broker_are_described(admin: Client) -> None:
    described = admin.call("describe_configs", kind="BROKER", name="1")
    assert described
    assert all(config["value"] is not None for config in described.values())


@pytest.mark.proves(JAVA, "admin calls", "partitions")
def test_a_topic_gets_more_partitions_and_never_less(
    admin: Client, session: Session, broker: RunningBroker
) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news"))
    admin.call("create_partitions", topic="news", total=3)
    assert broker.broker.topic("news").partitions == 3
    assert session.producer().send("news", "quack", partition=2) == [0]
    less = "InvalidPartitionsException"
    assert failure(admin, "create_partitions", topic="news", total=2) == less
    assert failure(admin, "create_partitions", topic="none", total=2) == NOT_THERE


@pytest.mark.proves(JAVA, "admin calls", "delete records")
def test_records_are_deleted_up_to_an_offset(admin: Client, session: Session) -> None:
    driven.publish_with_times(session)
    assert admin.call("delete_records", partitions=[["news", 0, 4]]) == [4]
    assert driven.reader(session, "start").values(6) == list("456789")
    session.expect("OFFSET_OUT_OF_RANGE")
    beyond = [["news", 0, 11]]
    assert failure(admin, "delete_records", partitions=beyond) == "OffsetOutOfRangeException"
    assert admin.call("delete_records", partitions=[["news", 0, -1]]) == [10]


def test_offsets_are_listed_by_place_and_by_time(admin: Client, session: Session) -> None:
    driven.publish_with_times(session)
    session.producer().send("news", "from long ago", timestamp=5)
    found = {
        what: admin.call("list_offsets", partitions=[["news", 0, what]])[0]
        for what in ("start", "end", "max_timestamp", 1450, 2000)
    }
    assert found == {
        "start": [0, -1],
        "end": [11, -1],
        "max_timestamp": [9, 1900],
        1450: [5, 1500],
        2000: [-1, -1],
    }
    session.expect("unknown topic error")
    session.expect(NOT_THERE)
    assert failure(admin, "list_offsets", partitions=[["none", 0, "end"]]) == NOT_THERE


def test_the_directories_of_the_log_are_described(admin: Client, session: Session) -> None:
    driven.publish_with_times(session)
    ((_, sizes),) = admin.call("describe_log_dirs", node=1).items()
    assert list(sizes) == ["news-0"]
    assert sizes["news-0"] > 0


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.proves(JAVA, "admin calls", "groups")
def test_a_group_is_listed_described_and_deleted(
    admin: Client, session: Session, broker: RunningBroker
) -> None:
    member = join(session, broker, partitions=2)
    assert admin.call("list_groups") == {"ducks": {"state": "Stable", "protocol": "consumer"}}
    described = admin.call("describe_groups", groups=["ducks"])["ducks"]
    assert (described["state"], described["type"]) == ("Stable", "Classic")
    assert (described["assignor"], described["coordinator"]) == ("range", 1)
    (one,) = described["members"]
    assert one["id"] == member.call("member")["id"]
    assert (one["client"], one["host"]) == ("ann", "/127.0.0.1")
    assert one["partitions"] == [["news", 0], ["news", 1]]
    assert failure(admin, "delete_groups", groups=["ducks"]) == "GroupNotEmptyException"
    member.call("commit", offsets=[["news", 0, 0]])
    member.close()
    assert admin.call("describe_groups", groups=["ducks"])["ducks"]["state"] == "Empty"
    admin.call("delete_groups", groups=["ducks"])
    assert admin.call("list_groups") == {}
    gone = "GroupIdNotFoundException"
    assert failure(admin, "delete_groups", groups=["ducks"]) == gone
    assert failure(admin, "describe_groups", groups=["ducks"]) == gone


def test_the_offsets_of_a_group_are_listed_altered_and_deleted(
    admin: Client, session: Session, broker: RunningBroker
) -> None:
    member = join(session, broker, partitions=2)
    member.call("commit", offsets=[["news", 0, 3, "half-way"], ["news", 1, 5]])
    committed = [["news", 0, 3, "half-way"], ["news", 1, 5, ""]]
    assert sorted(admin.call("group_offsets", group="ducks")) == committed
    assert sorted(member.call("committed", partitions=[["news", 0], ["news", 1]])) == committed
    moved = [["news", 1, 1, "back"]]
    alter = {"group": "ducks", "offsets": moved}
    assert failure(admin, "alter_group_offsets", **alter) == "UnknownMemberIdException"
    subscribed = {"group": "ducks", "partitions": [["news", 0]]}
    assert failure(admin, "delete_group_offsets", **subscribed) == (
        "GroupSubscribedToTopicException"
    )
    member.close()
    admin.call("alter_group_offsets", **alter)
    admin.call("delete_group_offsets", **subscribed)
    assert admin.call("group_offsets", group="ducks") == moved
    # A group that nobody ever joined is made by altering its offsets.
    admin.call("alter_group_offsets", group="geese", offsets=moved)
    assert admin.call("group_offsets", group="geese") == moved
    assert admin.call("group_offsets", group="nobody") == []


def test_members_are_removed_by_name_and_all_at_once(
    admin: Client, session: Session, broker: RunningBroker
) -> None:
    joined = [join(session, broker, partitions=3, instance=name) for name in ("a", "b", "c")]
    for member in joined:
        # Who has a name does not leave when it goes.
        member.close()
    assert instances(admin) == ["a", "b", "c"]
    admin.call("remove_members", group="ducks", instances=["b"])
    assert instances(admin) == ["a", "c"]
    admin.call("remove_members", group="ducks")
    assert instances(admin) == []


def test_of_two_static_members_with_one_name_the_first_is_fenced(
    session: Session, broker: RunningBroker
) -> None:
    session.expect("fenced")
    first = join(session, broker, instance="a")
    second = join(session, broker, instance="a")
    assert failure(first, "take", count=1, wait_ms=10_000) == "FencedInstanceIdException"
    assert second.call("member")["partitions"] == [["news", 0]]


def join(
    session: Session, broker: RunningBroker, *, partitions: int = 1, instance: str | None = None
) -> Client:
    """A member of the group "ducks" that has been given something of the topic "news"."""
    if "news" not in broker.broker.topics():
        broker.call(broker.broker.create_topic(TESTER, "news", partitions=partitions))
    settings = {"client.id": "ann", "group.id": "ducks", "auto.offset.reset": "earliest"}
    if instance is not None:
        settings["group.instance.id"] = instance
    member = session.consumer(**GROUP_SETTINGS, **settings)
    member.call("subscribe", topics=["news"])
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not member.call("member")["partitions"]:
        assert time.monotonic() < deadline, "nothing was assigned"
        time.sleep(0.01)
    return member


def instances(admin: Client) -> list[str]:
    """The names of the static members of "ducks"."""
    described = admin.call("describe_groups", groups=["ducks"])["ducks"]
    return sorted(member["instance"] for member in described["members"])
