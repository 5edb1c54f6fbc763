"""A small cache of decoded batches for readers of single records. A subscriber that reads a batch
of 10,000 records one by one decodes it once.

A small batch is decoded in one step and cached as a whole. A large batch is decoded section by
section (see `codec.sections`). First `prepare` scans the whole batch and yields to the event loop
after each section; a side thread inflates a compressed batch before that. The result is the batch's
*outline*: the position of each section. After that, a reader decodes in one step only the section
that it needs, and the cache holds sections. Two readers at different positions of a batch therefore
cost two sections.

    batch      |------------------------------------------------|
    outline    |    0    |    1    |    2    |    3    |    4   |   offsets and bytes of each
    cache                |#########|                   |########|   records, for two readers

A batch that cannot be decoded is *poison* as a whole. The codec then raises `CorruptBatch`: the
batch inflates beyond the limit, has wrong counts or is not valid compressed data. The batch is
logged and cached as a batch without records, and readers continue after it. Its bytes stay in the
log; readers of whole batches still get them.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from quackmq.broker import limits
from quackmq.errors import BrokerClosing, CorruptBatch
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import HEADER_BYTES, Batch, Record
from quackmq.records.codec import Section

log = logging.getLogger(__name__)

#: Approximate memory of a record besides its key and value.
_RECORD_BYTES: Final = 256


class DecodedRecords(NamedTuple):
    """The records of a batch, or of a section of a large batch. Poison has no records.
    `is_committed` is true if the batch's transaction is known to be committed, or if the batch is
    in no transaction."""

    base_offset: int
    next_offset: int
    records: list[Record]
    size: int
    is_committed: bool = True
    #: Whether the store could not read it. Another read may succeed: a disk can recover.
    is_unread: bool = False

    @property
    def is_poison(self) -> bool:
        return not self.records

    def contains(self, offset: int) -> bool:
        return self.base_offset <= offset < self.next_offset

    def first_record_from(self, offset: int) -> Record | None:
        """Return the first record at or after `offset`; None if there is none."""
        index = self._index(offset)
        return self.records[index] if index < len(self.records) else None

    def records_from(self, offset: int) -> list[Record]:
        """Return every record at or after `offset`."""
        return self.records[self._index(offset) :]

    def _index(self, offset: int) -> int:
        return bisect_left(self.records, offset, key=lambda record: record.offset)


class _Outline:
    """The sections of a large batch. `data` holds the inflated bytes; None after they were dropped.
    It is also None for an uncompressed batch, because every reader passes the batch itself."""

    __slots__ = ("data", "identity", "sections", "starts")

    def __init__(self, batch: Batch, sections: list[Section], data: memoryview | None) -> None:
        self.identity = _identity(batch)
        self.sections = sections
        self.starts = [section.base_offset for section in sections]
        self.data = data

    def at(self, offset: int) -> Section:
        """Return the section that holds `offset`; the first section for an offset before the
        batch."""
        return self.sections[max(0, bisect_right(self.starts, offset) - 1)]


class DecodedBatches:
    """The cache of decoded batches, and the preparation of large ones."""

    def __init__(self) -> None:
        #: Cached items by partition and base offset, the least recently used first.
        self._used: OrderedDict[tuple[PartitionKey, int], None] = OrderedDict()
        self._by_partition: dict[PartitionKey, dict[int, DecodedRecords]] = {}
        #: The sorted base offsets of each partition's cached items.
        self._bases: dict[PartitionKey, list[int]] = {}
        self._size = 0
        #: The least recently used outline first.
        self._outlines: OrderedDict[tuple[PartitionKey, int], _Outline] = OrderedDict()
        self._inflated_size = 0
        self._preparing: dict[tuple[PartitionKey, int], asyncio.Task[None]] = {}
        #: Prepare one large batch at a time: each may hold DECODED_BATCH_BYTES inflated.
        self._prepare_lock = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def close(self) -> None:
        """Cancel running preparations; callers that wait for one get BrokerClosing."""
        tasks = list(self._preparing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    # --- reading ------------------------------------------------------------------------------

    def find(self, key: PartitionKey, offset: int) -> DecodedRecords | None:
        """Return the cached batch or section that holds `offset`; None if it is not cached, not
        known to be committed, or could not be read."""
        decoded = self._find_covering(key, offset)
        if decoded is None or not decoded.is_committed or decoded.is_unread:
            return None
        self._used.move_to_end((key, decoded.base_offset))
        return decoded

    def open_now(
        self,
        key: PartitionKey,
        batch: Batch,
        offset: int,
        topic_name: str,
        *,
        is_committed: bool = False,
    ) -> DecodedRecords | None:
        """Decode a batch in one step: the whole of a small batch, or the section of a large one
        that holds `offset`. Return None if the batch must be prepared first. `is_committed` says
        that the caller knows the batch to be committed."""
        is_committed = is_committed or _is_plain(batch)
        cached = self._find_cached(key, batch, offset)
        if cached is not None:
            return self._mark_committed(key, cached) if is_committed else cached
        outline = self._find_outline(key, batch)
        if outline is not None:
            data = batch.view[HEADER_BYTES:] if outline.data is None else outline.data
            return self._cache_section(key, batch, data, outline.at(offset), is_committed)
        if _is_large(batch):
            return None
        try:
            records = codec.decode(batch, max_bytes=limits.DECODED_AT_ONCE_BYTES)
        except CorruptBatch as error:
            if batch.compression == "none":
                return self._poison(key, batch, topic_name, error)
            return None  # damaged, or too large for one step: the error is the same
        begin, end = batch.base_offset, batch.next_offset
        return self._cache(key, _make_decoded(begin, end, records, is_committed))

    async def open(
        self,
        key: PartitionKey,
        batch: Batch,
        offset: int,
        topic_name: str,
        *,
        is_committed: bool = False,
    ) -> DecodedRecords:
        """Decode as `open_now` does, but prepare a large batch first if necessary. Other tasks run
        during the preparation."""
        while True:
            opened = self.open_now(key, batch, offset, topic_name, is_committed=is_committed)
            if opened is not None:
                return opened
            await self.prepare(key, batch, offset, topic_name)

    async def since_time(
        self, key: PartitionKey, batch: Batch, topic_name: str, timestamp_ms: int
    ) -> AsyncIterator[DecodedRecords]:
        """Yield, in order, the parts of a batch that may hold records with this timestamp or a
        later one."""
        offset = batch.base_offset
        while offset < batch.next_offset:
            opened = await self.open(key, batch, offset, topic_name)
            # Take the outline before the caller runs: the cache may drop it meanwhile.
            outline = self._outlines.get((key, batch.base_offset))
            yield opened
            offset = opened.next_offset
            if outline is not None and outline.identity == _identity(batch):
                later = (
                    section.base_offset
                    for section in outline.sections
                    if section.base_offset >= offset and section.max_timestamp_ms >= timestamp_ms
                )
                # Without a later section that is new enough, the batch is done.
                offset = next(later, batch.next_offset)
            await asyncio.sleep(0)

    # --- large batches ------------------------------------------------------------------------

    def sections(self, key: PartitionKey, batch: Batch) -> list[Section] | None:
        """Return the sections of a prepared large batch; None for any other batch."""
        outline = self._find_outline(key, batch)
        return None if outline is None else outline.sections

    async def prepare(self, key: PartitionKey, batch: Batch, offset: int, topic_name: str) -> None:
        """Find the sections of a large batch, and decode the first ones that a reader at `offset`
        needs. Return when `open_now` can open any section. If one of several waiting callers is
        cancelled, the work continues for the others. Raise BrokerClosing if the broker closes
        first."""
        cache_key = (key, batch.base_offset)
        task = self._preparing.get(cache_key)
        if task is None:
            work = self._prepare(key, batch, offset, topic_name)
            task = self._preparing[cache_key] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda _: self._preparing.pop(cache_key, None))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise BrokerClosing("the broker is closing: read again when it is back") from None
            raise

    async def _prepare(self, key: PartitionKey, batch: Batch, offset: int, topic_name: str) -> None:
        """Inflate a large batch, find its sections and cache both; poison the batch if it cannot be
        decoded. Also cache the section at `offset`."""
        async with self._prepare_lock:
            known_outline = self._outlines.get((key, batch.base_offset))
            try:
                data = await self._inflate(batch)
                # Only the inflated bytes were dropped: the sections are still valid.
                if known_outline is not None and known_outline.identity == _identity(batch):
                    sections = known_outline.sections
                else:
                    sections = await self._find_sections(key, batch, data, offset)
            except CorruptBatch as error:
                self._poison(key, batch, topic_name, error)
                return
            outline = _Outline(batch, sections, None if batch.compression == "none" else data)
            self._cache_outline(key, batch, outline)
            if self._find_cached(key, batch, offset) is None:
                # The cache has dropped the reader's section: it must still make progress.
                self._cache_section(key, batch, data, outline.at(offset), _is_plain(batch))

    async def _inflate(self, batch: Batch) -> memoryview:
        """Return the records of a batch as inflated bytes. A thread inflates, so that the loop is
        not blocked."""
        if batch.compression == "none":
            return codec.inflate_batch(batch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inflate")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, codec.inflate_batch, batch)

    async def _find_sections(
        self, key: PartitionKey, batch: Batch, data: memoryview, offset: int
    ) -> list[Section]:
        """Scan a large batch; return its sections. Cache the first ones that hold `offset` or
        follow it. Raise CorruptBatch."""
        is_committed = _is_plain(batch)
        sections: list[Section] = []
        first_parts: list[DecodedRecords] = []
        first_parts_bytes = 0
        for section, records in codec.sections(batch, data):
            sections.append(section)
            if section.next_offset > offset and first_parts_bytes < limits.DECODED_AHEAD_BYTES:
                begin, end = section.base_offset, section.next_offset
                first_parts.append(_make_decoded(begin, end, records, is_committed))
                first_parts_bytes += first_parts[-1].size
            await asyncio.sleep(0)
        # Cache only after the whole batch proved valid. The section needed first is cached last, so
        # that it is evicted last.
        for decoded in reversed(first_parts):
            self._cache(key, decoded)
        return sections

    def _find_outline(self, key: PartitionKey, batch: Batch) -> _Outline | None:
        """Return the outline of a batch if it is cached with everything needed to decode a
        section."""
        outline = self._outlines.get((key, batch.base_offset))
        # The archive builds new batches for each read: another batch may begin at the same offset.
        if outline is None or outline.identity != _identity(batch):
            return None
        if outline.data is None and batch.compression != "none":
            return None
        self._outlines.move_to_end((key, batch.base_offset))
        return outline

    def _cache_outline(self, key: PartitionKey, batch: Batch, outline: _Outline) -> None:
        """Cache the outline of a batch. Drop the oldest outlines, or only their inflated bytes, if
        the cache is full."""
        cache_key = (key, batch.base_offset)
        self._drop_outline(cache_key)
        self._outlines[cache_key] = outline
        self._inflated_size += len(outline.data or b"")
        while len(self._outlines) > limits.OUTLINED_BATCHES:
            self._drop_outline(next(iter(self._outlines)))
        # Keep the bytes of the newest outline: its readers are about to decode its sections.
        for other in list(self._outlines.values())[:-1]:
            if self._inflated_size <= limits.INFLATED_CACHE_BYTES:
                break
            # Keep its sections: inflating the batch again costs far less than finding them.
            self._inflated_size -= len(other.data or b"")
            other.data = None

    def _drop_outline(self, cache_key: tuple[PartitionKey, int]) -> None:
        outline = self._outlines.pop(cache_key, None)
        if outline is not None:
            self._inflated_size -= len(outline.data or b"")

    def _cache_section(
        self,
        key: PartitionKey,
        batch: Batch,
        data: memoryview,
        section: Section,
        is_committed: bool,
    ) -> DecodedRecords:
        """Decode one section of a large batch, cache and return it."""
        records = codec.section_records(batch, data, section)
        begin, end = section.base_offset, section.next_offset
        return self._cache(key, _make_decoded(begin, end, records, is_committed))

    # --- unreadable data ----------------------------------------------------------------------

    def quarantine(
        self,
        key: PartitionKey,
        base_offset: int,
        next_offset: int,
        topic_name: str,
        error: Exception,
    ) -> DecodedRecords:
        """Log that the store cannot read these offsets, unless the cache shows that they were
        logged recently. Return a `DecodedRecords` without records."""
        cached = self._get(key, base_offset)
        if cached is not None:
            return cached
        unreadable = DecodedRecords(base_offset, next_offset, [], 0, is_unread=True)
        return self._log_and_cache(key, unreadable, topic_name, error)

    def _poison(
        self, key: PartitionKey, batch: Batch, topic_name: str, error: Exception
    ) -> DecodedRecords:
        """Log and cache a batch that cannot be decoded."""
        unreadable = DecodedRecords(batch.base_offset, batch.next_offset, [], 0)
        return self._log_and_cache(key, unreadable, topic_name, error)

    def _log_and_cache(
        self, key: PartitionKey, unreadable: DecodedRecords, topic_name: str, error: Exception
    ) -> DecodedRecords:
        """Log unreadable offsets, and cache them so that they are not logged for each reader."""
        log.error(
            "topic %s, partition %d, offsets %d to %d cannot be read: %s",
            topic_name,
            key.partition,
            unreadable.base_offset,
            unreadable.next_offset - 1,
            error,
        )
        return self._cache(key, unreadable)

    # --- the cache ----------------------------------------------------------------------------

    def forget_topic(self, topic_id: uuid.UUID) -> None:
        """Drop everything cached for a deleted topic."""
        for key, base_offset in [used for used in self._used if used[0].topic_id == topic_id]:
            self._drop(key, base_offset)
        for cache_key in [
            cache_key for cache_key in self._outlines if cache_key[0].topic_id == topic_id
        ]:
            self._drop_outline(cache_key)

    def _find_cached(self, key: PartitionKey, batch: Batch, offset: int) -> DecodedRecords | None:
        """Return the cached batch or section that serves a reader of `batch` at `offset`; None if
        none."""
        cached = self._get(key, batch.base_offset)
        # The archive builds new batches for each read: a cached one may end earlier than `batch`.
        if cached is None or cached.is_unread or cached.next_offset < batch.next_offset:
            cached = self._find_covering(key, max(offset, batch.base_offset))
        if cached is None or cached.is_unread:
            return None
        is_whole = (
            cached.base_offset == batch.base_offset and cached.next_offset >= batch.next_offset
        )
        is_section = cached.contains(max(offset, batch.base_offset)) and not cached.is_poison
        if not (is_whole or (is_section and self._is_outlined(key, batch))):
            return None
        self._used.move_to_end((key, cached.base_offset))
        return cached

    def _is_outlined(self, key: PartitionKey, batch: Batch) -> bool:
        outline = self._outlines.get((key, batch.base_offset))
        return outline is not None and outline.identity == _identity(batch)

    def _find_covering(self, key: PartitionKey, offset: int) -> DecodedRecords | None:
        """Return the cached item that holds `offset`; None if there is none."""
        bases = self._bases.get(key)
        if not bases or (index := bisect_right(bases, offset)) == 0:
            return None
        decoded = self._by_partition[key][bases[index - 1]]
        return decoded if decoded.contains(offset) else None

    def _mark_committed(self, key: PartitionKey, decoded: DecodedRecords) -> DecodedRecords:
        if not decoded.is_committed:
            decoded = decoded._replace(is_committed=True)
            self._by_partition[key][decoded.base_offset] = decoded
        return decoded

    def _get(self, key: PartitionKey, base_offset: int) -> DecodedRecords | None:
        return self._by_partition.get(key, {}).get(base_offset)

    def _cache(self, key: PartitionKey, decoded: DecodedRecords) -> DecodedRecords:
        """Cache an item in place of one with the same base offset, and return it. Evict the least
        recently used items beyond the limits."""
        if self._get(key, decoded.base_offset) is not None:
            self._drop(key, decoded.base_offset)
        self._by_partition.setdefault(key, {})[decoded.base_offset] = decoded
        insort(self._bases.setdefault(key, []), decoded.base_offset)
        self._used[key, decoded.base_offset] = None
        self._size += decoded.size
        # Keep the item just opened, however large: a reader is about to use it.
        while len(self._used) > 1 and (
            len(self._used) > limits.DECODED_BATCHES or self._size > limits.DECODED_CACHE_BYTES
        ):
            self._drop(*next(iter(self._used)))
        return decoded

    def _drop(self, key: PartitionKey, base_offset: int) -> None:
        """Remove an item from the cache and from all of its indexes."""
        del self._used[key, base_offset]
        by_base_offset = self._by_partition[key]
        self._size -= by_base_offset.pop(base_offset).size
        bases = self._bases[key]
        del bases[bisect_left(bases, base_offset)]
        if not by_base_offset:
            del self._by_partition[key], self._bases[key]


def _is_large(batch: Batch) -> bool:
    """Return whether the header alone shows that a batch is too large to decode in one step."""
    return (
        batch.record_count > limits.DECODED_AT_ONCE_RECORDS
        or batch.size > limits.DECODED_AT_ONCE_BYTES
    )


def _is_plain(batch: Batch) -> bool:
    """Return whether a batch is neither transactional nor a marker."""
    return not (batch.is_transactional or batch.is_control)


def _identity(batch: Batch) -> tuple[int, int, int, int]:
    """Return values that differ if two batches with the same base offset differ."""
    return batch.next_offset, batch.size, batch.crc, batch.record_count


def _make_decoded(
    begin: int, end: int, records: list[Record], is_committed: bool
) -> DecodedRecords:
    """Build the cached form of records, with an estimate of their memory."""
    size = sum([len(record.key or b"") + len(record.value or b"") for record in records])
    return DecodedRecords(begin, end, records, size + _RECORD_BYTES * len(records), is_committed)
