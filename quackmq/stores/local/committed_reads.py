"""Reads a partition up to its stable offset, with the aborted transactions in that range.

If nothing is open and nothing was aborted, this takes two comparisons more than any other read.

An aborted transaction is recorded in the segment of its marker, which may lie after the range that
is read. Each entry says where the search may stop, so rarely more than one file is read.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from functools import partial
from operator import attrgetter
from typing import Final

from quackmq.errors import DamagedData, OffsetOutOfRange, UnknownTopic
from quackmq.model.log_transactions import ABORTED_BYTES, find_aborted
from quackmq.model.topic import AbortedTransaction
from quackmq.records.batch import spans
from quackmq.stores import limits
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import Segment, load_aborted
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.reads import Pieces, Reader, storage_errors
from quackmq.stores.local.side_reads import SideReads

_BASE_OFFSET: Final = struct.Struct(">q")
_first_offset: Final = attrgetter("first_offset")


class CommittedReader:
    """Reads decided batches and lists the aborted ones among them. Not thread-safe: call from the
    event loop."""

    def __init__(self, reader: Reader, side_reads: SideReads, files: Packs) -> None:
        self._reader = reader
        self._side_reads = side_reads
        self._files = files
        #: The content of files by path. A path is never reused for another segment.
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0

    async def read(
        self, log: PartitionLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[Pieces, tuple[AbortedTransaction, ...]]:
        """Read as `Reader.read` does, up to the stable offset at the time of the call: undecided
        batches may be appended during the read. Return the batches and the aborted transactions
        among them."""
        end_offset = log.stable_offset
        # The offset is in range, but nothing from there on is decided.
        if end_offset <= offset <= log.high_watermark:
            return (), ()
        pieces = await self._reader.read(log, offset, max_bytes, first_max_bytes)
        if log.high_watermark > end_offset:
            pieces = _before(pieces, end_offset)
        if not pieces or log.last_aborted_offset < offset:
            return pieces, ()
        aborted = await self._find_aborted(log, offset, _last_offset(pieces))
        if offset < log.first_offset:
            # The offset was trimmed during the read. Files with aborted transactions may have been
            # removed, so it is unknown which of these records were aborted.
            raise OffsetOutOfRange(
                f"offset {offset} was trimmed: the first offset is {log.first_offset}"
            )
        return pieces, aborted

    async def _find_aborted(
        self, log: PartitionLog, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        """Return the aborted transactions with records in [first, last], by first offset. Later
        segments are searched too, because a transaction is recorded where its marker lies. Raises
        DamagedData if they cannot be read, UnknownTopic if the topic is deleted meanwhile."""
        aborted: list[AbortedTransaction] = []
        for segment in log.segments_from(first):
            if not segment.aborted_count and not segment.pending_aborted:
                continue
            try:
                written = await self._load_written(segment)
            except FileNotFoundError as error:
                if log.is_deleted:
                    raise UnknownTopic(f"topic {log.key.topic_id} was deleted") from None
                if segment not in log.segments:
                    continue  # trimmed while the file was being opened
                raise DamagedData(
                    f"{error.filename}: the file is missing, so the aborted transactions there are "
                    "unknown; restore it from a backup",
                    log.offset_after(segment),
                ) from error
            except DamagedData as damage:
                raise DamagedData(str(damage), log.offset_after(segment)) from damage
            for entries in (written, segment.pending_aborted):
                found, is_last = find_aborted(entries, first, last)
                aborted += found
                if is_last:
                    return tuple(sorted(aborted, key=_first_offset))
        return tuple(sorted(aborted, key=_first_offset))

    async def _load_written(self, segment: Segment) -> bytes:
        """Return the entries of aborted transactions in the segment's file, cached or loaded. If a
        checkpoint adds entries to the file during the load, load it again."""
        while True:
            count = segment.aborted_count
            if not count:
                return b""
            cached = self._cached.get(segment.aborted_path)
            if cached is not None and len(cached) == count * ABORTED_BYTES:
                self._cached.move_to_end(segment.aborted_path)
                return cached
            load = partial(load_aborted, self._files, segment, count)
            with storage_errors(segment.aborted_path):
                entries = await self._side_reads.run(load)
            if (
                segment.aborted_count == count
            ):  # no checkpoint has moved entries into the file meanwhile
                self._cache(segment.aborted_path, entries)
                return entries

    def _cache(self, path: str, entries: bytes) -> None:
        """Cache the content of a file; drop the least recently used ones beyond the bound."""
        self._cached_bytes += len(entries) - len(self._cached.pop(path, b""))
        self._cached[path] = entries
        while self._cached_bytes > limits.CACHED_ABORTED_BYTES:
            _, dropped = self._cached.popitem(last=False)
            self._cached_bytes -= len(dropped)


def _before(pieces: Pieces, end_offset: int) -> Pieces:
    """Return the batches before an offset, at which a batch begins."""
    count = len(pieces)
    while count and _BASE_OFFSET.unpack_from(pieces[count - 1])[0] >= end_offset:
        count -= 1
    if not count:
        return ()
    last = pieces[count - 1]
    for span in spans(last):
        if span.base_offset >= end_offset:
            return (*pieces[: count - 1], last[: span.position])
    return pieces[:count]


def _last_offset(pieces: Pieces) -> int:
    """Return the last offset of the last batch."""
    last_offset = -1
    for span in spans(pieces[-1]):
        last_offset = span.next_offset - 1
    return last_offset
