"""The work of a task: read its pieces, one after the other, as rows for Spark.

A piece is read from its archived file if this machine has it, otherwise from the broker: the bytes
of the file or, for the log, raw batches, which are decoded here. If a range has moved since it was
planned (archived, merged), the task looks it up again by its offsets and continues: a file that
vanishes costs only time.

The task returns every committed record of the range once, in order, and no other. Lost records
(deleted since the plan, damaged, or in a batch that cannot be decoded) fail the task with their
offsets, or are skipped with a warning if `failOnDataLoss` is false. Memory: two responses of the
broker, and one decoded group of batches or one row group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quackmq import limits as shared_limits
from quackmq.errors import CorruptBatch, DamagedData, OffsetOutOfRange, QuackError, UnknownTopic
from quackmq.records.batch import Batch
from quackmq.spark import limits
from quackmq.spark.broker.archive import list_current_files
from quackmq.spark.broker.http import Access, Http, Response, path_of
from quackmq.spark.source.archived_files import Unusable, read_from_disk, read_over_http
from quackmq.spark.source.columns import Shaper
from quackmq.spark.source.rows import (
    AppendTime,
    append_time_column,
    cut_rows,
    decode_group,
    group_batches,
    parse_append_times,
)
from quackmq.spark.source.splits import Piece, Range, plan_pieces

log = logging.getLogger(__name__)

_SKIP_HINT: Final = "Set failOnDataLoss to false to skip these records."
_APPEND_TIMES_HEADER: Final = "quackmq-append-times"


class _PieceMoved(Exception):
    """The piece was archived or merged since it was planned; read it elsewhere from `offset` on."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


@dataclass(frozen=True, slots=True)
class TaskReader:
    """Reads the pieces of a task. Spark sends a reader to its task."""

    access: Access
    schema: pa.Schema
    fail_on_data_loss: bool = True

    def read(self, pieces: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all pieces, in chunks of at most `SPARK_ROWS`. Raise DamagedData for
        lost records, unless they are skipped."""
        with self.access.connect() as broker, ThreadPoolExecutor(1) as fetch_thread:
            task = _Task(self, broker, fetch_thread)
            for piece in pieces:
                for rows in task.read(piece):
                    for start in range(0, rows.num_rows, limits.SPARK_ROWS):
                        yield rows.slice(start, limits.SPARK_ROWS)


class _Task:
    """The state of one task while it reads. Not thread-safe: use it from one thread."""

    def __init__(self, reader: TaskReader, broker: Http, fetch_thread: ThreadPoolExecutor) -> None:
        self._fail_on_data_loss = reader.fail_on_data_loss
        self._shaper = Shaper(reader.schema)
        self._broker = broker
        #: A thread that fetches the next response while the last one is decoded.
        self._fetch_thread = fetch_thread
        #: Durable names by producer id; None for a producer without one.
        self._publishers: dict[int, str | None] = {}

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece. If its records have moved, look them up again, a limited
        number of times; after that, fetch batches from the broker, which serves all tiers."""
        remaining = [piece]
        lookups = 0
        while remaining:
            part = remaining.pop(0)
            try:
                yield from self._read_once(part, lookups < limits.SPARK_LOOKUPS)
            except _PieceMoved as moved:
                lookups += 1
                remaining[:0] = self._find_again(part, moved.offset, lookups < limits.SPARK_LOOKUPS)

    def _read_once(self, piece: Piece, may_move: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece from the file or log that was planned. Raise _PieceMoved with
        the offset up to which the rows are complete."""
        if piece.file is None:
            yield from self._read_log(piece, may_move)
            return
        for first, end in piece.file.lost:
            if first < piece.next and end > piece.first:
                self._report_loss(
                    piece, first, end, "it was archived as a batch that cannot be opened"
                )
        offset = piece.first
        try:
            for rows in read_from_disk(piece, offset, self._shaper):
                yield rows.rows
                offset = rows.next_offset
            return
        except Unusable as error:
            log.info("%s", error)
        try:
            for rows in read_over_http(piece, offset, self._shaper, self._broker):
                yield rows.rows
                offset = rows.next_offset
        except Unusable as error:
            log.info("%s", error)
            raise _PieceMoved(offset) from error

    def _find_again(self, piece: Piece, offset: int, may_move: bool) -> list[Piece]:
        """Return the piece from `offset` on as pieces with the files that exist now."""
        files = {}
        if may_move:
            key = (piece.topic, piece.partition)
            files = {
                key: list_current_files(self._broker, piece.topic, piece.topic_id).get(key, ())
            }
        unread = Range(piece.topic, piece.topic_id, piece.partition, offset, piece.next)
        return plan_pieces([unread], files)

    # --- the log ----------------------------------------------------------------------------

    def _read_log(self, piece: Piece, may_move: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a piece from batches that the broker sends. With `may_move`, raise
        _PieceMoved if the records were archived since: the broker sends append times only for
        batches in the log, and an archive file has those of its records."""
        offset = piece.first
        next_response = self._fetch(piece, offset)
        while next_response is not None:
            try:
                response = next_response.result()
            except (OffsetOutOfRange, UnknownTopic, DamagedData) as error:
                offset = self._skip_lost(piece, offset, error)
                next_response = self._fetch(piece, offset)
                continue
            times = parse_append_times(response.headers.get(_APPEND_TIMES_HEADER, ""))
            if may_move and response.body and (not times or times[0].offset > offset):
                raise _PieceMoved(offset)  # the batch at `offset` has no append time
            if response.next_offset is None or response.next_offset <= offset:
                raise QuackError(f"the broker has nothing at offset {offset} of {_describe(piece)}")
            start, offset = offset, response.next_offset
            # Fetch the next response while Spark takes the rows of this one.
            next_response = self._fetch(piece, offset)
            yield from self._decode_response(piece, response, start, times)

    def _fetch(self, piece: Piece, offset: int) -> Future[Response] | None:
        """Start to fetch batches from an offset on; return None at the end of the piece."""
        if offset >= piece.next:
            return None
        path = path_of("topics", piece.topic, "partitions", piece.partition, "batches")
        query: dict[str, str | int] = {
            "offset": offset,
            "end": piece.next,
            "max_bytes": limits.SPARK_FETCH_BYTES,
            "topic_id": piece.topic_id,
            "append_times": "true",
        }
        return self._fetch_thread.submit(self._broker.request, "GET", path, query=query)

    def _skip_lost(
        self, piece: Piece, offset: int, error: OffsetOutOfRange | UnknownTopic | DamagedData
    ) -> int:
        """Report the records from `offset` on that an error says are lost; return the offset after
        them. Raise the error if it does not say where they end."""
        next_offset: int | None
        reason = str(error)
        if isinstance(error, OffsetOutOfRange):
            next_offset = self._first_offset(piece, offset, error)
            reason = "they were deleted"
        elif isinstance(error, UnknownTopic):
            if self._fail_on_data_loss:
                raise error  # it says more than `_report_loss` would
            next_offset = piece.next
        else:
            next_offset = error.next_offset
        if next_offset is None or next_offset <= offset:
            raise error
        self._report_loss(piece, offset, min(next_offset, piece.next), reason)
        return next_offset

    def _first_offset(self, piece: Piece, offset: int, error: OffsetOutOfRange) -> int:
        """Return the partition's first offset after records were deleted, if it is greater than
        `offset`. Otherwise deletion does not explain the error, so raise it: the topic was replaced
        by another of this name, or the partition ends before `offset`."""
        topics = self._broker.post("/v1/offsets", {"topics": [piece.topic]}).json["topics"]
        for topic in topics:
            for partition in topic["partitions"]:
                if topic["id"] == piece.topic_id and partition["partition"] == piece.partition:
                    first = int(partition["first_offset"])
                    if first > offset:
                        return first
        raise error

    # --- batches to rows --------------------------------------------------------------------

    def _decode_response(
        self, piece: Piece, response: Response, start: int, times: Sequence[AppendTime]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a response, from offset `start` to the end of the piece. The first and
        the last batch may hold records outside this range."""
        for group in group_batches(response.body):
            decoded: Iterable[pa.RecordBatch]
            try:
                decoded = [decode_group(group)]
            except CorruptBatch:
                # Decode one by one, because each may be large.
                decoded = self._decode_each(piece, group, start)
            for rows in decoded:
                rows = cut_rows(rows, start, piece.next)
                if rows.num_rows:
                    yield self._shape(piece, rows, times)

    def _decode_each(
        self, piece: Piece, group: Sequence[Batch], start: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of each batch by itself; report batches that cannot be decoded as
        lost."""
        for batch in group:
            try:
                yield decode_group([batch])
            except CorruptBatch as error:
                first, end = max(batch.base_offset, start), min(batch.next_offset, piece.next)
                if first < end:
                    self._report_loss(piece, first, end, f"a batch that cannot be opened: {error}")

    def _shape(
        self, piece: Piece, rows: pa.RecordBatch, times: Sequence[AppendTime]
    ) -> pa.RecordBatch:
        """Return the rows with the columns that Spark expects. Compute append times and publishers
        only if the query reads them."""
        columns: dict[str, Any] = {name: rows.column(name) for name in rows.schema.names}
        columns |= {"topic": piece.topic, "partition": piece.partition}
        if "append_time" in self._shaper.names:
            columns["append_time"] = append_time_column(columns["offset"], times)
        if "publisher" in self._shaper.names:
            columns["publisher"] = self._find_publishers(columns["producer_id"])
        return self._shaper.shape(columns, rows.num_rows)

    def _find_publishers(self, producer_ids: pa.Array) -> pa.Array | None:
        """Return the durable producer name of each row; None if no row has one."""
        if producer_ids.null_count == len(producer_ids):
            return None
        distinct_ids = [
            producer_id
            for producer_id in pc.unique(producer_ids).to_pylist()
            if producer_id is not None
        ]
        unknown_ids = [
            producer_id for producer_id in distinct_ids if producer_id not in self._publishers
        ]
        for start in range(0, len(unknown_ids), shared_limits.HTTP_PAGE_ITEMS):
            page = unknown_ids[start : start + shared_limits.HTTP_PAGE_ITEMS]
            response = self._fetch_publishers({"producer_ids": page})
            names = {each["producer_id"]: each["name"] for each in response["publishers"]}
            self._publishers |= {producer_id: names.get(producer_id) for producer_id in page}
        if all(self._publishers[producer_id] is None for producer_id in distinct_ids):
            return None
        distinct_column = pa.array(distinct_ids, pa.int64())
        names = pa.array(
            [self._publishers[producer_id] for producer_id in distinct_ids], pa.string()
        )
        return names.take(pc.index_in(producer_ids, distinct_column))

    def _fetch_publishers(self, producer_ids: object) -> Any:
        """Fetch producer names in the fetch thread, because only one thread may use the
        connection."""
        return (
            self._fetch_thread.submit(self._broker.post, "/v1/publishers", producer_ids)
            .result()
            .json
        )

    def _report_loss(self, piece: Piece, first: int, end: int, reason: str) -> None:
        message = f"offsets {first} to {end - 1} of {_describe(piece)} cannot be read: {reason}"
        if self._fail_on_data_loss:
            raise DamagedData(f"{message}. {_SKIP_HINT}", end)
        log.warning("%s", message)


def _describe(piece: Piece) -> str:
    return f"partition {piece.partition} of topic {piece.topic}"
