"""A producer or a consumer of the queue (D7) in a process of its own, on the queue's libraries.

    python -m tests.pubsub.queue_program produce ADDRESS FILE TOPIC…
    python -m tests.pubsub.queue_program consume ADDRESS FILE TOPIC…

Both register with their topics, say so on stdout, and begin when a line comes on stdin. A producer
enqueues each line of its file in each of its topics, and ends. A consumer writes each message to
its file as `TOPIC MESSAGE`; at the end of stdin it takes what is left, and ends. When the broker is
away they try again, as anybody would: by calling the same method once more.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Final

from quackmq.client.queue import Consumer, ConsumerError, Producer, ProducerError

REGISTERED: Final = "registered"
#: What may be over when it is asked again.
AWAY: Final = {"unreachable", "no_answer", "closing"}
#: Long, since machines can be busy. A broker that was killed is noticed without it, because its
#: connections end.
TIMEOUT_S: Final = 30.0
#: Dequeue does not wait.
PAUSE_S: Final = 0.005


def produce(address: str, file: Path, topics: list[str]) -> None:
    producer = Producer(address, timeout=TIMEOUT_S)
    ids = {topic: producer.RegisterProducer(topic) for topic in topics}
    print(REGISTERED, flush=True)
    sys.stdin.readline()
    for line in file.read_text().splitlines():
        for topic, producer_id in ids.items():
            while not enqueued(producer, producer_id, topic, line):
                continue
    producer.close()


def enqueued(producer: Producer, producer_id: str, topic: str, line: str) -> bool:
    try:
        return producer.Enqueue(producer_id, topic, line) == 0
    except ProducerError as error:
        if error.reason not in AWAY:
            raise
        return False


def consume(address: str, file: Path, topics: list[str]) -> None:
    consumer = Consumer(address, timeout=TIMEOUT_S)
    for topic in topics:
        consumer.RegisterConsumer(topic)
    print(REGISTERED, flush=True)
    sys.stdin.readline()
    is_over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with file.open("w") as output:
        while True:
            is_last_round = is_over.is_set()
            found = [dequeued(consumer, topic) for topic in topics]
            for topic, message in zip(topics, found, strict=True):
                if message is not None:
                    output.write(f"{topic} {message}\n")
                    output.flush()
            if not any(found):
                if is_last_round and all(consumer.Size(topic) == 0 for topic in topics):
                    break
                time.sleep(PAUSE_S)
    consumer.close()


def dequeued(consumer: Consumer, topic: str) -> str | None:
    try:
        return consumer.Dequeue(topic)
    except ConsumerError as error:
        if error.reason not in {"empty", *AWAY}:
            raise
        return None


if __name__ == "__main__":
    role = produce if sys.argv[1] == "produce" else consume
    role(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
