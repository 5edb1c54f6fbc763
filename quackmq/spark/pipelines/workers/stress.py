"""Run one process of a stress test: put messages one by one, and report how long each put took.

The process puts its measurements into a topic and keeps none. Each measurement has a number, so
that a reader can tell whether all are there.

    python -m quackmq.spark.pipelines.workers.stress '{"address": …, "run": …, "process": 0, …}'
"""

from __future__ import annotations

import json
import sys
import threading
import time

from quackmq.client import Client
from quackmq.errors import QuackError
from quackmq.spark import limits
from quackmq.spark.pipelines.workers.processes import end_with_input


def main(
    address: str, run: str, process: int, operations: int, bytes: int, target: str, topic: str
) -> None:
    """Put `operations` messages into `target`, and their measurements into `topic`. End early when
    standard input ends."""
    ending = threading.Event()
    end_with_input(ending)
    payload = b"\0" * bytes
    samples: list[dict[str, object]] = []
    timeout_s = limits.SPARK_RETRY_MS / 1000
    with (
        Client(address, timeout=timeout_s) as target_client,
        Client(address, serialiser="json", timeout=timeout_s) as metrics_client,
    ):
        for number in range(operations):
            if ending.is_set():
                break
            samples.append({"run": run, "process": process, "number": number})
            samples[-1] |= put(target_client, target, payload)
            if len(samples) == limits.PIPELINE_SAMPLES or number == operations - 1:
                metrics_client.put_many(topic, samples, key=str(process))
                samples.clear()


def put(client: Client, target: str, payload: bytes) -> dict[str, object]:
    """Put one message; return its measurement."""
    start_ns, start_ms = time.perf_counter_ns(), time.time_ns() // 1_000_000
    try:
        client.put(target, payload)
        is_good = True
    except QuackError:
        is_good = False
    duration_us = (time.perf_counter_ns() - start_ns) / 1000
    return {"at_ms": start_ms, "took_us": duration_us, "is_good": is_good}


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except QuackError as failure:
        sys.exit(f"a process of the stress test failed: {failure}")
