"""A file of the archive made of what a partition's log holds: runs of batches in, a file out.

A *piece* is a run of whole batches as a committed read of the log gives them: with markers in it,
and with the records of transactions that were aborted, which are told beside it. What becomes of
each batch:

    a marker, or of an aborted transaction      left out; a hole in the offsets
    records                                     rows, by `quackmq.archive.parquet.from_batches`
    poison: nobody can open it                  kept aside as it is, and named in the manifest

A file's range ends behind a record or a batch kept aside, never in a hole: what follows on the last
of them stays in the log, so that a read of any archived offset finds something.

Promised: no more memory than a file's own, what is kept aside, and what `FileWriter` takes; each
has its bound, and `Progress.is_full` says when one is reached. All of it blocks: for a side thread
or a process of its own.
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
from quackmq.model.topic import Aborted, OffsetTime, PartitionKey
from quackmq.records.batch import Batch, batches


class FileMaker:
    """One file, from `first_offset` on. Used once, by one thread at a time."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._writer = FileWriter(key, topic, first_offset)
        self._first_offset = self._position = self._end = first_offset
        self._aside: list[tuple[bytes, str]] = []
        self._aside_bytes = 0

    def add(
        self, piece: Piece, publishers: Mapping[int, str | None]
    ) -> Progress | UnknownProducers:
        """Take a piece, or its beginning, until the file is full. `publishers` are the durable
        names of producers by id; if one is missing, nothing is taken and it is said which."""
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
        """The file, as it comes with a manifest's version. There is something to put into it."""
        file, data = self._writer.finish(self._end, version)
        aside = []
        for raw, reason in self._aside:
            line = manifests.quarantined(Batch.peek(raw), version, reason)
            if line.first_offset < self._first_offset:  # what is before that was trimmed
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
        """Those from one on, until the file is full or one of them is poison; which is the next."""
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


def _committed(found: Sequence[Batch], aborted: Sequence[Aborted]) -> list[Batch]:
    """Without markers and what was aborted."""
    some = [batch for batch in found if not batch.is_control]
    if not aborted:
        return some
    ranges: dict[int, list[Aborted]] = {}
    for one in aborted:
        ranges.setdefault(one.producer_id, []).append(one)
    return [
        batch
        for batch in some
        if not (batch.is_transactional and _is_aborted(batch, ranges.get(batch.producer_id, ())))
    ]


def _is_aborted(batch: Batch, aborted: Collection[Aborted]) -> bool:
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
    """When each batch was appended; where nobody knows, the latest time that it says itself."""
    if not times:
        return [max(batch.max_timestamp, 0) for batch in kept]
    starts = [time.offset for time in times]
    if any(left > right for left, right in pairwise(starts)):
        raise InternalError("append times of a log do not ascend by offset")
    indices = (bisect_right(starts, batch.base_offset) - 1 for batch in kept)
    return [times[max(index, 0)].timestamp_ms for index in indices]
