"""The newer group protocol (KIP-848), as far as single clients are tried with it.

What all clients have to come through that have it is in test_groups.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupType, KafkaError

from tests.interop.confluent import admin, member, produced, producer, wait_for
from tests.interop.driver import Client as DriverClient
from tests.interop.driver import Driver, Session
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

NEWER: dict[str, Any] = {"group_protocol": "consumer"}

# --- confluent-kafka ----------------------------------------------------------------------------


def test_a_regular_expression_that_re2_does_not_know_is_refused(broker: RunningBroker) -> None:
    # A back reference, which librdkafka has nothing against.
    with member(broker, r"^(n)\1", **NEWER) as client:
        told: list[KafkaError] = []
        wait_for(client, lambda: bool(told), told)
        assert told[0].code() == KafkaError._FATAL
        assert "regular expression is not valid" in told[0].str()


def test_a_second_instance_of_a_static_member_is_refused(broker: RunningBroker) -> None:
    produced(producer(broker), "news", b"quack")
    with member(broker, "news", group_instance_id="duck", **NEWER) as first:
        wait_for(first, lambda: len(first.assignment()) == 1)
        with member(broker, "news", group_instance_id="duck", **NEWER) as second:
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
    with member(broker, "news", **NEWER) as client:
        wait_for(client, lambda: len(client.assignment()) == 2)
        described = administrator.describe_consumer_groups(["ducks"])["ducks"].result()
        assert described.state.name == "STABLE"
        assert described.type is ConsumerGroupType.CONSUMER
        (one,) = described.members
        assert sorted(each.partition for each in one.assignment.topic_partitions) == [0, 1]
        (listed,) = administrator.list_consumer_groups().result().valid
        assert listed.type is ConsumerGroupType.CONSUMER


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
