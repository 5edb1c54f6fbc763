"""Run a simulation worker: read requests from a topic, simulate, put results into another topic.

Workers share the requests as a consumer group. A result and the offset of its request are committed
in one transaction: both are visible or neither, whenever a worker is killed. A worker that replaces
a dead one takes over its name, its requests and its open transaction.

The simulation is a queue of customers at a counter, because theory knows the answer. Customers come
at random times and are served for random times, one after the other (M/M/1). With a load of ρ, the
mean wait is ρ/(1-ρ) times the mean service time.

    python -m quackmq.spark.pipelines.workers.simulation '{"address": …, "name": …, …}'
"""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from quackmq.spark.pipelines.workers.processes import end_with_input

#: A dead worker leaves the group after this time, unless it is restarted before.
_SESSION_MS: Final = 10_000
#: The broker aborts the open transaction of a dead worker after this time, unless its successor
#: does.
_TRANSACTION_MS: Final = 10_000
_RESPONSE_S: Final = 30


def simulate_counter(load: float, customers: int, seed: int) -> float:
    """Return the mean wait in units of the mean service time. The same seed gives the same
    result."""
    randomness = random.Random(seed)
    wait = total = 0.0
    for _ in range(customers):
        total += wait
        service_time = randomness.expovariate(1.0)
        time_to_next = randomness.expovariate(load)
        wait = max(0.0, wait + service_time - time_to_next)
    return total / customers


def main(address: str, name: str, group: str, requests: str, results: str) -> None:
    """Process requests until standard input ends. Raise KafkaException for an error that the client
    does not retry.

    `name` is both the transactional id and the group's instance id. So a worker that is started
    again gets the requests of its predecessor, and ends its open transaction."""
    ending = threading.Event()
    end_with_input(ending)
    common = {"bootstrap.servers": address, "log_level": 2, "reconnect.backoff.max.ms": 200}
    producer = Producer(
        {**common, "transactional.id": name, "transaction.timeout.ms": _TRANSACTION_MS}
    )
    consumer = Consumer(
        {
            **common,
            "group.id": group,
            "group.instance.id": name,
            "session.timeout.ms": _SESSION_MS,
            "heartbeat.interval.ms": _SESSION_MS // 10,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    # Abort the transaction that a predecessor of this name has left open.
    producer.init_transactions(_RESPONSE_S)
    consumer.subscribe([requests])
    try:
        while not ending.is_set():
            message = consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                raise KafkaException(error)
            process_request(producer, consumer, message, name, results)
    finally:
        consumer.close()


def process_request(
    producer: Producer, consumer: Consumer, message: Message, name: str, results: str
) -> None:
    """Process one request and commit its result. The transaction begins after the simulation,
    because readers of the results wait for open transactions."""
    request = json.loads(message.value() or b"{}")
    result = _compute_result(request, name)
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None and partition is not None and offset is not None
    producer.begin_transaction()
    producer.produce(results, json.dumps(result).encode(), message.key())
    done = [TopicPartition(topic, partition, offset + 1)]
    producer.send_offsets_to_transaction(done, consumer.consumer_group_metadata(), _RESPONSE_S)
    producer.commit_transaction(_RESPONSE_S)


def _compute_result(request: dict[str, Any], name: str) -> dict[str, Any]:
    wait = simulate_counter(request["load"], request["customers"], request["seed"])
    return {"run": request["run"], "request": request["request"], "worker": name, "wait": wait}


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except KafkaException as failure:
        sys.exit(f"a simulation worker failed, and the pipeline restarts it: {failure}")
