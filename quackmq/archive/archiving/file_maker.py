"""Builds a file of the archive from a partition's log: sequences of batches in, one file out.

A *piece* is a sequence of whole batches as a committed read of the log returns them: with markers,
and with the records of aborted transactions, which are listed beside it. The fate of each batch:

    a marker, or of an aborted transaction      left out; a gap in the offsets
    records                                     rows, by `quackmq.archive.parquet.from_batches`
    poison: it cannot be decoded                quarantined unchanged, and named in the manifest

A file's range ends after a record or a quarantined batch, never in a gap: batches after the last of
them stay in the log. So a read of any archived offset finds something.

Promised: memory is bounded by a file's own size, the quarantined batches, and the buffers of
`FileWriter`. `Progress.is_full` says when a bound is reached. All calls block: use a side thread or
a separate process.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from quackmq.archive import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.archiving.pieces import (
    BuiltFile,
    Piece,
    Progress,
    QuarantinedBatch,
    UnknownProducers,
)
from quackmq.archive.parquet.from_batches import Committed, FileWriter, PoisonBatch
from quackmq.errors import InternalError
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey
from quackmq.records.batch import Batch, batches


class FileMaker:
    """One file, from `first_offset` on. Use once. Not thread-safe."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._writer = FileWriter(key, topic, first_offset)
        self._first_offset = self._position = self._end = first_offset
        self._aside: list[tuple[bytes, str]] = []
        self._aside_bytes = 0

    def add(
        self, piece: Piece, publishers: Mapping[int, str | None]
    ) -> Progress | UnknownProducers:
        """Add a piece, or its beginning, until the file is full. `publishers` are the durable names
        of producers by id. If one is missing, nothing is added; the missing ids are returned."""
        found = [batch for batch in batches(piece.data) if batch.next_offset > piece.offset]
        kept = _committed(found, piece.aborted)
        unnamed = {batch.producer_id for batch in kept if batch.is_transactional}
        if missing := unnamed - publishers.keys():
            return UnknownProducers(frozenset(missing))
        entries = _entries(kept, piece.times, publishers)
        taken = 0
        while taken < len(entries) and not self._is_full:
            taken = self._take(entries, taken, piece.poison)
        if taken:
            self._end = entries[taken - 1].batch.next_offset
        if taken < len(entries):
            self._position = entries[taken].batch.base_offset
        elif found:
            self._position = found[-1].next_offset
        return Progress(self._position, self._end, self._is_full)

    def finish(self, version: int) -> BuiltFile:
        """Return the file for this version of the manifest. It must have content."""
        file, data = self._writer.finish(self._end, version)
        aside = []
        for raw, reason in self._aside:
            line = manifests.quarantined(Batch.peek(raw), version, reason)
            if line.first_offset < self._first_offset:  # the records before that were trimmed
                name = manifests.quarantine_name(self._first_offset, version)
                line = dataclasses.replace(line, name=name, first_offset=self._first_offset)
            aside.append(QuarantinedBatch(line, raw))
        return BuiltFile(file, data, tuple(aside))

    @property
    def _is_full(self) -> bool:
        return (
            self._writer.is_full
            or self._writer.size >= limits.ARCHIVE_NEW_FILE_BYTES
            or self._aside_bytes >= limits.ARCHIVE_ASIDE_BYTES
        )

    def _take(self, entries: Sequence[Committed], first: int, poison: str | None) -> int:
        """Add entries until the file is full or one is poison; return the index of the next one."""
        if poison is not None:
            self._put_aside(entries[first].batch, poison)
            return first + 1
        try:
            return first + self._writer.add(entries[first:] if first else entries)
        except PoisonBatch as error:
            offsets = [entry.batch.base_offset for entry in entries]
            index = offsets.index(error.base_offset)
            self._put_aside(entries[index].batch, error.reason)
            return index + 1

    def _put_aside(self, batch: Batch, reason: str) -> None:
        self._aside.append((bytes(batch.view), reason))
        self._aside_bytes += batch.size


def _committed(found: Sequence[Batch], aborted: Sequence[AbortedTransaction]) -> list[Batch]:
    """Leave out markers and aborted records."""
    some = [batch for batch in found if not batch.is_control]
    if not aborted:
        return some
    ranges: dict[int, list[AbortedTransaction]] = {}
    for one in aborted:
        ranges.setdefault(one.producer_id, []).append(one)
    return [
        batch
        for batch in some
        if not (batch.is_transactional and _is_aborted(batch, ranges.get(batch.producer_id, ())))
    ]


def _is_aborted(batch: Batch, aborted: Collection[AbortedTransaction]) -> bool:
    return any(one.first_offset <= batch.base_offset < one.last_offset for one in aborted)


def _entries(
    kept: Sequence[Batch], times: Sequence[OffsetTime], publishers: Mapping[int, str | None]
) -> list[Committed]:
    return [
        Committed(
            batch,
            time_ms,
            publishers[batch.producer_id] if batch.is_transactional else None,
        )
        for batch, time_ms in zip(kept, _times_of(kept, times), strict=True)
    ]


def _times_of(kept: Sequence[Batch], times: Sequence[OffsetTime]) -> list[int]:
    """Return when each batch was appended; if unknown, its latest timestamp."""
    if not times:
        return [max(batch.max_timestamp, 0) for batch in kept]
    starts = [time.offset for time in times]
    if any(left > right for left, right in pairwise(starts)):
        raise InternalError("append times of a log do not ascend by offset")
    indices = (bisect_right(starts, batch.base_offset) - 1 for batch in kept)
    return [times[max(index, 0)].timestamp_ms for index in indices]
