"""Records of every client: published, stored and read, whatever becomes of the broker meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import pytest

from tests.interop import scenarios
from tests.interop.clients.interface import TOPIC, AtTime, Client, Headers, Message, Refused
from tests.interop.running import TESTER, RunningBroker
from tests.interop.suite import each_client, each_part, each_program

#: Enough to be worth compressing.
VALUES: Final = [f"{number} {'quack ' * 100}".encode() for number in range(200)]
ANY_BYTES: Final = bytes(range(256))

ONLY_LINES: Final = "publishes lines of text without times; test_kcat.py has its own proof"


@each_part("compression")
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, client: Client, part: str
) -> None:
    publisher = client.publisher(broker.address, compression=part)
    offsets = publisher.send(TOPIC, *[Message(value) for value in VALUES])
    assert offsets == (list(range(len(VALUES))) if client.tells_offsets else [])
    assert {batch.compression for batch in broker.batches(TOPIC)} == {part}
    assert broker.values(TOPIC) == VALUES
    assert client.reader(broker.address).values(len(VALUES)) == VALUES


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@each_client("produce")
def test_every_kind_of_acknowledgement_works(
    broker: RunningBroker, client: Client, acks: Literal["0", "1", "all"]
) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC))
    publisher = client.publisher(broker.address, acks=acks)
    publisher.send(TOPIC, *[Message(value) for value in VALUES])
    assert client.reader(broker.address).values(len(VALUES)) == VALUES


@each_client("headers and keys", but={"kcat": ONLY_LINES})
def test_records_come_back_with_key_headers_and_time(broker: RunningBroker, client: Client) -> None:
    headers: Headers = (
        ("kind", b"duck"),
        *([("kind", b"goose")] if client.repeated_headers else []),
        ("bytes", ANY_BYTES),
        ("empty", None if client.null_headers else b""),
    )
    publisher = client.publisher(broker.address)
    publisher.send(TOPIC, Message(ANY_BYTES, b"pond", headers, timestamp=1234))
    publisher.send(TOPIC, Message(None, ANY_BYTES))
    first, second = client.reader(broker.address).take(2)
    assert first == Message(ANY_BYTES, b"pond", headers, 1234, partition=0, offset=0)
    assert (second.value, second.key, second.headers) == (None, ANY_BYTES, ())


@each_client("produce")
def test_partitions_are_kept_apart_and_each_in_order(broker: RunningBroker, client: Client) -> None:
    broker.call(broker.broker.create_topic(TESTER, TOPIC, partitions=3))
    publisher = client.publisher(broker.address)
    messages = [Message(str(number).encode(), partition=number % 3) for number in range(300)]
    publisher.send(TOPIC, *messages)
    found = client.reader(broker.address, partitions=range(3)).take(300)
    for partition in range(3):
        came = [(one.offset, one.value) for one in found if one.partition == partition]
        sent = [one.value for one in messages if one.partition == partition]
        assert came == list(enumerate(sent))


# --- where a reader begins ---------------------------------------------------------------------


def publish_with_times(broker: RunningBroker, client: Client) -> None:
    """Publish "0" to "9", each in a batch of its own and 0.1 s after the one before."""
    publisher = client.publisher(broker.address)
    for number in range(10):
        publisher.put(TOPIC, str(number), timestamp=1000 + 100 * number)


@each_client("consume from start")
def test_a_reader_begins_at_the_start(broker: RunningBroker, client: Client) -> None:
    client.publisher(broker.address).put(TOPIC, *"0123456789")
    reader = client.reader(broker.address, "start")
    assert reader.texts(10) == list("0123456789")
    assert reader.bounds() == (0, 10)


@each_client("from end")
def test_a_reader_begins_at_the_end(broker: RunningBroker, client: Client) -> None:
    publisher = client.publisher(broker.address)
    publisher.put(TOPIC, "of before")
    broker.wait_for_reads(0)
    reader = client.reader(broker.address, "end")
    if client.fetches_ahead:
        # When it reads it has found the end, and what is published now comes after it.
        broker.wait_for_reads(1)
    publisher.put(TOPIC, "the latest")
    assert reader.texts(1) == ["the latest"]


@each_client("from a time", but={"kcat": ONLY_LINES})
def test_a_reader_begins_at_a_time(broker: RunningBroker, client: Client) -> None:
    publish_with_times(broker, client)
    for time_ms, count in ((1000, 10), (1001, 9), (1900, 1)):
        reader = client.reader(broker.address, AtTime(time_ms))
        assert reader.texts(count) == list("0123456789")[-count:]
        reader.close()


@each_client("from a time", but={"kcat": ONLY_LINES})
def test_offsets_are_found_by_time(broker: RunningBroker, client: Client) -> None:
    publish_with_times(broker, client)
    reader = client.reader(broker.address)
    found = [reader.offset_at(time_ms) for time_ms in (0, 1000, 1001, 1900, 1901)]
    assert found == [0, 0, 1, 9, None]


@each_client("from an offset", "in range")
def test_a_reader_begins_at_an_offset(broker: RunningBroker, client: Client) -> None:
    client.publisher(broker.address).put(TOPIC, *"0123456789")
    assert client.reader(broker.address, 7).texts(3) == list("789")


@each_client("from an offset", "out of range")
def test_an_offset_out_of_range_is_told(broker: RunningBroker, client: Client) -> None:
    client.publisher(broker.address).put(TOPIC, "quack")
    with pytest.raises(Refused, match="^OFFSET_OUT_OF_RANGE"):
        client.reader(broker.address, 1000).take(1)


# --- producers that number their batches -------------------------------------------------------


@each_client(
    "idempotent produce across kill -9",
    but={"kcat": "a process publishes once, so no number follows another; see test_kcat.py"},
)
def test_an_idempotent_producer_numbers_its_batches(broker: RunningBroker, client: Client) -> None:
    publisher = client.publisher(broker.address, idempotent=True)
    for number in range(5):
        assert publisher.put(TOPIC, str(number)) == [number]
    batches = broker.batches(TOPIC)
    (producer_id,) = {batch.producer_id for batch in batches}
    assert producer_id != -1
    assert [batch.base_sequence for batch in batches] == list(range(5))
    client.publisher(broker.address, idempotent=True).put(TOPIC, "of another producer")
    assert broker.batches(TOPIC)[-1].producer_id not in (-1, producer_id)


@each_program("idempotent produce across kill -9")
def test_each_record_is_there_once_and_in_order_when_the_broker_was_killed(
    kind: type[Client], tmp_path: Path
) -> None:
    scenarios.a_producer_lives_through_kills(kind.producer_program, tmp_path / "data")
