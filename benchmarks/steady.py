"""A publisher with a steady hand: so many records a second, for so long, and no more.

    python -m benchmarks.steady ADDRESS TOPIC PARTITIONS RATE SECONDS

Prints how many records were acknowledged, and in how many seconds, when the last one is. A process
of its own, so that what it takes of a core is not taken from whom it measures.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import Producer

#: Records come in as many bursts a second.
BURSTS = 50
BYTES = 100


def main(address: str, topic: str, partitions: int, rate: int, seconds: float) -> None:
    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 20, "queue.buffering.max.messages": rate}
    )
    value = b"quack " * (BYTES // 6)
    keys = [b"key-%d" % number for number in range(100)]
    records = int(rate * seconds)
    sent = 0
    began = time.monotonic()
    while sent < records:
        due = min(records, int((time.monotonic() - began) * rate))
        while sent < due:
            try:
                producer.produce(topic, value, key=keys[sent % 100], partition=sent % partitions)
                sent += 1
            except BufferError:  # the broker is behind: told by the rate
                producer.poll(1 / BURSTS)
        producer.poll(1 / BURSTS)
    left = producer.flush(120)
    assert left == 0, f"{left} records were not acknowledged"
    print(records, time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
