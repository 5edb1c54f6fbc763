"""kafka-python as a program of tests/interop/programs.py."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import Any, Final

from kafka import (
    ConsumerRebalanceListener,
    KafkaConsumer,
    KafkaProducer,
    OffsetAndMetadata,
    TopicPartition,
)
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import (
    CommitFailedError,
    KafkaConnectionError,
    KafkaTimeoutError,
    RebalanceInProgressError,
)

from tests.interop.python import telling
from tests.interop.python.telling import tell

#: Why a commit may be refused or lost: the group, or the broker, is on the move.
MOVING: Final = (
    CommitFailedError,
    KafkaConnectionError,
    KafkaTimeoutError,
    RebalanceInProgressError,
)


class Member(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, settings: dict[str, Any]) -> None:
        self._next: dict[TopicPartition, int] = {}
        cooperative = settings["cooperative"]
        self._consumer = KafkaConsumer(
            bootstrap_servers=settings["address"],
            group_id=settings["group"],
            group_instance_id=settings["instance"],
            session_timeout_ms=settings["session_ms"],
            heartbeat_interval_ms=settings["heartbeat_ms"],
            partition_assignment_strategy=[
                CooperativeStickyAssignor if cooperative else RangePartitionAssignor
            ],
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        self._consumer.subscribe([settings["topic"]], listener=self)

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            got = self._consumer.poll(telling.POLL_MS, max_records=telling.BEFORE_COMMIT)
            for place, messages in got.items():
                for message in messages:
                    value = message.value.decode()
                    tell("record", place.partition, offset=message.offset, value=value)
                    self._next[place] = message.offset + 1
            self._commit()
        self._consumer.close()

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        tell("assigned", *[each.partition for each in assigned])

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        tell("revoked", *[each.partition for each in revoked])

    def _commit(self) -> None:
        after, self._next = self._next, {}
        if not after:
            return
        try:
            self._consumer.commit(
                {place: OffsetAndMetadata(offset, "", -1) for place, offset in after.items()}
            )
        except MOVING:
            return
        for place, offset in after.items():
            tell("committed", place.partition, offset=offset)


def produce(settings: dict[str, Any], over: threading.Event) -> None:
    producer = KafkaProducer(
        bootstrap_servers=settings["address"], enable_idempotence=True, linger_ms=2
    )
    futures = []
    for number in count():
        if over.is_set():
            break
        futures.append(producer.send(settings["topic"], str(number).encode(), partition=0))
        if number % telling.BURST == 0:
            time.sleep(telling.PAUSE_S)
        if len(futures) >= telling.UNDER_WAY:
            futures.pop(0).get(timeout=60)
    producer.flush()
    for future in futures:
        future.get(timeout=60)
    producer.close()
    tell("sent", count=number)


def main() -> None:
    settings, over = telling.begin()
    if settings["role"] == "producer":
        produce(settings, over)
    else:
        Member(settings).run(over)


if __name__ == "__main__":
    main()
