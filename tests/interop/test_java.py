"""kafka-clients, Kafka's own client for Java, against the Kafka door: producers and consumers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop import driven, scenarios
from tests.interop.driver import Client, ClientFailure, Driver, Session
from tests.interop.languages import java
from tests.interop.programs import Client as ProgramClient
from tests.interop.running import RunningBroker
from tests.interop.table import each_compression

pytestmark = pytest.mark.needs("kafka-clients")

JAVA: Final = "kafka-clients (Java)"
PROGRAM: Final = ProgramClient(*java("Program"))


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


# --- producing and consuming -------------------------------------------------------------------


@pytest.mark.parametrize("compression", each_compression(JAVA))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    session: Session, broker: RunningBroker, compression: str
) -> None:
    producer = session.producer(**{"compression.type": compression, "linger.ms": 50})
    driven.batches_are_stored_as_they_were_sent(session, broker, compression, producer)


@pytest.mark.proves(JAVA, "produce")
@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_kind_of_acknowledgement_works(
    session: Session, broker: RunningBroker, acks: str
) -> None:
    producer = session.producer(**{"acks": acks, "enable.idempotence": acks == "all"})
    driven.every_kind_of_acknowledgement_works(session, broker, producer)


@pytest.mark.proves(JAVA, "headers and keys")
def test_records_come_back_with_key_headers_and_time(session: Session) -> None:
    driven.records_come_back_whole(session)


def test_partitions_are_kept_apart_and_each_in_order(
    session: Session, broker: RunningBroker
) -> None:
    driven.partitions_are_kept_apart(session, broker)


@pytest.mark.proves(JAVA, "consume from start")
def test_a_reader_begins_at_the_start(session: Session) -> None:
    driven.reading_begins_at_the_start(session)


@pytest.mark.proves(JAVA, "from end")
def test_a_reader_begins_at_the_end(session: Session, broker: RunningBroker) -> None:
    driven.reading_begins_at_the_end(session, broker)


@pytest.mark.proves(JAVA, "from a time")
def test_a_reader_begins_at_a_time(session: Session) -> None:
    driven.reading_begins_at_a_time(session)


def test_an_offset_out_of_range_is_told(session: Session) -> None:
    session.producer().send("news", "quack")
    consumer = session.consumer(**{"auto.offset.reset": "none"})
    consumer.call("assign", partitions=[["news", 0, 1000]])
    assert failure(consumer, "take", count=1, wait_ms=10_000) == "OffsetOutOfRangeException"


def test_an_idempotent_producer_numbers_its_batches(
    session: Session, broker: RunningBroker
) -> None:
    producer = session.producer()
    for number in range(5):
        assert producer.send("news", str(number)) == [number]
    batches = broker.batches("news")
    assert {batch.producer_id for batch in batches} != {-1}
    assert [batch.base_sequence for batch in batches] == list(range(5))


@pytest.mark.proves(JAVA, "idempotent produce across kill -9")
def test_each_record_is_there_once_and_in_order_whenever_the_broker_is_killed(
    tmp_path: Path,
) -> None:
    scenarios.a_producer_lives_through_kills(PROGRAM, tmp_path / "data")


# --- groups ------------------------------------------------------------------------------------


@pytest.mark.proves(JAVA, "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(PROGRAM)


@pytest.mark.proves(JAVA, "cooperative rebalance")
def test_a_cooperative_rebalance_leaves_alone_what_stays() -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(PROGRAM)


@pytest.mark.proves(JAVA, "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(PROGRAM)


@pytest.mark.proves(JAVA, "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(PROGRAM, tmp_path / "data")


def failure(client: Client, what: str, **arguments: Any) -> str:
    """The client's name for what went wrong."""
    with pytest.raises(ClientFailure) as raised:
        client.call(what, **arguments)
    return raised.value.name
