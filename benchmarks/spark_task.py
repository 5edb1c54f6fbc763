"""CPU time of a Spark task that reads the log, with and without the numpy decoder.

    python -m benchmarks.spark_task [--scale 1.0] [--directory DIR] [--only NAME …]

The task runs in this process, without Spark: it fetches batches from a broker in another process,
decodes them, and writes the rows as an Arrow stream, as Spark's Python worker does. `ours` decodes
with `quackmq.spark.source.decode`, `bare` with `quackmq.records.columns.to_arrow` alone. Both run
in turns after a first run that does not count; the least CPU time of each counts. The figure that
decides is the ratio: above 0.85, the numpy decoder is not worth its lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Producer

from benchmarks.broker import Broker
from benchmarks.support import Row, measure
from quackmq.records.columns import to_arrow
from quackmq.spark.source import rows as source_rows
from quackmq.spark.source.decode import open_batches
from quackmq.spark.source.source import QuackSource

RECORDS: Final = 500_000
ROUNDS: Final = 5
_MAX_RATIO: Final = 0.85
_DEADLINE_S: Final = 120


class Bench:
    """A broker until the end of the program."""

    def __init__(self, root: Path, scale: float) -> None:
        self.records = max(1_000, int(RECORDS * scale))
        self._broker = Broker.started(root, "always")
        self.broker = self._broker.__enter__()

    def close(self) -> None:
        self._broker.__exit__(None, None, None)

    def publish(self, topic: str, compression: str) -> None:
        """Publish records with keys of some 8 bytes and values of 100."""
        producer = Producer(
            {
                "bootstrap.servers": self.broker.kafka,
                "compression.type": compression,
                "linger.ms": 50,
                "batch.size": 500_000,
                "queue.buffering.max.messages": 2 * self.records,
            }
        )
        for number in range(self.records):
            value = (b"quack " * 17 + b"%d" % number)[-100:]
            producer.produce(topic, value, key=b"key-%d" % (number % 1000))
        assert producer.flush(_DEADLINE_S) == 0

    def read(self, topic: str) -> None:
        options = {"kafka.bootstrap.servers": self.broker.kafka, "subscribe": topic}
        source = QuackSource(options)
        reader: Any = source.reader(source.schema())
        records = 0
        for task in reader.partitions():
            for batch in reader.read(task):
                records += batch.num_rows
                with pa.ipc.new_stream(pa.MockOutputStream(), batch.schema) as stream:
                    stream.write_batch(batch)
        assert records == self.records, f"{records} of {self.records} records"


def plain(bench: Bench) -> list[Row]:
    return [_compare(bench, "none")]


def compressed(bench: Bench) -> list[Row]:
    return [_compare(bench, "lz4")]


def _compare(bench: Bench, compression: str) -> Row:
    topic = f"bench-{compression}"
    bench.publish(topic, compression)
    least_s: dict[Callable[..., Any], float] = {}
    for round_number in range(ROUNDS + 1):
        for decode in (open_batches, to_arrow):
            setattr(source_rows, "open_batches", decode)  # noqa: B010
            began_s = time.process_time()
            bench.read(topic)
            cpu_s = time.process_time() - began_s
            if round_number:
                least_s[decode] = min(cpu_s, least_s.get(decode, cpu_s))
    ours, bare = (1e6 * least_s[decode] / bench.records for decode in (open_batches, to_arrow))
    name = f"read task of {bench.records:,} log records, compression {compression}"
    unit = "µs CPU/record"
    return Row(name, ours, bare, unit, f"≤ {_MAX_RATIO:g}", ours / bare <= _MAX_RATIO)


SECTIONS: Final = {"plain": plain, "compressed": compressed}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, Bench, Bench.close))
