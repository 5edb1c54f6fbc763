"""Finds the aborted transactions in a range of offsets.

An aborted transaction is recorded in the segment of its marker, which may lie after the range that
is read. Each entry says where the search may stop, so rarely more than one file is read.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from operator import attrgetter
from typing import Final

from quackmq.errors import DamagedData, UnknownTopic
from quackmq.model.log_transactions import ABORTED_BYTES, find_aborted
from quackmq.model.topic import AbortedTransaction
from quackmq.stores import limits
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import Segment, load_aborted
from quackmq.stores.local.reads import storage_errors
from quackmq.stores.local.segmented_log import SegmentedLog
from quackmq.stores.local.side_reads import SideReads

_first_offset: Final = attrgetter("first_offset")


class AbortedReader:
    """Reads the indexes of aborted transactions. Not thread-safe: call from the event loop."""

    def __init__(self, side_reads: SideReads, files: Packs) -> None:
        self._side_reads = side_reads
        self._files = files
        #: The content of files by path. A path is never reused for another segment.
        self._cached: OrderedDict[str, bytes] = OrderedDict()
        self._cached_bytes = 0

    async def find(
        self, log: SegmentedLog, first: int, last: int
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
