"""Consume, transform, produce, exactly once: a worker that may be killed at any moment.

Several of these share the partitions of the source topics as one consumer group. What a worker
makes of the records that it took, and how far it has read, are one transaction: both happen, or
neither does. On any error it just ends, and whoever started it starts it again: there is nothing
to repair, because what it had not committed never happened.

    python examples/copier.py ADDRESS NAME TARGET SOURCE...
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

GROUP = "copiers"
RECORDS_AT_ONCE = 500
#: A worker that is gone is noticed after this time, and its partitions are given to the others.
SESSION_MS = 2_000


def main(address: str, name: str, target: str, *sources: str) -> None:
    producer = Producer(
        {
            "bootstrap.servers": address,
            # Whoever starts under this name ends what an earlier one has left open.
            "transactional.id": name,
            "transaction.timeout.ms": 10_000,
            # Otherwise librdkafka forgets a broker that is away, and waits for ever for that one
            # to take the group's offsets (its issue 5511).
            "metadata.recovery.strategy": "none",
            "reconnect.backoff.max.ms": 200,
            "log_level": 2,
        }
    )
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": GROUP,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": SESSION_MS // 6,
            "reconnect.backoff.max.ms": 200,
            "log_level": 2,
        }
    )
    taken: list[Message] = []
    # Partitions that go to somebody else are read again by him, from where was committed.
    consumer.subscribe(list(sources), on_revoke=lambda *_: taken.clear())
    producer.init_transactions(30)
    while True:
        take(consumer, taken)
        if taken:
            copy(producer, consumer, target, taken)
            taken.clear()


def take(consumer: Consumer, taken: list[Message]) -> None:
    while len(taken) < RECORDS_AT_ONCE:
        message = consumer.poll(0.05)
        if message is None:
            return
        error = message.error()
        if error is not None:
            raise KafkaException(error)
        taken.append(message)


def copy(producer: Producer, consumer: Consumer, target: str, taken: list[Message]) -> None:
    producer.begin_transaction()
    for message in taken:
        producer.produce(target, image(message.value() or b""))
    # Of each partition the last message counts: the next one is where to go on.
    ends = {
        (message.topic() or "", message.partition() or 0): (message.offset() or 0) + 1
        for message in taken
    }
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, partition, end) for (topic, partition), end in ends.items()],
        consumer.consumer_group_metadata(),
        30,
    )
    producer.commit_transaction(30)


def image(value: bytes) -> bytes:
    return b"seen " + value


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KafkaException as error:
        sys.exit(f"{error}; to be started again")
