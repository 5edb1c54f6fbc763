"""Reads batches that are no longer in memory, by the index of `quackmq.batches`.

Reads have sessions of their own, so that they do not wait for a commit. A read whose session has
ended is tried once more in a new session.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from crc32c import crc32c

from quackmq.errors import DamagedData, InternalError
from quackmq.model.topic import AbortedTransaction, OffsetTime, TimeKind
from quackmq.records.batch import batches, cut
from quackmq.stores import limits
from quackmq.stores.postgres.connection import (
    DRIVER_ERRORS,
    Address,
    Session,
    ends_session,
    open_session,
    translate_error,
)
from quackmq.stores.postgres.log import PostgresLog

#: The row with an offset, or the next one if the offset is in a gap.
_FIRST_ROW = """
    select base_offset, position from (
        (
            select base_offset, next_offset, position from quackmq.batches
            where topic_id = $1 and partition = $2 and base_offset <= $3
            order by base_offset desc limit 1
        )
        union all
        (
            select base_offset, next_offset, position from quackmq.batches
            where topic_id = $1 and partition = $2 and base_offset > $3
            order by base_offset limit 1
        )
    ) as found
    where next_offset > $3
    order by base_offset limit 1
"""
_READ = f"""
    with first as materialized ({_FIRST_ROW})
    select batch.base_offset, batch.next_offset, batch.checksum, batch.data
    from quackmq.batches as batch, first
    where batch.topic_id = $1 and batch.partition = $2 and batch.base_offset >= first.base_offset
        and batch.base_offset < $4
        and (batch.position < first.position + $5 or batch.base_offset = first.base_offset)
    order by batch.base_offset
    limit $6
"""
#: The last row before or at an offset: its offset, its times, and the position after it.
_ROW_AT = """
    select base_offset, next_offset, append_ms, greatest_timestamp_ms
    from quackmq.batches
    where topic_id = $1 and partition = $2 and base_offset <= $3
    order by base_offset desc limit 1
"""


class Reader:
    """Reads of all partitions. Not thread-safe: call from the event loop."""

    def __init__(self, address: Address, owner_id: uuid.UUID) -> None:
        self._address = address
        self._owner_id = owner_id
        self._idle: list[Session] = []
        self._free = asyncio.Semaphore(limits.READ_SESSIONS)
        self._lent: set[Session] = set()

    async def read(
        self, log: PostgresLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[memoryview, ...]:
        """Return whole batches from the one with `offset` on, as `Medium.read` does. Raises
        DamagedData, StorageError."""
        rows = await self.fetch(
            _READ,
            *(*log.key, offset, log.high_watermark, max(max_bytes, 1), limits.READ_ROWS),
        )
        pieces: list[memoryview] = []
        room = max_bytes
        for row in rows:
            data = row["data"]
            if crc32c(data) != row["checksum"]:
                if pieces:
                    break
                raise DamagedData(
                    f"the row of partition {log.key.partition} of topic {log.key.topic_id} at "
                    f"offset {row['base_offset']} is damaged in {self._address}",
                    row["next_offset"],
                )
            first_room = 0 if pieces else first_max_bytes
            piece, is_complete = cut(memoryview(data), offset, room, first_room)
            if len(piece):
                pieces.append(piece)
            room -= len(piece)
            if not is_complete or room <= 0:
                break
        return tuple(pieces)

    async def find_aborted(
        self, log: PostgresLog, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        """Return the aborted transactions with records in [first, last], by first offset."""
        rows = await self.fetch(
            """
            select producer_id, first_offset, last_offset from quackmq.aborted_transactions
            where topic_id = $1 and partition = $2 and last_offset >= $3 and first_offset <= $4
            order by first_offset
            """,
            *(*log.key, first, last),
        )
        return tuple(AbortedTransaction(*row) for row in rows)

    async def offset_for_time(
        self, log: PostgresLog, time_ms: int, kind: TimeKind
    ) -> OffsetTime | None:
        """Return the first batch with a time, as `Store.offset_for_time` does. Both times never
        decrease from row to row, so the row is found by bisection."""
        column = "append_ms" if kind == "append" else "greatest_timestamp_ms"
        low, high = log.first_offset, log.high_watermark
        found: Any = None
        while low < high:
            middle = (low + high) // 2
            rows = await self.fetch(_ROW_AT, *(*log.key, middle))
            if rows and rows[0][column] >= time_ms:
                found = rows[0]
                high = min(middle, found["base_offset"])
            else:
                low = max(middle + 1, rows[0]["next_offset"] if rows else 0)
        if found is None:
            return None
        if kind == "append":
            return OffsetTime(max(found["base_offset"], log.first_offset), found["append_ms"])
        return await self._first_batch_with(log, found["base_offset"], time_ms)

    async def append_times(self, log: PostgresLog, first: int, next: int) -> list[OffsetTime]:
        """Return (offset, append time) of the rows in [first, next)."""
        first, next = max(first, log.first_offset), min(next, log.high_watermark)
        if next <= first:
            return []
        rows = await self.fetch(
            """
            select base_offset, append_ms from quackmq.batches
            where topic_id = $1 and partition = $2 and base_offset < $4 and next_offset > $3
                and base_offset >= coalesce((
                    select base_offset from quackmq.batches
                    where topic_id = $1 and partition = $2 and base_offset <= $3
                    order by base_offset desc limit 1
                ), 0)
            order by base_offset
            """,
            *(*log.key, first, next),
        )
        return [OffsetTime(max(row[0], first), row[1]) for row in rows]

    async def least_bytes_between(self, log: PostgresLog, first: int, next: int) -> int:
        """Return the bytes of the rows that lie wholly in [first, next)."""
        rows = await self.fetch(
            """
            select
                (
                    select position from quackmq.batches
                    where topic_id = $1 and partition = $2 and base_offset >= $3
                    order by base_offset limit 1
                ) as first_position,
                (
                    select case when next_offset <= $4
                        then position + octet_length(data) else position end
                    from quackmq.batches
                    where topic_id = $1 and partition = $2 and base_offset < $4
                    order by base_offset desc limit 1
                ) as next_position
            """,
            *(*log.key, max(first, log.first_offset), min(next, log.high_watermark)),
        )
        first_position: int | None = rows[0]["first_position"]
        next_position: int | None = rows[0]["next_position"]
        if first_position is None or next_position is None:
            return 0
        return max(0, next_position - first_position)

    async def fetch(self, query: str, *arguments: Any) -> Sequence[Any]:
        """Return the rows of a query, in a session of its own. Raises StorageError."""
        async with self._free:
            for is_last_try in (False, True):
                session = self._idle.pop() if self._idle else None
                try:
                    if session is None or session.is_closed():
                        session = await open_session(self._address, self._owner_id)
                    self._lent.add(session)
                    async with asyncio.timeout(limits.COMMIT_S):
                        rows: Sequence[Any] = await session.fetch(query, *arguments)
                except DRIVER_ERRORS as error:
                    self._drop(session)
                    if is_last_try or not ends_session(error):
                        raise translate_error(error, self._address) from error
                except BaseException:
                    self._drop(session)
                    raise
                else:
                    self._lent.discard(session)
                    self._idle.append(session)
                    return rows
        raise InternalError("a read has neither returned nor raised")

    def close(self) -> None:
        """End all sessions."""
        for session in (*self._idle, *self._lent):
            session.terminate()
        self._idle.clear()

    def _drop(self, session: Session | None) -> None:
        """End a session that may be in the middle of something."""
        if session is not None:
            self._lent.discard(session)
            session.terminate()

    async def _first_batch_with(
        self, log: PostgresLog, offset: int, time_ms: int
    ) -> OffsetTime | None:
        """Return the first batch from an offset on whose greatest timestamp is `time_ms` or later.
        Unless timestamps went back before a trim, it is in the first row."""
        while True:
            rows = await self.fetch(
                """
                select next_offset, data from quackmq.batches
                where topic_id = $1 and partition = $2 and base_offset >= $3
                    and max_timestamp_ms >= $4
                order by base_offset limit 1
                """,
                *(*log.key, offset, time_ms),
            )
            if not rows:
                return None
            for batch in batches(rows[0]["data"]):
                if batch.max_timestamp >= time_ms and batch.next_offset > log.first_offset:
                    return OffsetTime(max(batch.base_offset, log.first_offset), batch.max_timestamp)
            # The batch was trimmed, the rest of its row is not.
            offset = rows[0]["next_offset"]
