"""Loads everything but the batches when a store opens: the catalog and the logs' offsets."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import orjson

from quackmq.errors import DamagedStore
from quackmq.model.producer_state import NO_TRANSACTION, Producer, RememberedBatch
from quackmq.model.topic import NO_LEADER_EPOCH, PartitionKey
from quackmq.stores.catalog import Catalog
from quackmq.stores.core.medium import Loaded
from quackmq.stores.postgres.connection import Address, Session, translated_errors
from quackmq.stores.postgres.log import PostgresLog
from quackmq.stores.postgres.statements import from_text


async def load(
    session: Session, address: Address, epoch: int, chunk_bytes: int, forget_before_ms: int
) -> Loaded:
    """Load the store of the owner with this epoch. Leaves out producers that were last active at
    `forget_before_ms` or before, and deletes their rows. Raises StorageError."""
    with translated_errors(address):
        async with session.transaction(isolation="repeatable_read"):
            await session.execute(
                "delete from quackmq.producers where last_append_ms <= $1 "
                "and transaction_offset = $2",
                *(forget_before_ms, NO_TRANSACTION),
            )
            catalog = await _load_catalog(session)
            logs = {
                key: PostgresLog(key, epoch, chunk_bytes)
                for topic in catalog.topics_by_id.values()
                for key in (PartitionKey(topic.id, number) for number in range(topic.partitions))
            }
            latest_append_ms = await _load_logs(session, logs)
            await _load_producers(session, logs)
    return Loaded(catalog, logs, epoch, latest_append_ms)


async def _load_catalog(session: Session) -> Catalog:
    """Return the topics, cursors and states. Raises DamagedStore."""
    rows: list[list[Any]] = []
    for topic in await session.fetch(
        "select topic_id, name, partitions, policy, created_ms from quackmq.topic_settings"
    ):
        topic_id, name, partitions, policy, created_ms = topic
        policy = orjson.loads(policy)
        rows.append(["topic", topic_id.hex, name, partitions, policy, created_ms])
    for cursor in await session.fetch(
        "select name, topic_id, partition, next_offset, metadata, updated_ms, leader_epoch "
        "from quackmq.cursors"
    ):
        name, topic_id, partition, offset, metadata, updated_ms, epoch = cursor
        row = ["cursor", from_text(name), topic_id.hex, partition, offset, from_text(metadata)]
        row.append(updated_ms)
        rows.append(row if epoch == NO_LEADER_EPOCH else [*row, epoch])
    for key, value, version in await session.fetch(
        "select key, value, version from quackmq.states"
    ):
        rows.append(["state", from_text(key), base64.b64encode(value).decode("ascii"), version])
    return Catalog.from_snapshot(rows)


async def _load_logs(session: Session, logs: dict[PartitionKey, PostgresLog]) -> int:
    """Set the offsets and positions of the logs; return the latest append time."""
    latest_append_ms = 0
    for row in await session.fetch("select * from quackmq.partitions where not is_deleted"):
        log = logs.get(PartitionKey(row["topic_id"], row["partition"]))
        if log is None:
            raise DamagedStore(
                f"quackmq.partitions has partition {row['partition']} of an unknown topic "
                f"{row['topic_id']}"
            )
        log.first_offset = row["first_offset"]
        log.high_watermark = log.end_offset = row["next_offset"]
        log.first_position = row["first_position"]
        log.next_position = row["next_position"]
        log.greatest_timestamp_ms = row["greatest_timestamp_ms"]
        log.last_aborted_offset = row["last_aborted_offset"]
        latest_append_ms = max(latest_append_ms, row["latest_append_ms"])
    return latest_append_ms


async def _load_producers(session: Session, logs: dict[PartitionKey, PostgresLog]) -> None:
    """Restore the producers of the logs, the longest silent first."""
    states: dict[PartitionKey, list[Producer]] = {}
    for row in await session.fetch(
        "select topic_id, partition, producer_id, producer_epoch, batches, last_append_ms, "
        "transaction_offset from quackmq.producers order by last_append_ms"
    ):
        topic_id, partition, producer_id, epoch, batches, last_append_ms, offset = row
        remembered = _remembered(orjson.loads(batches))
        states.setdefault(PartitionKey(topic_id, partition), []).append(
            Producer(producer_id, epoch, remembered, last_append_ms, offset)
        )
    for key, producers in states.items():
        if key in logs:
            logs[key].restore(producers)


def _remembered(batches: Iterable[Iterable[int]]) -> tuple[RememberedBatch, ...]:
    return tuple(RememberedBatch(*batch) for batch in batches)
