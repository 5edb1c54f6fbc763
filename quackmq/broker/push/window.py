"""The newest entries of a partition, shared by all of its push subscriptions.

A `WindowBatch` is a batch that is decoded once for all subscriptions, when the first one needs it.
A large batch must be prepared before that (see `decoded_batches`); then one `WindowBatch` per
section replaces it. A `Window` is a sequence of them, up to the last stable offset of the
partition. A subscription that needs earlier entries must read; a `CatchUpBuffer` holds the result
of such a read.

    partition's log      ...........|==========================|
                                    start                      end
                  must be read      batches, decoded on demand    not yet appended

A window covers every offset from `start` to `end`: an offset in none of its batches holds no entry.
A window has two bounds of the same size. One limits its batches, and the oldest are dropped. The
other limits their decoded entries, which are dropped and decoded again on demand.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from quackmq.broker import limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.model.subscription import RecordPosition, message_id
from quackmq.model.topic import PartitionKey, Slice, is_committed
from quackmq.records.batch import Batch, Record, batches
from quackmq.records.codec import Section

#: Approximate memory of a delivery besides its record.
_DELIVERY_BYTES: Final = 192


@dataclass(frozen=True, slots=True)
class LeasedEntry:
    """An entry that is leased to a channel. `deliveries` is 1 at the first delivery; `id` is the
    message id."""

    partition: int
    offset: int
    deliveries: int
    id: str
    record: Record


class WindowBatch:
    """A batch, or a section of a large batch. It has no entries if its records are not committed.
    It is poison if it cannot be decoded."""

    __slots__ = (
        "_entries",
        "_key",
        "_records",
        "batch",
        "base_offset",
        "is_open",
        "is_poison",
        "next_offset",
        "opened_size",
        "size",
    )

    def __init__(self, batch: Batch, is_committed: bool, section: Section | None = None) -> None:
        self.base_offset = batch.base_offset if section is None else section.base_offset
        self.next_offset = batch.next_offset if section is None else section.next_offset
        self.size = batch.size if section is None else section.end - section.start
        #: The memory of the decoded entries, once the batch was opened.
        self.opened_size = 0
        # A batch that is not committed has no entries, so it needs no decoding.
        self.is_open = not is_committed
        self.is_poison = False
        self.batch = batch
        self._key: PartitionKey | None = None
        self._records: list[Record] = []
        #: The entry of each record at its first delivery, made on demand; the same for all
        #: channels.
        self._entries: list[LeasedEntry | None] = []

    def split(self, decoded: DecodedBatches, key: PartitionKey) -> list[WindowBatch]:
        """Return a window batch for each section of a large batch that was prepared; for any other
        batch, return only this one."""
        is_whole = self.base_offset == self.batch.base_offset
        if self.is_open or not is_whole or self.next_offset != self.batch.next_offset:
            return [self]
        sections = decoded.sections(key, self.batch)
        return (
            # Only a committed batch can be not open: see `__init__`.
            [WindowBatch(self.batch, is_committed=True, section=section) for section in sections]
            if sections
            else [self]
        )

    def open(self, decoded: DecodedBatches, key: PartitionKey, topic_name: str) -> bool:
        """Decode the batch unless it is open. Return False if it must be prepared first."""
        if self.is_open:
            return True
        opened = decoded.open_now(key, self.batch, self.base_offset, topic_name, is_committed=True)
        if opened is None:
            return False
        self.is_open = True
        self.is_poison = opened.is_poison
        self.opened_size = opened.size + _DELIVERY_BYTES * len(opened.records)
        self._key = key
        self._records = opened.records
        self._entries = [None] * len(opened.records)
        return True

    def close(self) -> None:
        """Drop the decoded entries; `open` decodes them again on demand."""
        self.is_open = False
        self._records = []
        self._entries = []

    def entry_at(self, offset: int) -> LeasedEntry | None:
        """Return the entry at `offset`; None if it is not in this batch, or if the batch has
        gaps."""
        index = offset - self.base_offset
        if index < 0 or len(self._records) != self.next_offset - self.base_offset:
            return None
        return self._entry(index)

    def entries_between(
        self, start: int, end: int, max_entries: int
    ) -> tuple[list[LeasedEntry], int]:
        """Return at most `max_entries` entries of an open batch from `start` up to, not including,
        `end`. Also return the offset up to which there are no other entries."""
        records, examined_to = self._records, self.next_offset
        if len(records) == self.next_offset - self.base_offset:  # no gaps, the usual case
            start_index = max(0, start - self.base_offset)
            stop_index = min(max(0, end - self.base_offset), len(records))
        else:
            start_index = bisect_left(records, start, key=_offset)
            stop_index = bisect_left(records, end, start_index, key=_offset)
        if stop_index - start_index > max_entries:
            stop_index = start_index + max_entries
            examined_to = records[stop_index].offset
        return [self._entry(index) for index in range(start_index, stop_index)], examined_to

    def _entry(self, index: int) -> LeasedEntry:
        """Return the entry of the record at `index`. All channels share it, so it is made only
        once."""
        entry = self._entries[index]
        if entry is None:
            assert self._key is not None, "an open batch has a key"
            topic_id, partition = self._key
            record = self._records[index]
            token = message_id(topic_id, RecordPosition(partition, record.offset))
            entry = self._entries[index] = LeasedEntry(partition, record.offset, 1, token, record)
        return entry


class Window:
    __slots__ = (
        "_batches",
        "_ends",
        "_last_entry",
        "_max_bytes",
        "_open_batches",
        "_open_bytes",
        "end",
        "first",
        "key",
        "size",
        "start",
    )

    def __init__(self, key: PartitionKey, first: int, end: int) -> None:
        self.key = key
        #: The first offset of the log, as far as is known.
        self.first = first
        self.start = end
        self.end = end
        self.size = 0
        self._batches: list[WindowBatch] = []
        self._ends: list[int] = []
        self._last_entry: tuple[int, LeasedEntry] | None = None
        #: Open batches, in the order in which they were opened.
        self._open_batches: dict[WindowBatch, None] = {}
        self._open_bytes = 0
        self._max_bytes = 0

    def append(self, log_slice: Slice) -> bool:
        """Add the batches that were read from `end` on. Return whether there were any."""
        self.first = max(self.first, log_slice.first_offset)
        added = list(window_batches(log_slice))
        if not added:
            return False
        for batch in added:
            self._batches.append(batch)
            self._ends.append(batch.next_offset)
            self.size += batch.size
        self.end = added[-1].next_offset
        return True

    def restart_at(self, first: int, end: int) -> None:
        """Empty the window and move it to `end`, because the offsets before it were not readable.
        The log begins at `first`."""
        self._batches.clear()
        self._ends.clear()
        self._open_batches.clear()
        self.size = self._open_bytes = 0
        self.first, self.start, self.end = first, end, end

    def shrink(self, max_bytes: int) -> None:
        """Drop the oldest batches until at most `max_bytes` and LIVE_TAIL_BATCHES batches are
        left; keep the newest batch, however large. The bound in bytes applies to decoded
        entries, too, from now on."""
        self._max_bytes = max_bytes
        drop_count = max(0, len(self._batches) - limits.LIVE_TAIL_BATCHES)
        size = self.size - sum(batch.size for batch in self._batches[:drop_count])
        while size > max_bytes and drop_count < len(self._batches) - 1:
            size -= self._batches[drop_count].size
            drop_count += 1
        if drop_count:
            self.start, self.size = self._ends[drop_count - 1], size
            for batch in self._batches[:drop_count]:
                if batch in self._open_batches:
                    del self._open_batches[batch]
                    self._open_bytes -= batch.opened_size
            del self._batches[:drop_count]
            del self._ends[:drop_count]

    def entry_at(self, offset: int, decoded: DecodedBatches, topic_name: str) -> LeasedEntry | None:
        """Return the entry at an offset within the window; None if there is none, or if its batch
        must be prepared or has gaps."""
        last_entry = self._last_entry
        if last_entry is None or last_entry[0] != offset:
            batch = self.batch_at(offset, decoded, topic_name)
            if batch is None:
                return None
            entry = batch.entry_at(offset)
            if entry is None:
                return None
            # The other subscriptions need the same entry next.
            self._last_entry = last_entry = (offset, entry)
        return last_entry[1]

    def batch_at(self, offset: int, decoded: DecodedBatches, topic_name: str) -> WindowBatch | None:
        """Return the first batch that ends after `offset`, which is within the window; None if
        there is none. The batch is open, unless it must be prepared first."""
        # A batch that ends at `offset` does not hold it: `_ends` are exclusive.
        index = bisect_right(self._ends, offset)
        if index >= len(self._batches):
            return None
        batch = self._batches[index]
        if not batch.is_open:
            sections = batch.split(decoded, self.key)
            if len(sections) > 1:
                self._replace(index, sections)
                # Look again: the offset is now in one of the sections.
                return self.batch_at(offset, decoded, topic_name)
            if not batch.open(decoded, self.key, topic_name):
                return batch
            self._open_batches[batch] = None
            self._open_bytes += batch.opened_size
            # Keep the batch just opened, however large: a subscription is about to read it.
            while self._open_bytes > self._max_bytes and len(self._open_batches) > 1:
                oldest_batch = next(iter(self._open_batches))
                del self._open_batches[oldest_batch]
                self._open_bytes -= oldest_batch.opened_size
                oldest_batch.close()
        return batch

    def _replace(self, index: int, sections: list[WindowBatch]) -> None:
        """Replace the batch at `index` by its sections."""
        self.size += sum(batch.size for batch in sections) - self._batches[index].size
        self._batches[index : index + 1] = sections
        self._ends[index : index + 1] = [batch.next_offset for batch in sections]


class CatchUpBuffer:
    """Batches of a partition before the window, read for one subscription."""

    __slots__ = ("_current_batch", "_later_batches", "offset", "size")

    def __init__(self, log_slice: Slice, offset: int) -> None:
        #: The buffer covers the offsets from here up to the end of the last batch.
        self.offset = offset
        self.size = log_slice.size
        self._later_batches = window_batches(log_slice)
        self._current_batch = next(self._later_batches, None)

    def batch_at(
        self, offset: int, decoded: DecodedBatches, key: PartitionKey, topic_name: str
    ) -> WindowBatch | None:
        """Return the first batch that ends after `offset`, and drop the batches before it. Return
        None if the offset was not read, or was dropped. The batch is open, unless it must be
        prepared first."""
        if offset < self.offset:
            return None
        while self._current_batch is not None:
            if self._current_batch.next_offset <= offset:
                self._current_batch = next(self._later_batches, None)
            elif len(sections := self._current_batch.split(decoded, key)) > 1:
                # The sections take the place of the whole batch.
                self._current_batch, *others = sections
                self._later_batches = chain(others, self._later_batches)
            else:
                break
        self.offset = offset
        if self._current_batch is not None:
            self._current_batch.open(decoded, key, topic_name)
        return self._current_batch


def window_batches(log_slice: Slice) -> Iterator[WindowBatch]:
    for chunk in log_slice.chunks:
        for batch in batches(chunk):
            yield WindowBatch(batch, is_committed(batch, log_slice.aborted))


def _offset(record: Record) -> int:
    return record.offset
