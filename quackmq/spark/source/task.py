"""The work of a task: read its pieces, one after the other, as rows for Spark.

A piece is read from its archived file if this machine has it, otherwise from the broker: the bytes
of the file or, for the log, raw batches, which are decoded here. If a range has moved since it was
planned (archived, merged), the task looks it up again by its offsets and continues: a file that
vanishes costs only time.

The task returns every committed record of the range once, in order, and no other. Lost records
(trimmed since the plan, damaged, or in a batch that cannot be decoded) fail the task with their
offsets, or are skipped with a warning if `failOnDataLoss` is false. Memory: two answers of the
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
from quackmq.spark.broker.archive import files_now
from quackmq.spark.broker.http import Access, Answer, Http, path_of
from quackmq.spark.source.archived_files import Unusable, read_here, read_there
from quackmq.spark.source.columns import Shaper
from quackmq.spark.source.rows import append_time_column, append_times, between, groups_of, opened
from quackmq.spark.source.splits import Piece, Range, pieces

log = logging.getLogger(__name__)

_GO_ON: Final = "Set failOnDataLoss to false to go on without it."
_TIMES: Final = "quackmq-append-times"


class _Moved(Exception):
    """From this offset on, the piece has moved since it was planned."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


@dataclass(frozen=True, slots=True)
class Reading:
    """The parameters of a task's reading; pickled with it."""

    access: Access
    schema: pa.Schema
    fail_on_data_loss: bool = True

    def read(self, wanted: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        with self.access.connect() as broker, ThreadPoolExecutor(1) as beside:
            task = _Task(self, broker, beside)
            for piece in wanted:
                for rows in task.read(piece):
                    for start in range(0, rows.num_rows, limits.SPARK_ROWS):
                        yield rows.slice(start, limits.SPARK_ROWS)


class _Task:
    def __init__(self, reading: Reading, broker: Http, beside: ThreadPoolExecutor) -> None:
        self._fails = reading.fail_on_data_loss
        self._shaper = Shaper(reading.schema)
        self._broker = broker
        #: A thread that fetches the next answer while the last one is decoded.
        self._beside = beside
        #: Durable names by producer id; None for a producer without one.
        self._publishers: dict[int, str | None] = {}

    def read(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read a piece from where it is now. Look it up again a limited number of times; after
        that, fetch batches from the broker, which serves all tiers."""
        waiting = [piece]
        finds = 0
        while waiting:
            part = waiting.pop(0)
            try:
                yield from self._read_as_planned(part, finds < limits.SPARK_FINDS)
            except _Moved as moved:
                finds += 1
                waiting[:0] = self._found(part, moved.at, finds < limits.SPARK_FINDS)

    def _read_as_planned(self, piece: Piece, may_move: bool) -> Iterator[pa.RecordBatch]:
        """Read a piece as planned. Raises _Moved with the offset up to which the rows are
        complete."""
        if piece.file is None:
            yield from self._read_log(piece, may_move)
            return
        for first, end in piece.file.lost:
            if first < piece.next and end > piece.first:
                self._lose(piece, first, end, "it was archived as a batch that cannot be opened")
        at = piece.first
        try:
            for rows in read_here(piece, at, self._shaper):
                yield rows.rows
                at = rows.next_offset
            return
        except Unusable as error:
            log.info("%s", error)
        try:
            for rows in read_there(piece, at, self._shaper, self._broker):
                yield rows.rows
                at = rows.next_offset
        except Unusable as error:
            log.info("%s", error)
            raise _Moved(at) from error

    def _found(self, piece: Piece, at: int, may_move: bool) -> list[Piece]:
        """Return the rest of a piece as pieces with their current places."""
        files = {}
        if may_move:
            key = (piece.topic, piece.partition)
            files = {key: files_now(self._broker, piece.topic, piece.topic_id).get(key, ())}
        rest = Range(piece.topic, piece.topic_id, piece.partition, at, piece.next)
        return pieces([rest], files)

    # --- the log ----------------------------------------------------------------------------

    def _read_log(self, piece: Piece, may_move: bool) -> Iterator[pa.RecordBatch]:
        at = piece.first
        coming = self._fetch(piece, at)
        while coming is not None:
            try:
                answer = coming.result()
            except OffsetOutOfRange as error:
                first = self._first_offset(piece, at, error)
                self._lose(piece, at, min(first, piece.next), "it is gone")
                at = first
                coming = self._fetch(piece, at)
                continue
            except UnknownTopic as error:
                if self._fails:
                    raise
                self._lose(piece, at, piece.next, str(error))
                return
            except DamagedData as error:
                if error.next_offset is None or error.next_offset <= at:
                    raise
                self._lose(piece, at, min(error.next_offset, piece.next), str(error))
                at = error.next_offset
                coming = self._fetch(piece, at)
                continue
            times = append_times(answer.headers.get(_TIMES, ""))
            if may_move and answer.body and (not times or times[0][0] > at):
                # The range has left the log for the archive.
                raise _Moved(at)
            begin, at = at, answer.next_offset or 0
            if at <= begin:
                raise QuackError(f"the broker has nothing at offset {begin} of {_name(piece)}")
            coming = self._fetch(piece, at)
            yield from self._open(piece, answer, begin, times)

    def _fetch(self, piece: Piece, offset: int) -> Future[Answer] | None:
        """The batches from an offset on, as they come; None behind the last."""
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
        return self._beside.submit(self._broker.ask, "GET", path, query=query)

    def _first_offset(self, piece: Piece, at: int, error: OffsetOutOfRange) -> int:
        """Return the partition's first offset now. An offset beyond its end belongs to another
        topic of this name."""
        found = self._broker.post("/v1/offsets", {"topics": [piece.topic]}).json["topics"]
        for topic in found:
            for partition in topic["partitions"]:
                if topic["id"] == piece.topic_id and partition["partition"] == piece.partition:
                    first = int(partition["first_offset"])
                    if first > at:
                        return first
        raise error

    # --- batches to rows --------------------------------------------------------------------

    def _open(
        self, piece: Piece, answer: Answer, begin: int, times: Sequence[tuple[int, int]]
    ) -> Iterator[pa.RecordBatch]:
        for group in groups_of(answer.body):
            found: Iterable[pa.RecordBatch]
            try:
                found = [opened(group)]
            except CorruptBatch:
                # One by one, because each may be large.
                found = self._open_each(piece, group, begin)
            for rows in found:
                rows = between(rows, begin, piece.next)
                if rows.num_rows:
                    yield self._shaped(piece, rows, times)

    def _open_each(
        self, piece: Piece, group: Sequence[Batch], begin: int
    ) -> Iterator[pa.RecordBatch]:
        for batch in group:
            try:
                yield opened([batch])
            except CorruptBatch as error:
                first, end = max(batch.base_offset, begin), min(batch.next_offset, piece.next)
                if first < end:
                    self._lose(piece, first, end, f"a batch that cannot be opened: {error}")

    def _shaped(
        self, piece: Piece, rows: pa.RecordBatch, times: Sequence[tuple[int, int]]
    ) -> pa.RecordBatch:
        columns: dict[str, Any] = {name: rows.column(name) for name in rows.schema.names}
        columns |= {"topic": piece.topic, "partition": piece.partition}
        if "append_time" in self._shaper.names:
            columns["append_time"] = append_time_column(columns["offset"], times)
        if "publisher" in self._shaper.names:
            columns["publisher"] = self._named(columns["producer_id"])
        return self._shaper.shape(columns, rows.num_rows)

    def _named(self, producer_ids: pa.Array) -> pa.Array | None:
        """Return the durable producer name of each row; None if there is none."""
        if producer_ids.null_count == len(producer_ids):
            return None
        ids = [each for each in pc.unique(producer_ids).to_pylist() if each is not None]
        unknown = [each for each in ids if each not in self._publishers]
        for start in range(0, len(unknown), shared_limits.HTTP_PAGE_ITEMS):
            some = unknown[start : start + shared_limits.HTTP_PAGE_ITEMS]
            told = self._ask({"producer_ids": some})
            names = {each["producer_id"]: each["name"] for each in told["publishers"]}
            self._publishers |= {each: names.get(each) for each in some}
        if all(self._publishers[each] is None for each in ids):
            return None
        known = pa.array(ids, pa.int64())
        names = pa.array([self._publishers[each] for each in ids], pa.string())
        return names.take(pc.index_in(producer_ids, known))

    def _ask(self, value: object) -> Any:
        """Send a request in the fetching thread, because only one thread may use the connection."""
        return self._beside.submit(self._broker.post, "/v1/publishers", value).result().json

    def _lose(self, piece: Piece, first: int, end: int, why: str) -> None:
        lost = f"offsets {first} to {end - 1} of {_name(piece)} cannot be read: {why}"
        if self._fails:
            raise DamagedData(f"{lost}. {_GO_ON}", end)
        log.warning("%s", lost)


def _name(piece: Piece) -> str:
    return f"partition {piece.partition} of topic {piece.topic}"
