"""The distributed queue in one page: two producers log to a topic, two consumers read all of it.

    python examples/queue_client.py [ADDRESS]

ADDRESS is that of a broker's HTTP listener, default 127.0.0.1:8002. A consumer gets what is logged
after it has registered, each at its own pace; what one has taken, the other still gets.
"""

from __future__ import annotations

import sys

from quackmq.client.queue import DEFAULT_ADDRESS, Consumer, ConsumerError, Producer

TOPIC = "logs"


def main(address: str = DEFAULT_ADDRESS) -> None:
    with Producer(address) as producer, Consumer(address) as fast, Consumer(address) as slow:
        web = producer.register_producer(TOPIC)
        database = producer.register_producer(TOPIC)
        for consumer in (fast, slow):
            print(f"registered {consumer.register_consumer(TOPIC)}")

        producer.enqueue(web, TOPIC, "web: GET /pond 200")
        producer.enqueue(database, TOPIC, "database: 3 ducks found")
        producer.enqueue(web, TOPIC, "web: GET /fox 404")

        while (message := next_message(fast)) is not None:
            print(f"fast: {message}")
        print(f"slow has {slow.size(TOPIC)} to read, the first: {next_message(slow)}")


def next_message(consumer: Consumer) -> str | None:
    try:
        return consumer.dequeue(TOPIC)
    except ConsumerError as error:
        if error.reason == "empty":
            return None
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
