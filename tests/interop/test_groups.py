"""Groups of every client: members that come, go and are killed, and brokers that die meanwhile.

The scenarios are in scenarios.py, and clients are programs of their own there (programs.py). What
an admin does with groups is in test_administration.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.interop import scenarios
from tests.interop.clients.aiokafka import Aiokafka
from tests.interop.clients.confluent import Confluent
from tests.interop.clients.interface import TOPIC, Client, Refused
from tests.interop.clients.java import Java
from tests.interop.clients.kafka_python import KafkaPython
from tests.interop.running import RunningBroker
from tests.interop.suite import each_client, each_program

NEWER: Final = "newer group protocol (KIP-848)"


# --- the classic protocol ------------------------------------------------------------------------


@each_program("groups")
def test_members_come_and_go(kind: type[Client]) -> None:
    scenarios.members_come_and_go(kind.member_program)


@each_program("cooperative rebalance")
def test_a_cooperative_rebalance_leaves_alone_what_stays(kind: type[Client]) -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(kind.member_program)


@each_program("static members")
def test_a_static_member_comes_back(kind: type[Client]) -> None:
    scenarios.a_static_member_comes_back(kind.member_program)


@each_program("commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(kind: type[Client], tmp_path: Path) -> None:
    """M8: offsets are committed after processing, and a group goes on from there."""
    scenarios.a_group_goes_on_after_the_broker_died(kind.member_program, tmp_path / "data")


@each_client(
    "static members",
    but={
        "aiokafka": "joins again, and takes the name back",
        "kafka-python": "logs the error, and raises none",
        "@platformatic/kafka": "tells nobody of the error",
        "kcat": "is a member only as a program",
    },
)
def test_of_two_static_members_with_one_name_the_first_is_fenced(
    broker: RunningBroker, client: Client
) -> None:
    client.may_complain()
    publisher = client.publisher(broker.address)
    publisher.put(TOPIC, "quack")
    first = client.member(broker.address, "ducks", instance="ann")
    assert first.texts(1) == ["quack"]
    second = client.member(broker.address, "ducks", instance="ann")
    # The first one committed nothing.
    assert second.texts(1) == ["quack"]
    with pytest.raises(Refused, match="FENCED_INSTANCE_ID"):
        first.take(1)
    publisher.put(TOPIC, "quack again")
    assert second.texts(1) == ["quack again"]


@pytest.mark.processes
def test_members_of_different_clients_share_a_topic() -> None:
    scenarios.members_come_and_go(
        *[kind.member_program for kind in (Aiokafka, Confluent, KafkaPython)]
    )


# --- the newer protocol --------------------------------------------------------------------------


@each_program(NEWER)
def test_members_of_the_newer_protocol_come_and_go(kind: type[Client]) -> None:
    scenarios.members_come_and_go(kind.member_program, protocol="consumer")


@each_program(NEWER)
def test_a_static_member_of_the_newer_protocol_leaves_for_a_while(kind: type[Client]) -> None:
    scenarios.a_static_member_leaves_for_a_while(kind.member_program)


@each_program(NEWER)
def test_a_group_of_the_newer_protocol_goes_on_after_the_broker_died(
    kind: type[Client], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    scenarios.a_group_goes_on_after_the_broker_died(kind.member_program, data, "consumer")


@each_program(NEWER, but={"kafka-clients (Java)": "two more Java machines take long to start"})
def test_a_rebalance_of_the_newer_protocol_leaves_alone_what_stays(kind: type[Client]) -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(kind.member_program, "consumer")


@pytest.mark.needs("kafka-clients")
def test_members_of_both_clients_of_the_newer_protocol_come_and_go() -> None:
    programs = [kind.member_program for kind in (Confluent, Java)]
    scenarios.members_come_and_go(*programs, protocol="consumer")
