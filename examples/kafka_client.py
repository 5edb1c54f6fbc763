"""Kafka's protocol, by a client that nobody here wrote: a producer and a consumer group.

    quackmq serve --data DIR
    python examples/kafka_client.py [ADDRESS]

It needs confluent-kafka. Any other Kafka client does the same. The broker answers the
producer when a message is on disk. The consumer commits its offsets after it has processed the
messages: if it is killed in between, it processes some of them again, and misses none.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

TOPIC = "duck-sightings"
SIGHTINGS = {"pond": "two mallards", "river": "one teal", "lake": "ducks without number"}
TIMEOUT_S = 30.0


def main(address: str) -> None:
    produce(address)
    consume(address)


def produce(address: str) -> None:
    """Send each sighting; return when all of them are on disk."""
    # With idempotence, the broker recognises a message that the client sends again.
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    for place, sighting in SIGHTINGS.items():
        # Messages with the same key go to the same partition, in order.
        producer.produce(TOPIC, key=place, value=sighting, on_delivery=report)
    if producer.flush(TIMEOUT_S):
        raise SystemExit("some messages were not acknowledged in time")


def report(error: KafkaError | None, message: Message) -> None:
    """Print what became of a message."""
    if error is not None:
        raise KafkaException(error)
    print(f"stored at partition {message.partition()}, offset {message.offset()}")


def consume(address: str) -> None:
    """Read as many messages as were sent, as a member of the group `watchers`."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "watchers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([TOPIC])
    deadline = time.monotonic() + TIMEOUT_S
    count = 0
    while count < len(SIGHTINGS) and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if (error := message.error()) is not None:
            raise KafkaException(error)
        key, value = message.key() or b"", message.value() or b""
        print(f"{as_text(key)}: {as_text(value)}")
        count += 1
    consumer.commit(asynchronous=False)
    consumer.close()
    if count < len(SIGHTINGS):
        raise SystemExit("some messages did not come in time")


def as_text(data: str | bytes) -> str:
    return data if isinstance(data, str) else data.decode()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092")
