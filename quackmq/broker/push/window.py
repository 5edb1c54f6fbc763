"""The newest entries of a partition, shared by all of its push subscriptions.

A `WindowBatch` is a batch that is decoded when the first subscription needs it, once for all. A
large batch must be prepared before (see `decoded_batches`); then one `WindowBatch` per section
replaces it. A `Window` is a sequence of them, called cells here, up to the last stable offset of
the partition. A subscription that needs earlier entries must read; a `CatchUpBuffer` holds the
result of such a read, one cell at a time.

    partition's log      ...........|==========================|
                                    start                      end
                  must be read      cells, decoded on demand      not yet appended

A window covers every offset from `start` to `end`: an offset in no cell holds no entry. A window
has two bounds of the same size. One limits its batches, and the oldest are dropped. The other
limits their decoded entries, which are dropped and decoded again on demand.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from quackmq.broker import limits
from quackmq.broker.log.committed import is_committed
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.model.subscription import Place, message_id
from quackmq.model.topic import PartitionKey, Slice
from quackmq.records.batch import Batch, Record, batches
from quackmq.records.codec import Section

#: Approximate memory of a delivery besides its record.
_DELIVERY_BYTES: Final = 192


@dataclass(frozen=True, slots=True)
class LeasedEntry:
    """A leased entry. `deliveries` is 1 at the first delivery; `id` is the message id."""

    partition: int
    offset: int
    deliveries: int
    id: str
    record: Record


class WindowBatch:
    """A batch or a section of one. It has no entries if its records are not committed, and is
    poison if it cannot be decoded."""

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

    def __init__(self, batch: Batch, committed: bool, section: Section | None = None) -> None:
        self.base_offset = batch.base_offset if section is None else section.base_offset
        self.next_offset = batch.next_offset if section is None else section.next_offset
        self.size = batch.size if section is None else section.end - section.start
        #: Memory of the entries, after it was opened.
        self.opened_size = 0
        self.is_open = not committed
        self.is_poison = False
        self.batch = batch
        self._key: PartitionKey | None = None
        self._records: list[Record] = []
        #: The entry of each record at its first delivery, made on demand; the same for all
        #: channels.
        self._entries: list[LeasedEntry | None] = []

    def split(self, decoded: DecodedBatches, key: PartitionKey) -> list[WindowBatch]:
        """Return a cell for each section if the large batch was prepared; otherwise only this
        cell."""
        is_whole = self.base_offset == self.batch.base_offset
        if self.is_open or not is_whole or self.next_offset != self.batch.next_offset:
            return [self]
        sections = decoded.sections(key, self.batch)
        return (
            [WindowBatch(self.batch, True, section) for section in sections] if sections else [self]
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
        """Return the entry at `offset`; None if it is not in this cell, or if the batch has
        gaps."""
        index = offset - self.base_offset
        if index < 0 or len(self._records) != self.next_offset - self.base_offset:
            return None
        return self._entry(index)

    def between(self, first: int, next: int, most: int) -> tuple[list[LeasedEntry], int]:
        """Return at most `most` entries of an open cell, from `first` up to, not including, `next`.
        Also return the offset up to which there are no other entries."""
        records, known_to = self._records, self.next_offset
        if len(records) == self.next_offset - self.base_offset:  # no gaps, the usual case
            begin = max(0, first - self.base_offset)
            end = min(max(0, next - self.base_offset), len(records))
        else:
            begin = bisect_left(records, first, key=_offset)
            end = bisect_left(records, next, begin, key=_offset)
        if end - begin > most:
            end = begin + most
            known_to = records[end].offset
        return [self._entry(index) for index in range(begin, end)], known_to

    def _entry(self, index: int) -> LeasedEntry:
        entry = self._entries[index]
        if entry is None:
            assert self._key is not None, "it is open"
            topic_id, partition = self._key
            record = self._records[index]
            token = message_id(topic_id, Place(partition, record.offset))
            entry = self._entries[index] = LeasedEntry(partition, record.offset, 1, token, record)
        return entry


class Window:
    __slots__ = (
        "_cells",
        "_ends",
        "_last",
        "_max_bytes",
        "_opened",
        "_opened_size",
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
        self._cells: list[WindowBatch] = []
        self._ends: list[int] = []
        self._last: tuple[int, LeasedEntry] | None = None
        #: Open cells, in the order in which they were opened.
        self._opened: dict[WindowBatch, None] = {}
        self._opened_size = 0
        self._max_bytes = 0

    def follow(self, part: Slice) -> bool:
        """Add the batches that were read from `end` on. Return whether there were any."""
        self.first = max(self.first, part.first_offset)
        cells = list(cells_of(part))
        if not cells:
            return False
        for cell in cells:
            self._cells.append(cell)
            self._ends.append(cell.next_offset)
            self.size += cell.size
        self.end = cells[-1].next_offset
        return True

    def begin_anew(self, first: int, end: int) -> None:
        """Empty the window and move it to `end`, because the offsets before could not be read."""
        self._cells.clear()
        self._ends.clear()
        self._opened.clear()
        self.size = self._opened_size = 0
        self.first, self.start, self.end = first, end, end

    def shrink(self, max_bytes: int) -> None:
        """Drop the oldest cells until `max_bytes` are left; keep the newest cell, however large.
        The same bound applies to decoded entries from now on."""
        self._max_bytes = max_bytes
        gone = max(0, len(self._cells) - limits.FEED_BATCHES)
        size = self.size - sum(cell.size for cell in self._cells[:gone])
        while size > max_bytes and gone < len(self._cells) - 1:
            size -= self._cells[gone].size
            gone += 1
        if gone:
            self.start, self.size = self._ends[gone - 1], size
            for cell in self._cells[:gone]:
                if cell in self._opened:
                    del self._opened[cell]
                    self._opened_size -= cell.opened_size
            del self._cells[:gone]
            del self._ends[:gone]

    def entry_at(self, offset: int, decoded: DecodedBatches, topic_name: str) -> LeasedEntry | None:
        """Return the entry at an offset within the window; None if there is none, or if its batch
        must be prepared or has gaps."""
        last = self._last
        if last is None or last[0] != offset:
            cell = self.cell_at(offset, decoded, topic_name)
            if cell is None:
                return None
            entry = cell.entry_at(offset)
            if entry is None:
                return None
            self._last = last = (offset, entry)  # the other subscriptions want the same entry next
        return last[1]

    def cell_at(self, offset: int, decoded: DecodedBatches, topic_name: str) -> WindowBatch | None:
        """Return the first cell that ends after an offset within the window; None if there is none.
        The cell is open, unless its batch must be prepared first."""
        index = bisect_right(self._ends, offset)
        if index >= len(self._cells):
            return None
        cell = self._cells[index]
        if not cell.is_open:
            cells = cell.split(decoded, self.key)
            if len(cells) > 1:
                self._replace(index, cells)
                return self.cell_at(offset, decoded, topic_name)
            if not cell.open(decoded, self.key, topic_name):
                return cell
            self._opened[cell] = None
            self._opened_size += cell.opened_size
            # Keep the cell just opened, however large: a subscription is about to read it.
            while self._opened_size > self._max_bytes and len(self._opened) > 1:
                other = next(iter(self._opened))
                del self._opened[other]
                self._opened_size -= other.opened_size
                other.close()
        return cell

    def _replace(self, index: int, cells: list[WindowBatch]) -> None:
        self.size += sum(cell.size for cell in cells) - self._cells[index].size
        self._cells[index : index + 1] = cells
        self._ends[index : index + 1] = [cell.next_offset for cell in cells]


class CatchUpBuffer:
    """Batches of a partition before the window, read for one subscription."""

    __slots__ = ("_cell", "_cells", "offset", "size")

    def __init__(self, part: Slice, offset: int) -> None:
        #: The buffer covers the offsets from here up to the end of the last cell.
        self.offset = offset
        self.size = part.size
        self._cells = cells_of(part)
        self._cell = next(self._cells, None)

    def cell_at(
        self, offset: int, decoded: DecodedBatches, key: PartitionKey, topic_name: str
    ) -> WindowBatch | None:
        """Return the first cell that ends after `offset`; None if that offset was not read, or is
        past. The cell is open, unless its batch must be prepared first."""
        if offset < self.offset:
            return None
        while self._cell is not None:
            if self._cell.next_offset <= offset:
                self._cell = next(self._cells, None)
                continue
            cells = self._cell.split(decoded, key)
            if len(cells) == 1:
                break
            self._cells = chain(cells[1:], self._cells)
            self._cell = cells[0]
        self.offset = offset
        if self._cell is not None:
            self._cell.open(decoded, key, topic_name)
        return self._cell


def cells_of(part: Slice) -> Iterator[WindowBatch]:
    for chunk in part.chunks:
        for batch in batches(chunk):
            yield WindowBatch(batch, is_committed(batch, part.aborted))


def _offset(record: Record) -> int:
    return record.offset
