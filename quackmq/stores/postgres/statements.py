"""The statements that write one cycle, and the rows that they write.

A cycle of a few small batches is one statement and so one round trip: a transaction by itself
(`append_rows`). It begins with the fence of `ownership`. A cycle with large batches or with other
changes is a transaction of several statements, of which that one is the first.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import orjson
from crc32c import crc32c

from quackmq.model.producer_state import Producer
from quackmq.stores.catalog import Change, CursorSet, StateSet, TopicDeleted, TopicPut
from quackmq.stores.core.chunk import Chunk
from quackmq.stores.core.pending import EncodedChange
from quackmq.stores.postgres.connection import Address, Session
from quackmq.stores.postgres.log import PostgresLog
from quackmq.stores.postgres.ownership import FENCE, Cycle, fenced_error

Row = tuple[Any, ...]

#: The columns of `quackmq.batches`, in the order of `AppendedRows.batches`.
BATCH_COLUMNS: Final = (
    *("topic_id", "partition", "base_offset", "next_offset", "position", "append_ms"),
    *("max_timestamp_ms", "greatest_timestamp_ms", "checksum", "data"),
)
_BATCH_TYPES: Final = ("uuid", "int", *["bigint"] * 7, "bytea")
_PARTITION_TYPES: Final = ("uuid", "int", *["bigint"] * 5)
_PRODUCER_TYPES: Final = ("uuid", "int", "bigint", "int", "bigint", "bigint", "jsonb")
_ABORTED_TYPES: Final = ("uuid", "int", *["bigint"] * 3)


def _unnest(first_parameter: int, types: Sequence[str]) -> str:
    """Return a table of array parameters, one per column."""
    arrays = (f"${number}::{kind}[]" for number, kind in enumerate(types, start=first_parameter))
    return f"unnest({', '.join(arrays)})"


_BATCHES_AT: Final = 5
_PARTITIONS_AT: Final = _BATCHES_AT + len(_BATCH_TYPES)
_PRODUCERS_AT: Final = _PARTITIONS_AT + len(_PARTITION_TYPES)
_ABORTED_AT: Final = _PRODUCERS_AT + len(_PRODUCER_TYPES)

_APPEND: Final = f"""
with {FENCE},
cycle as (
    update quackmq.last_cycle set run_epoch = $3, cycle = $4, committed_at = clock_timestamp()
    where exists (select from mine)
),
batches as (
    insert into quackmq.batches ({", ".join(BATCH_COLUMNS)})
    select * from {_unnest(_BATCHES_AT, _BATCH_TYPES)} where exists (select from mine)
),
partitions as (
    insert into quackmq.partitions (
        topic_id, partition, next_offset, next_position, greatest_timestamp_ms, latest_append_ms,
        last_aborted_offset
    )
    select * from {_unnest(_PARTITIONS_AT, _PARTITION_TYPES)} where exists (select from mine)
    on conflict (topic_id, partition) do update set
        next_offset = excluded.next_offset,
        next_position = excluded.next_position,
        greatest_timestamp_ms = excluded.greatest_timestamp_ms,
        latest_append_ms = excluded.latest_append_ms,
        last_aborted_offset = excluded.last_aborted_offset
),
producers as (
    insert into quackmq.producers (
        topic_id, partition, producer_id, producer_epoch, last_append_ms, transaction_offset,
        batches
    )
    select * from {_unnest(_PRODUCERS_AT, _PRODUCER_TYPES)} where exists (select from mine)
    on conflict (topic_id, partition, producer_id) do update set
        producer_epoch = excluded.producer_epoch,
        last_append_ms = excluded.last_append_ms,
        transaction_offset = excluded.transaction_offset,
        batches = excluded.batches
),
aborted as (
    insert into quackmq.aborted_transactions (
        topic_id, partition, producer_id, first_offset, last_offset
    )
    select * from {_unnest(_ABORTED_AT, _ABORTED_TYPES)} where exists (select from mine)
)
select count(*) from mine
"""

_TRIM: Final = """
update quackmq.partitions as partition set
    first_offset = trimmed.before,
    first_position = coalesce(
        (
            select
                case when batch.next_offset > trimmed.before
                    then batch.position else batch.position + octet_length(batch.data)
                end
            from quackmq.batches as batch
            where batch.topic_id = trimmed.topic_id and batch.partition = trimmed.partition
                and batch.base_offset <= trimmed.before
            order by batch.base_offset desc
            limit 1
        ),
        partition.first_position
    )
from unnest($1::uuid[], $2::int[], $3::bigint[]) as trimmed (topic_id, partition, before)
where partition.topic_id = trimmed.topic_id and partition.partition = trimmed.partition
returning partition.topic_id, partition.partition, partition.first_position
"""


class AppendedRows(NamedTuple):
    """The rows that the batches of one cycle make."""

    batches: list[Row]
    partitions: list[Row]
    producers: list[Row]
    aborted: list[Row]


def rows_of(chunks: Iterable[tuple[PostgresLog, Sequence[Chunk]]]) -> AppendedRows:
    """Return the rows of a cycle's chunks. Changes nothing: the chunks are not committed yet."""
    rows = AppendedRows([], [], [], [])
    for log, appended in chunks:
        if appended:
            _add_rows(rows, log, appended)
    return rows


def _add_rows(rows: AppendedRows, log: PostgresLog, chunks: Sequence[Chunk]) -> None:
    """Add the rows of one partition."""
    key = log.key
    position, greatest_timestamp_ms = log.next_position, log.greatest_timestamp_ms
    states: dict[int, Producer] = {}
    for chunk in chunks:
        data = chunk.data
        greatest_timestamp_ms = max(greatest_timestamp_ms, chunk.max_timestamp_ms)
        rows.batches.append(
            (*key, chunk.base_offset, chunk.next_offset, position)
            + (chunk.append_time_ms, chunk.max_timestamp_ms, greatest_timestamp_ms)
            + (crc32c(data), data)
        )
        position += len(data)
        # A later state of a producer replaces an earlier one.
        states.update(chunk.producers or {})
    aborted = log.aborted_by(chunks)
    rows.aborted.extend((*key, *each) for each in aborted)
    rows.partitions.append(
        (*key, chunk.next_offset, position, greatest_timestamp_ms, chunk.append_time_ms)
        + (aborted[-1].last_offset if aborted else log.last_aborted_offset,)
    )
    rows.producers.extend(
        (*key, state.producer_id, state.epoch, state.last_append_ms, state.transaction_offset)
        + (remembered_json(state),)
        for state in states.values()
    )


def remembered_json(producer: Producer) -> str:
    """Return the last batches of a producer, as its row has them."""
    return orjson.dumps([tuple(batch) for batch in producer.batches]).decode()


async def append_rows(
    session: Session,
    address: Address,
    owner_id: uuid.UUID,
    epoch: int,
    cycle: Cycle,
    rows: AppendedRows,
) -> None:
    """Fence a cycle and write its rows, in one statement. Raises StoreFenced, and writes nothing,
    if another broker is the owner or the owner has a newer epoch."""
    is_mine = await session.fetchval(
        _APPEND,
        *(owner_id, epoch, *cycle),
        *_columns(rows.batches, len(_BATCH_TYPES)),
        *_columns(rows.partitions, len(_PARTITION_TYPES)),
        *_columns(rows.producers, len(_PRODUCER_TYPES)),
        *_columns(rows.aborted, len(_ABORTED_TYPES)),
    )
    if not is_mine:
        raise fenced_error(address)


async def copy_batches(session: Session, batches: Sequence[Row]) -> None:
    """Write batches by COPY, which takes less time than `append_rows` if they are large."""
    await session.copy_records_to_table(
        "batches", schema_name="quackmq", columns=BATCH_COLUMNS, records=batches
    )


async def write_changes(session: Session, changes: Iterable[EncodedChange]) -> None:
    """Write changes of the catalog, in their order."""
    for kind, group in groupby(changes, key=lambda change: type(change[0])):
        await _WRITERS[kind](session, list(group))


async def write_trims(
    session: Session, trims: Iterable[tuple[PostgresLog, int]]
) -> dict[PostgresLog, int]:
    """Write the new first offset of each log; return the position of the first batch that is
    left."""
    before_by_log: dict[PostgresLog, int] = {}
    for log, before in trims:
        before_by_log[log] = max(before, before_by_log.get(log, 0))
    rows = [(*log.key, before) for log, before in before_by_log.items()]
    written = await session.fetch(_TRIM, *_columns(rows, 3))
    positions = {(row[0], row[1]): row[2] for row in written}
    return {log: positions.get(log.key, log.first_position) for log in before_by_log}


async def _write_topics(session: Session, changes: Sequence[EncodedChange]) -> None:
    # One after the other: a topic may be created and altered in one cycle.
    await session.executemany(
        """
        insert into quackmq.topic_settings (topic_id, name, partitions, policy, created_ms)
        values ($1, $2, $3, $4, $5)
        on conflict (topic_id) do update set
            partitions = excluded.partitions, policy = excluded.policy
        """,
        [_topic_row(encoded) for _, encoded in changes],
    )


def _topic_row(encoded: bytes) -> Row:
    """Return the row of a topic, from the JSON that `catalog` draws."""
    _, topic_id, name, partitions, policy, created_ms = orjson.loads(encoded)
    return uuid.UUID(topic_id), name, partitions, orjson.dumps(policy).decode(), created_ms


async def _delete_topics(session: Session, changes: Sequence[EncodedChange]) -> None:
    """Delete topics with their cursors and producers. Their batches are removed later."""
    ids = [change.topic_id for change, _ in changes if isinstance(change, TopicDeleted)]
    for table in ("topic_settings", "cursors", "producers", "aborted_transactions"):
        await session.execute(f"delete from quackmq.{table} where topic_id = any($1)", ids)
    await session.execute(
        "update quackmq.partitions set is_deleted = true where topic_id = any($1)", ids
    )


async def _write_cursors(session: Session, changes: Sequence[EncodedChange]) -> None:
    cursors = {change.cursor.key: change.cursor for change, _ in changes}  # type: ignore[union-attr]
    removed = [_cursor_key(*key) for key, cursor in cursors.items() if cursor.offset is None]
    if removed:
        await session.execute(
            """
            delete from quackmq.cursors as cursor
            using unnest($1::text[], $2::uuid[], $3::int[]) as removed (name, topic_id, partition)
            where cursor.name = removed.name and cursor.topic_id = removed.topic_id
                and cursor.partition = removed.partition
            """,
            *_columns(removed, 3),
        )
    kept = [
        _cursor_key(*cursor.key)
        + (cursor.offset, to_text(cursor.metadata), cursor.updated_ms, cursor.leader_epoch)
        for cursor in cursors.values()
        if cursor.offset is not None
    ]
    if kept:
        types = ("text", "uuid", "int", "bigint", "text", "bigint", "int")
        await session.execute(
            f"""
            insert into quackmq.cursors (
                name, topic_id, partition, next_offset, metadata, updated_ms, leader_epoch
            )
            select * from {_unnest(1, types)}
            on conflict (name, topic_id, partition) do update set
                next_offset = excluded.next_offset,
                metadata = excluded.metadata,
                updated_ms = excluded.updated_ms,
                leader_epoch = excluded.leader_epoch
            """,
            *_columns(kept, len(types)),
        )


def _cursor_key(name: str, topic_id: uuid.UUID, partition: int) -> Row:
    return to_text(name), topic_id, partition


async def _write_states(session: Session, changes: Sequence[EncodedChange]) -> None:
    states = {to_text(change.key): change.state for change, _ in changes}  # type: ignore[union-attr]
    removed = [key for key, state in states.items() if state.value is None]
    if removed:
        await session.execute("delete from quackmq.states where key = any($1)", removed)
    kept = [
        (key, state.value, state.version)
        for key, state in states.items()
        if state.value is not None
    ]
    if kept:
        await session.execute(
            f"""
            insert into quackmq.states (key, value, version)
            select * from {_unnest(1, ("text", "bytea", "bigint"))}
            on conflict (key) do update set value = excluded.value, version = excluded.version
            """,
            *_columns(kept, 3),
        )


_WRITERS: Final[dict[type[Change], Any]] = {
    TopicPut: _write_topics,
    TopicDeleted: _delete_topics,
    CursorSet: _write_cursors,
    StateSet: _write_states,
}


def _columns(rows: Sequence[Row], count: int) -> list[Sequence[Any]]:
    """Return rows as columns; `count` empty ones if there are no rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[]] * count


def to_text(text: str) -> str:
    """Return a text that PostgreSQL can store: it has no character 0."""
    return text.replace("\\", "\\\\").replace("\0", "\\0")


def from_text(stored: str) -> str:
    """Return the text that `to_text` was given."""
    if "\\" not in stored:
        return stored
    parts = stored.split("\\\\")
    return "\\".join(part.replace("\\0", "\0") for part in parts)
