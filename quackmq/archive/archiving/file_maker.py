"""Builds a file of the archive from a partition's log: sequences of batches in, one file out.

A *piece* is a sequence of whole batches as a committed read of the log returns them: with markers,
and with the records of aborted transactions, which are listed beside it. The fate of each batch:

    a marker, or of an aborted transaction      left out; a gap in the offsets
    records                                     rows, by `quackmq.archive.parquet.from_batches`
    poison: it cannot be decoded                quarantined unchanged, and named in the manifest

A file's range ends after a record or a quarantined batch, never in a gap: batches after the last of
them stay in the log. So a read of any archived offset finds something.

Promised: memory is bounded by a file's own size, the quarantined batches, and the buffers of
`FileWriter`. `BuildProgress.is_full` says when a bound is reached. All calls block: use a side
thread or a separate process.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from quackmq.archive import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.archiving.pieces import (
    BuildProgress,
    BuiltFile,
    LogPiece,
    QuarantinedBatch,
    UnknownProducers,
)
from quackmq.archive.parquet.from_batches import CommittedBatch, FileWriter, PoisonBatch
from quackmq.errors import InternalError
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, is_committed
from quackmq.records.batch import Batch, batches


class FileMaker:
    """Builds one file, from `first_offset` on. Use once. Not thread-safe."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._writer = FileWriter(key, topic, first_offset)
        self._first_offset = self._position = self._end = first_offset
        self._quarantined: list[tuple[bytes, str]] = []
        self._quarantined_bytes = 0

    def add(
        self, piece: LogPiece, publishers: Mapping[int, str | None]
    ) -> BuildProgress | UnknownProducers:
        """Add a piece, or its beginning, until the file is full. `publishers` are the durable names
        of producers by id. If one is missing, nothing is added; the missing ids are returned."""
        # A read returns whole batches. Leave out those that end before the piece begins.
        batches_found = [batch for batch in batches(piece.data) if batch.next_offset > piece.offset]
        committed = _drop_aborted(batches_found, piece.aborted)
        producer_ids = {batch.producer_id for batch in committed if batch.is_transactional}
        if missing := producer_ids - publishers.keys():
            return UnknownProducers(frozenset(missing))
        entries = _make_entries(committed, piece.times, publishers)
        added = 0
        while added < len(entries) and not self._is_full:
            added = self._add_entries(entries, added, piece.undecodable_reason)
        if added:
            self._end = entries[added - 1].batch.next_offset
        if added < len(entries):
            # The file is full: the next file begins with the first batch that did not fit.
            self._position = entries[added].batch.base_offset
        elif batches_found:
            # Everything was examined, including markers and aborted batches after the last entry.
            self._position = batches_found[-1].next_offset
        return BuildProgress(self._position, self._end, self._is_full)

    def finish(self, version: int) -> BuiltFile:
        """Return the file for this version of the manifest. It must have content."""
        file, data = self._writer.finish(self._end, version)
        quarantined = []
        for raw, reason in self._quarantined:
            entry = manifests.quarantine_entry(Batch.peek(raw), version, reason)
            if entry.first_offset < self._first_offset:
                # The batch begins before the file, because its first records were trimmed. A
                # manifest's entry must lie within the range of its file.
                name = manifests.quarantine_name(self._first_offset, version)
                entry = dataclasses.replace(entry, name=name, first_offset=self._first_offset)
            quarantined.append(QuarantinedBatch(entry, raw))
        return BuiltFile(file, data, tuple(quarantined))

    @property
    def _is_full(self) -> bool:
        """Whether the file has reached one of its bounds: row groups, bytes, or bytes in
        quarantine."""
        return (
            self._writer.is_full
            or self._writer.size >= limits.ARCHIVE_NEW_FILE_BYTES
            or self._quarantined_bytes >= limits.ARCHIVE_QUARANTINE_BYTES
        )

    def _add_entries(
        self, entries: Sequence[CommittedBatch], first: int, undecodable_reason: str | None
    ) -> int:
        """Add entries from index `first` on; return the index of the next entry to add. Stop when
        the file is full, or after one undecodable batch, which is quarantined."""
        if undecodable_reason is not None:
            self._quarantine(entries[first].batch, undecodable_reason)
            return first + 1
        try:
            return first + self._writer.add(entries[first:] if first else entries)
        except PoisonBatch as error:
            # The writer has added everything before the poison batch: quarantine that one and skip
            # it.
            offsets = [entry.batch.base_offset for entry in entries]
            index = offsets.index(error.base_offset)
            self._quarantine(entries[index].batch, error.reason)
            return index + 1

    def _quarantine(self, batch: Batch, reason: str) -> None:
        """Keep a copy of an undecodable batch, and the reason; `finish` returns both."""
        self._quarantined.append((bytes(batch.view), reason))
        self._quarantined_bytes += batch.size


def _drop_aborted(batches: Sequence[Batch], aborted: Sequence[AbortedTransaction]) -> list[Batch]:
    """Return the batches without markers and without batches of aborted transactions."""
    # A piece may have thousands of both, so look only at the transactions of the batch's producer.
    aborted_by_producer: dict[int, list[AbortedTransaction]] = {}
    for transaction in aborted:
        aborted_by_producer.setdefault(transaction.producer_id, []).append(transaction)
    return [
        batch
        for batch in batches
        if is_committed(batch, aborted_by_producer.get(batch.producer_id, ()))
    ]


def _make_entries(
    batches: Sequence[Batch], times: Sequence[OffsetTime], publishers: Mapping[int, str | None]
) -> list[CommittedBatch]:
    """Return each batch with its append time, and with its publisher if it is transactional."""
    return [
        CommittedBatch(
            batch,
            time_ms,
            publishers[batch.producer_id] if batch.is_transactional else None,
        )
        for batch, time_ms in zip(batches, _find_append_times(batches, times), strict=True)
    ]


def _find_append_times(batches: Sequence[Batch], times: Sequence[OffsetTime]) -> list[int]:
    """Return the append time of each batch; if it is unknown, the batch's latest timestamp."""
    if not times:
        return [max(batch.max_timestamp, 0) for batch in batches]
    starts = [time.offset for time in times]
    if any(left > right for left, right in pairwise(starts)):
        raise InternalError("append times of a log do not ascend by offset")
    # The time of a batch is that of the last change at or before its first offset. A batch before
    # the first change gets the first time.
    indices = (bisect_right(starts, batch.base_offset) - 1 for batch in batches)
    return [times[max(index, 0)].timestamp_ms for index in indices]
