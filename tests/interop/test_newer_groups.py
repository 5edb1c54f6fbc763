"""The newer group protocol (KIP-848) with the clients that have it: `group.protocol=consumer`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, ConsumerGroupType, KafkaError
from confluent_kafka.admin import NewPartitions, NewTopic

from tests.interop import scenarios
from tests.interop.confluent import admin, has_partitions, produced, producer, quiet, wait_for
from tests.interop.driver import Client as DriverClient
from tests.interop.driver import Driver, Session
from tests.interop.languages import java
from tests.interop.programs import Client
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

CAPABILITY: Final = "newer group protocol (KIP-848)"
CONFLUENT: Final = "confluent-kafka"
JAVA: Final = "kafka-clients (Java)"

CONFLUENT_PROGRAM: Final = Client(sys.executable, "-m", "tests.interop.python.confluent_program")
JAVA_PROGRAM: Final = Client(*java("Program"))
EACH_CLIENT: Final = pytest.mark.parametrize(
    "client",
    [
        pytest.param(
            CONFLUENT_PROGRAM, id="confluent", marks=pytest.mark.proves(CONFLUENT, CAPABILITY)
        ),
        pytest.param(
            JAVA_PROGRAM,
            id="java",
            marks=[pytest.mark.proves(JAVA, CAPABILITY), pytest.mark.needs("kafka-clients")],
        ),
    ],
)


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


@pytest.mark.processes
@EACH_CLIENT
def test_members_come_and_go(client: Client) -> None:
    scenarios.members_come_and_go(client, protocol="consumer")


@pytest.mark.processes
@EACH_CLIENT
def test_a_static_member_leaves_for_a_while(client: Client) -> None:
    scenarios.a_static_member_leaves_for_a_while(client)


@pytest.mark.processes
@EACH_CLIENT
def test_a_group_goes_on_after_the_broker_died(client: Client, tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(client, tmp_path / "data", "consumer")


@pytest.mark.needs("kafka-clients")
def test_members_of_both_clients_come_and_go() -> None:
    scenarios.members_come_and_go(CONFLUENT_PROGRAM, JAVA_PROGRAM, protocol="consumer")


@pytest.mark.processes
def test_a_rebalance_leaves_alone_what_stays() -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(CONFLUENT_PROGRAM, "consumer")


# --- confluent-kafka ----------------------------------------------------------------------------


def test_members_hear_of_new_topics_and_partitions_by_a_regular_expression(
    broker: RunningBroker,
) -> None:
    scenarios.set_times(broker.address, scenarios.LONG_SESSION_MS)
    administrator = admin(broker)
    with member(broker, "^news.*") as client:
        for wanted, count in ((NewTopic("news"), 1), (NewTopic("newsletter", 2), 3)):
            administrator.create_topics([wanted])[wanted.topic].result(DEADLINE_SECONDS)
            wait_for(client, partial(has_partitions, client, count))
        grown = administrator.create_partitions([NewPartitions("news", 3)])
        grown["news"].result(DEADLINE_SECONDS)
        wait_for(client, lambda: len(client.assignment()) == 5)


def test_a_regular_expression_that_re2_does_not_know_is_refused(broker: RunningBroker) -> None:
    # A back reference, which librdkafka has nothing against.
    with member(broker, r"^(n)\1") as client:
        told: list[KafkaError] = []
        wait_for(client, lambda: bool(told), told)
        assert told[0].code() == KafkaError._FATAL
        assert "regular expression is not valid" in told[0].str()


def test_a_second_instance_of_a_static_member_is_refused(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"quack")
    with member(broker, "news", group_instance_id="duck") as first:
        wait_for(first, lambda: len(first.assignment()) == 1)
        with member(broker, "news", group_instance_id="duck") as second:
            told: list[KafkaError] = []
            wait_for(second, lambda: bool(told), told)
            assert told[0].code() == KafkaError._FATAL
            assert "still used by another member" in told[0].str()
        wait_for(first, lambda: len(first.assignment()) == 1)


def test_a_group_moves_from_one_protocol_to_the_other_and_back(broker: RunningBroker) -> None:
    produced(producer(broker), "news", *[b"%d" % number for number in range(10)])
    for number, protocol in enumerate(["classic", "consumer", "classic"]):
        with member(broker, "news", group_protocol=protocol) as client:
            message = None
            deadline = time.monotonic() + DEADLINE_SECONDS
            while message is None:
                assert time.monotonic() < deadline
                message = client.poll(0.1)
            assert message.error() is None
            assert message.value() == b"%d" % number, "it goes on where the others were"
            client.commit(message=message, asynchronous=False)


def test_a_group_is_described_by_its_kind(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    administrator = admin(broker)
    with member(broker, "news") as client:
        wait_for(client, lambda: len(client.assignment()) == 2)
        described = administrator.describe_consumer_groups(["ducks"])["ducks"].result()
        assert described.state.name == "STABLE"
        assert described.type is ConsumerGroupType.CONSUMER
        (one,) = described.members
        assert sorted(each.partition for each in one.assignment.topic_partitions) == [0, 1]
        (listed,) = administrator.list_consumer_groups().result().valid
        assert listed.type is ConsumerGroupType.CONSUMER


@contextmanager
def member(broker: RunningBroker, topic: str, **settings: Any) -> Iterator[Consumer]:
    made = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": scenarios.GROUP,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "error_cb": quiet,
            "log_level": 0,
        }
        | {name.replace("_", "."): value for name, value in settings.items()}
    )
    made.subscribe([topic])
    try:
        yield made
    finally:
        made.close()


# --- Java ---------------------------------------------------------------------------------------


@pytest.mark.needs("kafka-clients")
def test_javas_administrator_describes_lists_and_removes(
    java_driver: Driver, broker: RunningBroker
) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    with Session(java_driver, broker.address) as session:
        session.expect("UNKNOWN_MEMBER_ID")
        settings = {"group.id": "ducks", "group.protocol": "consumer", "client.id": "ann"}
        one: DriverClient = session.consumer(**settings, **{"group.instance.id": "a"})
        one.call("subscribe", topics=["news"])
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not one.call("member")["partitions"]:
            assert time.monotonic() < deadline
        administrator = session.admin()
        described = administrator.call("describe_groups", groups=["ducks"])["ducks"]
        assert (described["state"], described["type"]) == ("Stable", "Consumer")
        assert described["assignor"] == "uniform"
        (told,) = described["members"]
        assert (told["client"], told["instance"]) == ("ann", "a")
        assert told["partitions"] == [["news", 0], ["news", 1]]
        listed = {"ducks": {"state": "Stable", "protocol": "consumer"}}
        assert administrator.call("list_groups") == listed
        one.close()
        administrator.call("remove_members", group="ducks", instances=["a"])
        described = administrator.call("describe_groups", groups=["ducks"])["ducks"]
        assert (described["state"], described["members"]) == ("Empty", [])
        administrator.call("delete_groups", groups=["ducks"])
        assert session.complaints() == []
