"""Transactions of every client that writes or reads them; the scenarios are in transactions.py."""

from __future__ import annotations

from contextlib import closing

import pytest
from kafka import KafkaAdminClient, TopicPartition

from tests.interop import transactions
from tests.interop.clients.interface import TOPIC, Client
from tests.interop.clients.kafka_python import KafkaPython
from tests.interop.driver import ClientFailure, Driver, Session
from tests.interop.running import TESTER, RunningBroker
from tests.interop.suite import each_client


@each_client(
    "transactions",
    "commit and abort",
    but={"kcat": "makes one transaction of all its input; test_kcat.py has its own proof"},
)
def test_commits_are_seen_and_aborts_are_not(client: Client) -> None:
    transactions.commits_are_seen_and_aborts_are_not(client)


@each_client("transactions", "offsets")
def test_offsets_go_with_their_transaction(client: Client) -> None:
    transactions.offsets_go_with_their_transaction(client)


@each_client("transactions", "time-out")
def test_who_takes_too_long_is_aborted(client: Client) -> None:
    transactions.who_takes_too_long_is_aborted(client)


@each_client("transactions", "fencing")
def test_a_second_instance_fences_the_first(client: Client) -> None:
    transactions.a_second_instance_fences_the_first(client)


@each_client("transactions", "zombies")
def test_a_zombie_comes_too_late(client: Client) -> None:
    transactions.a_zombie_comes_too_late(client)


# --- what only some clients have ---------------------------------------------------------------


@pytest.mark.needs("kafka-clients")
def test_the_client_of_java_goes_the_newer_way_with_an_epoch_for_each_transaction(
    java_driver: Driver,
) -> None:
    with RunningBroker() as broker, Session(java_driver, broker.address) as session:
        writer = session.producer(**{"transactional.id": "tx"})
        writer.call("init_transactions")
        for value in ("a", "b", "c"):
            writer.call("begin")
            writer.send("news", value)
            writer.call("commit_transaction")
        batches = [batch for batch in broker.batches("news") if not batch.is_control]
        assert [batch.producer_epoch for batch in batches] == [0, 1, 2]


@pytest.mark.needs("kafka-clients")
def test_an_admin_looks_at_transactions_and_fences_their_producers(java_driver: Driver) -> None:
    with RunningBroker() as broker, Session(java_driver, broker.address) as session:
        writer, admin = session.producer(**{"transactional.id": "tx"}), session.admin()
        writer.call("init_transactions")
        session.producer(**{"transactional.id": "idle"}).call("init_transactions")
        writer.call("begin")
        writer.send("news", "a")
        assert admin.call("list_transactions") == {"tx": "Ongoing", "idle": "Empty"}
        told = admin.call("describe_transactions", ids=["tx", "idle"])
        producer = told["tx"].pop("producer")
        assert told["tx"] == {
            "state": "Ongoing",
            "epoch": 0,
            "timeout_ms": 60_000,
            "started": True,
            "partitions": [["news", 0]],
        }
        assert (told["idle"]["state"], told["idle"]["started"]) == ("Empty", False)
        (told,) = admin.call("describe_producers", partition=["news", 0])
        assert told == {"producer": producer, "epoch": 0, "open_since": 0}
        admin.call("fence_producers", ids=["tx"])
        assert admin.call("list_transactions") == {"tx": "Empty", "idle": "Empty"}
        with pytest.raises(ClientFailure):
            writer.call("commit_transaction")


def test_the_admin_of_kafka_python_finds_what_is_open() -> None:
    with RunningBroker() as broker, closing(KafkaPython()) as client:
        broker.call(broker.broker.create_topic(TESTER, TOPIC))
        writer = client.writer(broker.address, "tx", 60_000)
        writer.begin()
        writer.put(TOPIC, "a")
        with closing(KafkaAdminClient(bootstrap_servers=broker.address)) as admin:
            (listed,) = admin.list_transactions().values()
            assert [each.transactional_id for each in listed] == ["tx"]
            news = TopicPartition(TOPIC, 0)
            assert admin.describe_transactions(["tx"])["tx"].topic_partitions == {news}
            (producer,) = admin.describe_producers([news])[news].active_producers
            assert (producer.producer_epoch, producer.current_transaction_start_offset) == (0, 0)
