"""Transactions of every client that writes or reads them: see transactions.py for what they have to
come through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import count
from typing import Any, Final, NamedTuple

import pytest
from kafka import KafkaAdminClient
from kafka import TopicPartition as KafkaPartition

from tests.interop import transactions
from tests.interop.driver import ClientFailure, Driver, Session
from tests.interop.python.transactional import Aiokafka, Confluent, KafkaPython
from tests.interop.running import TESTER, RunningBroker
from tests.interop.transactional import TOPIC, Client, DrivenClient

#: A group of its own for each reader that cannot do without one.
GROUPS: Final = (f"reader-{number}" for number in count())

PYTHON: Final[Mapping[str, Client]] = {
    "confluent-kafka": Confluent(),
    "aiokafka": Aiokafka(),
    "kafka-python": KafkaPython(),
}


class Driven(NamedTuple):
    """A client of another language: what it needs to be there, the fixture that drives it, and its
    settings as a writer, by transactional id and timeout, and as a reader of committed records or
    of all."""

    needs: str
    fixture: str
    writer: Callable[[str, int], Mapping[str, Any]]
    reader: Callable[[bool], Mapping[str, Any]]
    confuses_aborts: bool = False


DRIVEN: Final = {
    "kafkajs": Driven(
        "kafkajs",
        "kafkajs_driver",
        lambda name, timeout_ms: {
            "transactionalId": name,
            "transactionTimeout": timeout_ms,
            "idempotent": True,
            "maxInFlightRequests": 1,
        },
        lambda committed: {"readUncommitted": not committed, "groupId": next(GROUPS)},
    ),
    "@platformatic/kafka": Driven(
        "@platformatic/kafka",
        "platformatic_driver",
        # Unless it is told otherwise, it says that it is producer 0 with epoch 0, whoever that is.
        lambda name, timeout_ms: {
            "transactionalId": name,
            "timeout": timeout_ms,
            "idempotent": True,
            "producerId": {"bigint": -1},
            "producerEpoch": -1,
        },
        lambda committed: {"isolationLevel": int(committed), "groupId": next(GROUPS)},
        confuses_aborts=True,
    ),
    "kafka-clients (Java)": Driven(
        "kafka-clients",
        "java_driver",
        lambda name, timeout_ms: {"transactional.id": name, "transaction.timeout.ms": timeout_ms},
        lambda committed: {
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "fetch.max.wait.ms": 50,
        },
    ),
}


def proved(part: str) -> pytest.MarkDecorator:
    """All clients, each with the mark for what is proved."""
    names = [
        pytest.param(name, marks=pytest.mark.proves(name, "transactions", part)) for name in PYTHON
    ]
    names += [
        pytest.param(
            name,
            marks=[
                pytest.mark.proves(name, "transactions", part),
                pytest.mark.needs(driven.needs),
            ],
        )
        for name, driven in DRIVEN.items()
    ]
    return pytest.mark.parametrize("client", names, indirect=True)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    name: str = request.param
    if name in PYTHON:
        yield PYTHON[name]
        return
    driven = DRIVEN[name]
    with Session(request.getfixturevalue(driven.fixture), "") as session:
        yield DrivenClient(session, driven.writer, driven.reader, driven.confuses_aborts)


@pytest.mark.processes
@proved("commit and abort")
def test_commits_are_seen_and_aborts_are_not(client: Client) -> None:
    transactions.commits_are_seen_and_aborts_are_not(client)


@pytest.mark.processes
@proved("offsets")
def test_offsets_go_with_their_transaction(client: Client) -> None:
    transactions.offsets_go_with_their_transaction(client)


@pytest.mark.processes
@proved("time-out")
def test_who_takes_too_long_is_aborted(client: Client) -> None:
    transactions.who_takes_too_long_is_aborted(client)


@pytest.mark.processes
@proved("fencing")
def test_a_second_instance_fences_the_first(client: Client) -> None:
    transactions.a_second_instance_fences_the_first(client)


@pytest.mark.processes
@proved("zombies")
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
    with RunningBroker() as broker, ExitStack() as alive:
        broker.call(broker.broker.create_topic(TESTER, TOPIC))
        writer = KafkaPython().writer(broker.address, "tx", 60_000)
        alive.callback(writer.close)
        writer.begin()
        writer.send("a")
        admin = alive.enter_context(closing(KafkaAdminClient(bootstrap_servers=broker.address)))
        (listed,) = admin.list_transactions().values()
        assert [each.transactional_id for each in listed] == ["tx"]
        news = KafkaPartition(TOPIC, 0)
        assert admin.describe_transactions(["tx"])["tx"].topic_partitions == {news}
        (producer,) = admin.describe_producers([news])[news].active_producers
        assert (producer.producer_epoch, producer.current_transaction_start_offset) == (0, 0)
