"""What tests of single messages share: short ways of putting and reading them."""

from __future__ import annotations

from quackmq.broker import Broker, Page, Put
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.subscription import RecordPosition, parse_position
from quackmq.records.batch import NO_TIMESTAMP, Record
from tests.broker.support import (
    CALLER,
    TOPIC,
)

#: Keys of the partitions 0 and 1 where there are two.
ZERO, ONE = b"2", b"4"
#: A topic of which two entries can wait to be consumed.
WAITS = Policy(live_entries=2, when_full=WhenFull.WAIT, keep_until_consumed=True)


def record(value: bytes, key: bytes | None = None) -> Record:
    return Record(0, NO_TIMESTAMP, key, value)


def places(broker: Broker, put: Put) -> list[RecordPosition]:
    return [parse_position(token, broker.topic(TOPIC).id) for token in put.ids]


async def put(broker: Broker, *values: bytes, partition: int | None = None) -> Put:
    records = [record(value) for value in values]
    return await broker.messages.put(CALLER, TOPIC, records, partition=partition)


async def numbered(broker: Broker, sequence: int, value: bytes, publisher: str = "quill") -> Put:
    return await broker.messages.put(
        CALLER, TOPIC, [record(value)], publisher=publisher, sequence=sequence
    )


async def keyed(broker: Broker, key: str, *records: Record) -> Put:
    return await broker.messages.put(CALLER, TOPIC, records, idempotency_key=key)


async def read(broker: Broker, offset: int = 0, *, partition: int = 0, wait_ms: int = 0) -> Page:
    return await broker.messages.read(
        CALLER, TOPIC, partition, offset, max_records=100, max_bytes=2**20, wait_ms=wait_ms
    )
