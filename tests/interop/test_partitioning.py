"""The partition of a key is the same for every client, as the topic's setting says.

Each client sends the same keys to a topic of its own. `choose_partition` says where they must
lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from quackmq import AsyncClient, Client
from quackmq.model.partitioning import Partitioner, choose_partition
from quackmq.model.policy import Policy
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.records.codec import decode
from quackmq.spark.sink.partitioner import choose_partitions
from tests.interop.clients.interface import Client as KafkaClient
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker
from tests.interop.suite import each_client

PARTITIONS: Final = 7
#: Empty, short, of every length modulo four, not ASCII, not text, long.
KEYS: Final = (
    b"",
    *(f"duck-{number}".encode() for number in range(40)),
    *(b"quack!quack"[:length] for length in range(1, 12)),
    *(text.encode() for text in ("Öre", "鴨", "🦆", "canard à l'orange")),
    bytes(range(256)),
    b"\xff" * 63,
    b"long" * 5_000,
)
NO_EMPTY_KEY: Final = KEYS[1:]
#: Topics in which Python's own client, the listeners and the import choose by CRC32.
BY_CRC32: Final = (Partitioner.CRC32, Partitioner.LEGACY)

Send = Callable[[str, Sequence[bytes]], None]


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


def placed_by(
    broker: RunningBroker,
    topic: str,
    send: Send,
    keys: Sequence[bytes] = KEYS,
    partitioner: Partitioner = Partitioner.MURMUR2,
) -> dict[bytes, int]:
    """Return the partition of each key, after a client has sent them to a new topic."""
    policy = Policy(partitioner=partitioner)
    broker.call(broker.broker.create_topic(TESTER, topic, partitions=PARTITIONS, policy=policy))
    send(topic, keys)
    return {
        record.key: partition
        for partition in range(PARTITIONS)
        for batch in broker.batches(topic, partition)
        for record in decode(batch)
        # Markers of transactions have keys of their own.
        if record.key is not None and record.key in keys
    }


def expected(
    keys: Sequence[bytes] = KEYS, partitioner: Partitioner = Partitioner.MURMUR2
) -> dict[bytes, int | None]:
    return {key: choose_partition(partitioner, key, PARTITIONS) for key in keys}


def test_the_broker_places_keys_as_kafkas_clients_do(broker: RunningBroker) -> None:
    def put_together(topic: str, keys: Sequence[bytes]) -> None:
        records = [Record(0, NO_TIMESTAMP, key, b"") for key in keys]
        broker.call(broker.broker.messages.put(TESTER, topic, records))

    def put_one_by_one(topic: str, keys: Sequence[bytes]) -> None:
        async def put() -> None:
            messages = broker.broker.messages
            for key in keys:
                begun = messages.begin_put(TESTER, topic, b"", key)
                if begun is None:  # a long key: other requests have their turn meanwhile
                    record = Record(0, NO_TIMESTAMP, key, b"")
                    await messages.put(TESTER, topic, [record])
                else:
                    await begun.appended

        broker.call(put())

    def put_numbered(topic: str, keys: Sequence[bytes]) -> None:
        async def put() -> None:
            for number, key in enumerate(keys):
                await broker.broker.messages.put(
                    TESTER,
                    topic,
                    [Record(0, NO_TIMESTAMP, key, b"")],
                    publisher="quill",
                    sequence=number,
                )

        broker.call(put())

    def put_keyed(topic: str, keys: Sequence[bytes]) -> None:
        records = [Record(0, NO_TIMESTAMP, key, b"") for key in keys]
        put = broker.broker.messages.put(TESTER, topic, records, idempotency_key="once")
        broker.call(put)

    ways = (put_together, put_one_by_one, put_numbered, put_keyed)
    for send in ways:
        assert placed_by(broker, send.__name__, send) == expected()
    for partitioner in BY_CRC32:
        for send in ways:
            topic = f"{send.__name__}-{partitioner}"
            found = placed_by(broker, topic, send, NO_EMPTY_KEY, partitioner)
            assert found == expected(NO_EMPTY_KEY, partitioner)


@pytest.mark.parametrize("partitioner", Partitioner)
def test_the_python_client_follows_the_topics_setting(
    broker: RunningBroker, partitioner: Partitioner
) -> None:
    # Of an empty key, librdkafka's default says that it may go anywhere.
    keys = KEYS if partitioner is Partitioner.MURMUR2 else NO_EMPTY_KEY

    def put(topic: str, keys: Sequence[bytes]) -> None:
        with Client(broker.address, timeout=DEADLINE_SECONDS) as client:
            for key in keys:
                client.put(topic, b"", key)

    def put_numbered(topic: str, keys: Sequence[bytes]) -> None:
        with Client(broker.address, topic, timeout=DEADLINE_SECONDS) as client:
            for number, key in enumerate(keys):
                client.put(topic, b"", key, sequence=number)

    def put_at_once(topic: str, keys: Sequence[bytes]) -> None:
        async def put_all() -> None:
            made = AsyncClient(broker.address, timeout=DEADLINE_SECONDS)
            async with made as client:
                await asyncio.gather(*(client.put(topic, b"", key) for key in keys))

        asyncio.run(put_all())

    for send in (put, put_numbered, put_at_once):
        topic = f"client-{send.__name__}-{partitioner}"
        assert placed_by(broker, topic, send, keys, partitioner) == expected(keys, partitioner)


def test_a_program_that_chooses_a_partitioner_itself_gets_it(broker: RunningBroker) -> None:
    def put(topic: str, keys: Sequence[bytes]) -> None:
        settings = {"partitioner": "consistent_random"}
        with Client(broker.address, timeout=DEADLINE_SECONDS, settings=settings) as client:
            for key in keys:
                client.put(topic, b"", key)

    found = placed_by(broker, "own-partitioner", put, NO_EMPTY_KEY)
    assert found == expected(NO_EMPTY_KEY, Partitioner.CRC32)


@pytest.mark.parametrize(
    ("setting", "keys", "partitioner"),
    [
        ({"partitioner": "murmur2_random"}, KEYS, Partitioner.MURMUR2),
        ({}, NO_EMPTY_KEY, Partitioner.CRC32),
    ],
    ids=["murmur2_random", "default"],
)
def test_librdkafka_agrees_by_its_setting_or_by_the_topics(
    broker: RunningBroker,
    setting: dict[str, str],
    keys: Sequence[bytes],
    partitioner: Partitioner,
) -> None:
    def send(topic: str, keys: Sequence[bytes]) -> None:
        producer = Producer({"bootstrap.servers": broker.address, **setting})
        for key in keys:
            producer.produce(topic, b"", key)
        assert producer.flush(DEADLINE_SECONDS) == 0

    found = placed_by(broker, f"librdkafka-{partitioner}", send, keys, partitioner)
    assert found == expected(keys, partitioner)


@each_client("partitions of keys as in Java")
def test_clients_agree_without_a_setting(broker: RunningBroker, client: KafkaClient) -> None:
    def send(topic: str, keys: Sequence[bytes]) -> None:
        publisher = client.publisher(broker.address)
        for key in keys:
            publisher.put(topic, "quack", key=key)

    assert placed_by(broker, f"by-{type(client).__name__}", send) == expected()


@pytest.mark.parametrize("partitioner", Partitioner)
def test_sparks_sink_agrees_and_keeps_murmur2_in_topics_of_before(
    partitioner: Partitioner,
) -> None:
    keys = NO_EMPTY_KEY if partitioner is Partitioner.CRC32 else KEYS
    found = choose_partitions(pa.array(keys, pa.binary()), len(keys), PARTITIONS, 0, partitioner)
    rule = Partitioner.MURMUR2 if partitioner is Partitioner.LEGACY else partitioner
    assert dict(zip(keys, found.tolist(), strict=True)) == expected(keys, rule)
