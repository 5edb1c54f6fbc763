"""confluent-kafka as a transformer of tests/interop/programs.py: source topic in, target topic out.

One transaction takes some records of the source, writes the image of each to the target, and moves
the group's offsets. Where it fails it is aborted, and begun again from what is committed. Without
transactions, the same steps one after another.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.interop.python import telling
from tests.interop.python.telling import tell

#: Records a transaction, at most, and for how long it gathers them.
TOGETHER: Final = 50
GATHER_S: Final = 0.1
CALL_S: Final = 20
#: What a program ends with that cannot go on, and is to be started anew.
CANNOT_GO_ON: Final = 3
SETTINGS: Final = {
    "log_level": 2,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 100,
    # Otherwise librdkafka 2.16 forgets a broker that is away, and waits for ever for that very one
    # to take a group's offsets.
    "metadata.recovery.strategy": "none",
}


class Transformer:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._source, self._target = settings["source"], settings["target"]
        self._transactions = settings["transactions"]
        self._random = random.Random(settings["seed"])
        self._gathered: list[Message] = []
        common = {"bootstrap.servers": settings["address"], **SETTINGS}
        self._consumer = Consumer(
            {
                **common,
                "group.id": settings["group"],
                "session.timeout.ms": settings["session_ms"],
                "heartbeat.interval.ms": settings["heartbeat_ms"],
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        kind: dict[str, Any] = {"enable.idempotence": True}
        if self._transactions:
            kind = {
                "transactional.id": settings["transactional_id"],
                "transaction.timeout.ms": 10_000,
            }
        self._producer = Producer({**common, "linger.ms": 1, **kind})

    def run(self, over: threading.Event) -> None:
        if self._transactions:
            self._again_and_again(self._producer.init_transactions, CALL_S)
        self._consumer.subscribe(
            [self._source], on_assign=self._forget, on_revoke=self._forget, on_lost=self._forget
        )
        while not over.is_set():
            self._gather()
            if not self._gathered:
                continue
            try:
                self._transform()
                tell("committed", count=len(self._gathered))
            except KafkaException as error:
                self._begin_again(error.args[0])
            self._gathered.clear()
        self._consumer.close()

    def _gather(self) -> None:
        """Some records, of partitions that are held all the while."""
        until = time.monotonic() + GATHER_S
        while len(self._gathered) < TOGETHER and time.monotonic() < until:
            message = self._consumer.poll(0.02)
            if message is not None and message.error() is None:
                self._gathered.append(message)

    def _forget(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """What was gathered may be somebody else's now; what is not committed comes again."""
        self._gathered.clear()

    def _transform(self) -> None:
        if self._transactions:
            self._producer.begin_transaction()
        offsets: dict[int, int] = {}
        for message in self._gathered:
            partition, offset = message.partition(), message.offset()
            assert partition is not None and offset is not None
            image = b"image of " + (message.value() or b"")
            self._producer.produce(self._target, image, partition=partition % 2)
            offsets[partition] = offset + 1
        self._dawdle()
        moved = [TopicPartition(self._source, *item) for item in offsets.items()]
        if self._transactions:
            self._producer.send_offsets_to_transaction(
                moved, self._consumer.consumer_group_metadata(), CALL_S
            )
            self._dawdle()
            tell("produced")
            self._again_and_again(self._producer.commit_transaction, CALL_S)
        else:
            self._producer.flush(CALL_S)
            tell("produced")
            self._dawdle()
            self._consumer.commit(offsets=moved, asynchronous=False)

    def _dawdle(self) -> None:
        """So that kills meet it everywhere."""
        time.sleep(self._random.uniform(0, self._settings["dawdle_ms"] / 1000))

    def _again_and_again(self, call: Any, *given: Any) -> None:
        """A call that may be repeated after an error that says so; as long as it likes."""
        while True:
            try:
                call(*given)
                return
            except KafkaException as error:
                if not error.args[0].retriable():
                    raise

    def _begin_again(self, error: KafkaError) -> None:
        """From what is committed."""
        tell("aborted", value=str(error))
        if error.fatal():
            cannot_go_on(error)
        if self._transactions and error.txn_requires_abort():
            self._again_and_again(self._producer.abort_transaction, CALL_S)
        elif self._transactions:
            cannot_go_on(error)
        for place in self._consumer.committed(self._consumer.assignment(), CALL_S):
            start = place.offset if place.offset >= 0 else 0
            self._consumer.seek(TopicPartition(place.topic, place.partition, start))


def cannot_go_on(error: KafkaError) -> None:
    print(f"cannot go on: {error}", file=sys.stderr, flush=True)
    sys.exit(CANNOT_GO_ON)


def main() -> None:
    settings, over = telling.begin()
    try:
        Transformer(settings).run(over)
    except KafkaException as error:
        cannot_go_on(error.args[0])


if __name__ == "__main__":
    main()
