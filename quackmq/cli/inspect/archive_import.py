"""`quackmq archive import`: import Parquet files into a topic of a running broker, each record
once.

Records are put in transactions. Each transaction also commits the number of records imported so
far, as a publisher with a durable name does (see `quackmq.model.offset_notes`). The name is made
from the content of the files, so it is the same for every run. After any failure, the same command
continues after the last committed transaction. This works as long as the broker remembers the name
(`PUBLISHER_EXPIRY_MS` of the broker after its last put), and with a Kafka cluster as long as it
keeps the offsets of groups.

Each record keeps its key, value, headers and timestamp, and its partition unless `--by-key` is
given. It does not keep its offset and its original producer.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.inspect.parquet_source import Row, Source
from quackmq.cli.text import progress_on_stderr
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Cluster
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import InvalidRequest, QuackError, UnknownTopic
from quackmq.model.offset_notes import NUMBER_PARTITION, publisher_group
from quackmq.model.partitioning import choose_partition

_NAME: Final = "import-"
#: Characters of the digest that are used as the name: enough to avoid collisions.
_DIGEST_CHARS: Final = 32

ShowProgress = Callable[[int, int], None]


def run(args: argparse.Namespace) -> int:
    """Run the import. Raises InvalidRequest for invalid files or names, QuackError if the import
    fails."""
    source = Source.open(args.source, progress_on_stderr())
    group = publisher_group(args.name or f"{_NAME}{source.digest[:_DIGEST_CHARS]}")
    if len(group.encode()) > shared_limits.NAME_BYTES:
        raise InvalidRequest(f"the name is longer than {shared_limits.NAME_BYTES} bytes")
    topic = _find_or_create_topic(args.broker, args.topic, source, by_key=args.by_key)
    # A failure is reported as one sentence; keep aiokafka from logging it, too.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    importer = Importer(args.broker, topic, group, by_key=args.by_key or not source.partitions)
    earlier_count = asyncio.run(importer.put(source, progress_on_stderr("records")))
    print(
        f"{source.rows - earlier_count} records imported into {topic.name}, {earlier_count} were "
        "already there"
    )
    return 0


def _find_or_create_topic(address: str, name: str, source: Source, *, by_key: bool) -> TopicInfo:
    """Return the topic; create it with as many partitions as the records name. Raises
    InvalidRequest if it has fewer."""
    cluster = Cluster(KafkaConfig(address))
    required_partitions = 0 if by_key else source.partitions
    deadline = Deadline(limits.IMPORT_WAIT_MS / 1000)
    try:
        topic = cluster.topic(name, deadline)
    except UnknownTopic:
        # -1: the default number of partitions of the broker.
        cluster.create_topic(name, required_partitions or -1, {}, deadline)
        topic = cluster.topic(name, deadline)
    if topic.partitions < required_partitions:
        raise InvalidRequest(
            f"topic {name} has {topic.partitions} partitions, but the records have "
            f"{required_partitions}: add partitions to the topic, or use --by-key"
        )
    return topic


class Importer:
    """Put records into one topic under one name. Only one run at a time: a new run fences an
    earlier one."""

    def __init__(self, address: str, topic: TopicInfo, group: str, *, by_key: bool) -> None:
        self._address = address
        self._topic = topic
        self._group = group
        self._by_key = by_key
        deadline = Deadline(limits.IMPORT_WAIT_MS / 1000)
        self._partitioner = (
            Cluster(KafkaConfig(address)).key_partitioner(topic.name, deadline).partitioner
        )

    async def put(self, source: Source, show_progress: ShowProgress) -> int:
        """Put all records that the topic does not have; return how many it already had. A
        QuackError says how many it has now."""
        earlier_count = imported_count = 0
        producer = self._make_producer()
        try:
            await producer.start()  # aborts an open transaction of an earlier run
            earlier_count = imported_count = await asyncio.to_thread(self._fetch_imported_count)
            if imported_count > source.rows:
                raise InvalidRequest(
                    f"{imported_count} records were imported under the name {self._group}, but the "
                    f"source has only {source.rows}: the name was used for other records"
                )
            for chunk in _split_into_transactions(source.records(imported_count)):
                await self._commit_chunk(producer, chunk, imported_count)
                imported_count += len(chunk)
                show_progress(imported_count, source.rows)
        except ProducerFenced as error:
            raise QuackError(
                "another import of the same records has started; only one can run at a time"
            ) from error
        except (KafkaError, OSError) as error:
            raise QuackError(
                f"{error or type(error).__name__}: {imported_count} of {source.rows} records are "
                "imported; run the command again to continue"
            ) from error
        finally:
            await producer.stop()
        return earlier_count

    def _make_producer(self) -> Any:
        """Return a new transactional producer. The name of the import is its transactional id, so a
        new run fences an earlier one."""
        return AIOKafkaProducer(
            bootstrap_servers=self._address,
            transactional_id=self._group,
            compression_type="zstd",
            max_batch_size=limits.IMPORT_BATCH_BYTES,
            max_request_size=shared_limits.BATCH_BYTES,
            request_timeout_ms=limits.IMPORT_WAIT_MS,
            # Longer than a single request may take, so that a slow request does not abort its
            # transaction.
            transaction_timeout_ms=2 * limits.IMPORT_WAIT_MS,
        )

    def _fetch_imported_count(self) -> int:
        """Return how many of the records the topic already has."""
        deadline = Deadline(limits.IMPORT_WAIT_MS / 1000)
        offsets = Cluster(KafkaConfig(self._address)).committed(self._group, self._topic, deadline)
        number = offsets.get(NUMBER_PARTITION)
        return 0 if number is None else number.offset

    async def _commit_chunk(self, producer: Any, chunk: Sequence[Row], imported_count: int) -> None:
        """Put the rows and the new number of imported records in one transaction.
        `imported_count` is the number before it."""
        async with producer.transaction():
            sent = []
            for partition, rows in self._group_by_partition(chunk, imported_count).items():
                for batch in _build_batches(producer, rows):
                    sent.append(
                        await producer.send_batch(batch, self._topic.name, partition=partition)
                    )
            await asyncio.gather(*sent)
            number_position = TopicPartition(self._topic.name, NUMBER_PARTITION)
            number = OffsetAndMetadata(imported_count + len(chunk), "")
            await producer.send_offsets_to_transaction({number_position: number}, self._group)

    def _group_by_partition(
        self, chunk: Sequence[Row], imported_count: int
    ) -> dict[int, list[Row]]:
        """Group the rows by partition, each in order. `imported_count` is the number of the
        first row."""
        rows_by_partition: dict[int, list[Row]] = {}
        for number, row in enumerate(chunk, imported_count):
            rows_by_partition.setdefault(self._choose_partition(row, number), []).append(row)
        return rows_by_partition

    def _choose_partition(self, row: Row, number: int) -> int:
        """Return the partition of a row: the one that it had, unless its key decides. `number`
        counts the rows of the source."""
        if not self._by_key and row.partition is not None:
            return row.partition
        chosen = choose_partition(self._partitioner, row.key, self._topic.partitions)
        # A record without a key goes by its number. So a repeated transaction chooses the same
        # partitions.
        return number % self._topic.partitions if chosen is None else chosen


def _split_into_transactions(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Divide rows into chunks that are small enough for one transaction each; yield the chunks."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row.key or b"") + len(row.value or b"")
        size += sum(len(name) + len(value or b"") for name, value in row.headers)
        if len(chunk) == limits.IMPORT_RECORDS or size >= limits.IMPORT_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _build_batches(producer: Any, rows: Sequence[Row]) -> Iterator[Any]:
    """Yield batches with all rows of one partition, in order."""
    batch = producer.create_batch()
    for row in rows:
        if not _append_row(batch, row):
            yield batch
            batch = producer.create_batch()
            _append_row(batch, row)  # the first always fits
    yield batch


def _append_row(batch: Any, row: Row) -> bool:
    appended = batch.append(
        timestamp=row.timestamp_ms, key=row.key, value=row.value, headers=row.headers
    )
    return appended is not None
