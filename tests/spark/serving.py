"""A broker with its Kafka and HTTP listeners in a thread: what a driver and its tasks speak
with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadAllAvailable

from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.spark.source.source import QuackSource
from quackmq.stores.contract import Store
from tests.kit.support import listening
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S, Serving


class Broker(Serving):
    def __init__(self, store: Store | None = None, directory: Path | None = None) -> None:
        super().__init__(store, directory)
        self.kafka_listener = KafkaServer(self.broker, "127.0.0.1", 0)
        host, port = self.run(listening(self.kafka_listener))
        self.address = f"{host}:{port}"
        self.broker.listener_addresses["http"] = (self.host, self.port)

    def close(self) -> None:
        self.run(self.kafka_listener.close())
        super().close()

    # --- what tests do with it --------------------------------------------------------------

    def create(self, topic: str, partitions: int = 1) -> None:
        """It is archived when it is told to."""
        policy = Policy(archive_after_ms=None, archive_bytes=None)
        self.run(self.broker.create_topic(CALLER, topic, partitions=partitions, policy=policy))

    def archive(self, topic: str) -> None:
        """All that there is."""
        assert self.broker.archive is not None
        self.run(self.broker.archive.archive(CALLER, topic))

    def merge(self, topic: str) -> int:
        assert self.broker.archive is not None
        return self.run(self.broker.archive.merge(CALLER, topic)).merges

    def trim(self, topic: str, before: int, partition: int = 0) -> None:
        key = PartitionKey(self.broker.topic(topic).id, partition)
        self.run(self.broker.trim(CALLER, key, before))

    def first(self, topic: str, partition: int = 0) -> int:
        """The first offset that is still there."""
        key = PartitionKey(self.broker.topic(topic).id, partition)
        return self.run(self.broker.offsets(CALLER, key)).first

    def publish(
        self,
        topic: str,
        values: Sequence[str | bytes | None],
        partition: int = 0,
        settings: Mapping[str, str | int] = MappingProxyType({}),
    ) -> None:
        """Publish values with a producer of confluent-kafka that has these settings."""
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 20, **settings})
        for value in values:
            producer.produce(topic, value=value, partition=partition)
        assert producer.flush(DEADLINE_S) == 0

    def options(self, topic: str | None = None, **more: object) -> dict[str, str]:
        options = {"kafka.bootstrap.servers": self.address, "retryTimeoutMs": "30000"}
        if topic is not None:
            options["subscribe"] = topic
        return options | {name: str(value) for name, value in more.items()}

    def consumed(self, topic: str, partitions: int = 1) -> list[tuple[int, int, bytes | None]]:
        """Partition, offset and value of all that a Kafka consumer reads, committed only."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "checker",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        try:
            consumer.assign([TopicPartition(topic, each, 0) for each in range(partitions)])
            found: list[tuple[int, int, bytes | None]] = []
            ended: set[int] = set()
            while len(ended) < partitions:
                message = consumer.poll(DEADLINE_S)
                assert message is not None, "the consumer hears nothing"
                partition = message.partition()
                assert partition is not None
                if message.error() is not None:
                    ended.add(partition)
                    continue
                offset = message.offset()
                assert offset is not None
                found.append((partition, offset, message.value()))
            return sorted(found)
        finally:
            consumer.close()


@contextmanager
def serving(store: Store | None = None, directory: Path | None = None) -> Iterator[Broker]:
    """With a directory it has an archive, too."""
    broker = Broker(store, directory)
    try:
        yield broker
    finally:
        broker.close()


# --- Spark's part, without Spark -----------------------------------------------------------------


def batch_reader(options: Mapping[str, str], columns: Any = None) -> DataSourceReader:
    source = QuackSource(dict(options))
    return source.reader(columns or source.schema())


def stream_reader(options: Mapping[str, str]) -> DataSourceStreamReader:
    source = QuackSource(dict(options))
    return source.streamReader(source.schema())


def rows_of(reader: Any, partitions: Sequence[Any]) -> list[dict[str, Any]]:
    """What the tasks of a plan read, one after the other."""
    batches = [batch for each in partitions for batch in reader.read(each)]
    return pa.Table.from_batches(batches).to_pylist() if batches else []


def read(options: Mapping[str, str], columns: Any = None) -> list[dict[str, Any]]:
    reader = batch_reader(options, columns)
    return rows_of(reader, reader.partitions())


class Query:
    """A streaming query as Spark runs one, a batch at a time, over what it would have in its
    checkpoint. Making another over the same log is a restart."""

    def __init__(self, options: Mapping[str, str], log: list[dict[str, Any]] | None = None) -> None:
        self.reader: Any = stream_reader(options)
        #: The ends of batches, as the offset log has them.
        self.log = [] if log is None else log
        self.rows: list[dict[str, Any]] = []

    def start(self) -> dict[str, Any]:
        return self.log[-1] if self.log else self.reader.initialOffset()

    def step(self) -> int | None:
        """The number of rows of the next batch; None where there is nothing new."""
        start = self.start()
        end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
        if end == start:
            return None
        begin = self.start()
        self.log.append(end)
        return self.run(begin, end)

    def run(self, start: dict[str, Any], end: dict[str, Any]) -> int:
        found = rows_of(self.reader, self.reader.partitions(start, end))
        self.rows += found
        return len(found)

    def repeat(self) -> int:
        """The last batch once more, as after a restart that found it without a commit."""
        start = self.log[-2] if len(self.log) > 1 else self.reader.initialOffset()
        return self.run(start, self.log[-1])

    def drain(self) -> None:
        while self.step() is not None:
            pass

    def close(self) -> None:
        self.reader.stop()


def everything(reader: Any, start: dict[str, Any]) -> dict[str, Any]:
    end: dict[str, Any] = reader.latestOffset(start, ReadAllAvailable())
    return end
