"""confluent-kafka as a program of tests/interop/programs.py."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.interop.python import telling
from tests.interop.python.telling import tell

#: Why a commit may be refused or lost: the group, or the broker, is on the move.
MOVING: Final = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._WAIT_COORD,
}


class Member:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._topic = settings["topic"]
        self._next: dict[int, int] = {}
        config = {
            "bootstrap.servers": settings["address"],
            "group.id": settings["group"],
            "group.protocol": settings["protocol"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 200,
        }
        if settings["protocol"] == "classic":
            config |= {
                "session.timeout.ms": settings["session_ms"],
                "heartbeat.interval.ms": settings["heartbeat_ms"],
                "partition.assignment.strategy": (
                    "cooperative-sticky" if settings["cooperative"] else "range"
                ),
            }
        if settings["instance"]:
            config["group.instance.id"] = settings["instance"]
        self._consumer = Consumer(config)
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def run(self, over: threading.Event) -> None:
        count = 0
        while not over.is_set():
            message = self._consumer.poll(telling.POLL_MS / 1000)
            if message is not None and message.error() is None:
                self._take(message)
                count += 1
            if message is None or count % telling.BEFORE_COMMIT == 0:
                self._commit()
        self._commit()
        self._consumer.close()

    def _take(self, message: Message) -> None:
        partition, offset, value = message.partition(), message.offset(), message.value()
        assert partition is not None and offset is not None and value is not None
        tell("record", partition, offset=offset, value=value.decode())
        self._next[partition] = offset + 1

    def _commit(self) -> None:
        wanted = [TopicPartition(self._topic, *item) for item in self._next.items()]
        self._next = {}
        if not wanted:
            return
        try:
            done = self._consumer.commit(offsets=wanted, asynchronous=False)
        except KafkaException as failure:
            if failure.args[0].code() not in MOVING:
                raise
            return
        for each in done or ():
            if each.error is None:
                tell("committed", each.partition, offset=each.offset)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        tell("assigned", *[each.partition for each in partitions])

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._commit()
        tell("revoked", *[each.partition for each in partitions])

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._next = {}
        tell("revoked", *[each.partition for each in partitions])


def produce(settings: dict[str, Any], over: threading.Event) -> None:
    failed: list[str] = []

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(str(error))

    config = {"bootstrap.servers": settings["address"], "enable.idempotence": True}
    producer = Producer({**config, "linger.ms": 2, "reconnect.backoff.max.ms": 200})
    for number in count():
        if over.is_set():
            break
        producer.produce(settings["topic"], str(number), partition=0, on_delivery=note)
        if number % telling.BURST == 0:
            producer.poll(telling.PAUSE_S)
        while len(producer) >= telling.UNDER_WAY:
            producer.poll(telling.PAUSE_S)
    producer.flush()
    assert not failed, failed
    tell("sent", count=number)


def main() -> None:
    settings, over = telling.begin()
    if settings["role"] == "producer":
        produce(settings, over)
    else:
        Member(settings).run(over)


if __name__ == "__main__":
    main()
