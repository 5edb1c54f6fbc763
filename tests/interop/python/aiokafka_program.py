"""aiokafka as a program of tests/interop/programs.py."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    CoordinatorNotAvailableError,
    IllegalStateError,
    KafkaConnectionError,
    NotCoordinatorForGroupError,
    RequestTimedOutError,
)

from tests.interop.python import telling
from tests.interop.python.telling import tell

#: Why a commit may be refused or lost: the group, or the broker, is on the move.
MOVING: Final = (
    CommitFailedError,
    CoordinatorNotAvailableError,
    IllegalStateError,
    KafkaConnectionError,
    NotCoordinatorForGroupError,
    RequestTimedOutError,
)


class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Rebalances wait until what was taken is committed."""

    def __init__(self, busy: asyncio.Lock) -> None:
        self._busy = busy

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        tell("assigned", *[each.partition for each in assigned])

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        async with self._busy:
            tell("revoked", *[each.partition for each in revoked])


async def consume(settings: dict[str, Any], over: threading.Event) -> None:
    busy = asyncio.Lock()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings["address"],
        group_id=settings["group"],
        group_instance_id=settings["instance"],
        session_timeout_ms=settings["session_ms"],
        heartbeat_interval_ms=settings["heartbeat_ms"],
        partition_assignment_strategy=(RangePartitionAssignor,),
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    await consumer.start()
    consumer.subscribe([settings["topic"]], listener=Listener(busy))
    try:
        while not over.is_set():
            got = await consumer.getmany(
                timeout_ms=telling.POLL_MS, max_records=telling.BEFORE_COMMIT
            )
            async with busy:
                await take(consumer, got)
    finally:
        await consumer.stop()


async def take(consumer: AIOKafkaConsumer, got: dict[TopicPartition, list[Any]]) -> None:
    after = {}
    for place, messages in got.items():
        for message in messages:
            tell("record", place.partition, offset=message.offset, value=message.value.decode())
            after[place] = message.offset + 1
    if not after:
        return
    try:
        await consumer.commit(after)
    except MOVING:
        return
    for place, offset in after.items():
        tell("committed", place.partition, offset=offset)


async def produce(settings: dict[str, Any], over: threading.Event) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=settings["address"], enable_idempotence=True, linger_ms=2
    )
    await producer.start()
    under_way: set[asyncio.Future[Any]] = set()
    for number in count():
        if over.is_set():
            break
        value = str(number).encode()
        under_way.add(await producer.send(settings["topic"], value, partition=0))
        if number % telling.BURST == 0:
            await asyncio.sleep(telling.PAUSE_S)
        while len(under_way) >= telling.UNDER_WAY:
            done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
    await asyncio.gather(*under_way)
    await producer.stop()
    tell("sent", count=number)


def main() -> None:
    settings, over = telling.begin()
    play = produce if settings["role"] == "producer" else consume
    asyncio.run(play(settings, over))


if __name__ == "__main__":
    main()
