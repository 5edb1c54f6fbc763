"""What every client that is driven has to be able to do, whatever its language; see driver.py.

Each function is the body of a test; the tests themselves, in each client's own file, say what they
prove. Settings are under the client's own names, so they come from there too.
"""

from __future__ import annotations

from typing import Any, Final

from tests.interop.driver import Client, Session
from tests.interop.running import TESTER, RunningBroker

#: Enough to be worth compressing.
VALUES: Final = [f"{number} {'quack ' * 100}" for number in range(200)]
ANY_BYTES: Final = bytes(range(256)).decode("latin-1")


def batches_are_stored_as_they_were_sent(
    session: Session, broker: RunningBroker, compression: str, producer: Client
) -> None:
    """Compressed by the client, and read by it again."""
    assert producer.send("news", *VALUES) == list(range(len(VALUES)))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert reader(session, "start").values(len(VALUES)) == VALUES


def every_kind_of_acknowledgement_works(
    session: Session, broker: RunningBroker, producer: Client
) -> None:
    """Also the kind that there is none of, where the client cannot tell an offset."""
    broker.call(broker.broker.create_topic(TESTER, "news"))
    producer.call("send", topic="news", records=[{"value": value} for value in VALUES])
    assert reader(session, "start").values(len(VALUES)) == VALUES


def records_come_back_whole(
    session: Session, empty_header: str | None = None, empty_value: str | None = None
) -> None:
    """With key, headers and time, any bytes in them, and what is empty as far as a client can."""
    producer = session.producer()
    headers = [["kind", "duck"], ["bytes", ANY_BYTES], ["empty", empty_header]]
    producer.send("news", ANY_BYTES, key="pond", headers=headers, timestamp=1234)
    producer.send("news", empty_value, key=ANY_BYTES)
    first, second = reader(session, "start").take(2)
    assert (first["key"], first["value"], first["timestamp"]) == ("pond", ANY_BYTES, 1234)
    assert first["headers"] == headers
    assert (second["key"], second["value"], second["headers"]) == (ANY_BYTES, empty_value, [])


def partitions_are_kept_apart(session: Session, broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=3))
    producer = session.producer()
    for partition in range(3):
        sent = [f"{partition}.{number}" for number in range(100)]
        assert producer.send("news", *sent, partition=partition) == list(range(100))
    consumer = session.consumer()
    consumer.call("assign", partitions=[["news", partition, "start"] for partition in range(3)])
    records = consumer.take(300)
    for partition in range(3):
        values = [one["value"] for one in records if one["partition"] == partition]
        assert values == [f"{partition}.{number}" for number in range(100)]


def reading_begins_at_the_start(session: Session) -> None:
    publish_with_times(session)
    assert reader(session, "start").values(10) == list("0123456789")


def reading_begins_at_the_end(session: Session, broker: RunningBroker) -> None:
    publish_with_times(session)
    broker.wait_for_reads(0)
    consumer = reader(session, "end")
    # When it reads it has found the end, and what is published now comes after it.
    broker.wait_for_reads(1)
    session.producer().send("news", "the latest")
    assert consumer.values(1) == ["the latest"]


def reading_begins_at_a_time(session: Session) -> None:
    publish_with_times(session)
    for time, count in ((1000, 10), (1001, 9), (1900, 1)):
        consumer = reader(session, {"time": time})
        assert consumer.values(count) == list("0123456789")[-count:]
        consumer.close()


def publish_with_times(session: Session) -> None:
    """Ten records, each in a batch of its own and 0.1 s after the one before."""
    producer = session.producer()
    for number in range(10):
        producer.send("news", str(number), timestamp=1000 + 100 * number)


def reader(session: Session, start: Any, topic: str = "news") -> Client:
    """Of partition 0, from somewhere on."""
    consumer = session.consumer()
    consumer.call("assign", partitions=[[topic, 0, start]])
    return consumer
