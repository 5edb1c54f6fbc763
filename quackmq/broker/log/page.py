"""Read the committed messages of one partition by offset, one page at a time.

`scanner` says what a page skips, and which of it counts as lost. The next message reports the lost
records, or the page if no message follows. Damage without a known end ends a page; if the page is
empty, it raises the error.

No state is kept between two pages: the caller passes the offset to continue from.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.decoded_batches import DecodedBatches, DecodedRecords
from quackmq.broker.log.scanner import CommittedScan
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.subscription import Losses, Message, RecordPosition, message_id
from quackmq.model.topic import Read, Slice, Topic
from quackmq.records.batch import Record


class Reader(Protocol):
    """The signature of `LogService.read`."""

    def __call__(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> Awaitable[list[Slice]]: ...


class Page(NamedTuple):
    """Messages of one partition. Continue reading at `next_offset`, which is also after skipped
    records. The partition is readable from `first_offset` up to, not including, `end_offset`.
    `losses` are the lost records after the last message; no message reports them, and the next page
    does not repeat them."""

    messages: tuple[Message, ...]
    next_offset: int
    first_offset: int
    end_offset: int
    losses: Losses


async def read_page(
    read: Reader,
    decoded: DecodedBatches,
    topic: Topic,
    partition: int,
    offset: int,
    *,
    max_records: int,
    max_bytes: int,
    wait_ms: int,
) -> Page:
    """Read as many messages from `offset` on as the limits allow, but at least one if there is one.
    Wait up to `wait_ms` for the first message. Raise the error of the broker's read. If the page
    already has messages, damage or a deleted range ends it instead."""
    scan = CommittedScan(decoded, topic, partition, offset)
    builder = _PageBuilder(scan, topic, max_records, max_bytes)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(wait_ms, shared_limits.READ_WAIT_MS) / 1000
    while True:
        remaining_ms = 0
        if wait_ms > 0 and not builder.messages:
            remaining_ms = max(0, math.ceil((deadline - loop.time()) * 1000))
        size = builder.read_bytes
        (log_slice,) = await read([scan.read(size)], max_bytes=size, wait_ms=remaining_ms)
        if isinstance(log_slice.error, DamagedData) and scan.skip_damage(log_slice.error):
            continue
        if isinstance(log_slice.error, DamagedData | OffsetOutOfRange) and builder.messages:
            # The next page begins at the damage and raises the error.
            return builder.build(log_slice)
        if log_slice.error is not None:
            raise log_slice.error
        await scan.scan(log_slice, builder.add_records)
        if builder.is_full or (
            builder.is_at_end(log_slice) and (builder.messages or remaining_ms <= 0)
        ):
            return builder.build(log_slice)
        await asyncio.sleep(0)  # skipping a long range must not block other tasks


class _PageBuilder:
    """A page that is being filled."""

    def __init__(self, scan: CommittedScan, topic: Topic, max_records: int, max_bytes: int) -> None:
        self.messages: list[Message] = []
        self.is_full = False
        self._max_bytes = min(max(max_bytes, 1), limits.PAGE_BYTES)
        self._max_records = min(max(max_records, 1), limits.PAGE_RECORDS)
        #: How much to read at once: enough for `max_records` of usual size. If they are larger,
        #: `read_page` reads again.
        self.read_bytes = min(self._max_bytes, self._max_records * limits.PAGE_RECORD_BYTES)
        self._scan = scan
        self._topic = topic
        self._size = 0

    def is_at_end(self, log_slice: Slice) -> bool:
        return not log_slice.chunks or self._scan.position >= log_slice.stable_offset

    def build(self, log_slice: Slice) -> Page:
        messages = tuple(self.messages)
        where = (self._scan.position, log_slice.first_offset, log_slice.stable_offset)
        return Page(messages, *where, self._scan.losses)

    def add_records(self, opened: DecodedRecords) -> bool:
        """Add decoded records; return False when the page is full. The first message after a loss
        reports it."""
        scan = self._scan
        partition = scan.key.partition
        for record in opened.records_from(scan.position):
            size = _record_bytes(record)
            # The first message always fits, so that a large record does not block its reader.
            if self.messages and self._size + size > self._max_bytes:
                self.is_full = True
                return False
            token = message_id(self._topic.id, RecordPosition(partition, record.offset))
            message = Message(token, self._topic.name, partition, record)
            if scan.losses.count:
                lost, ranges = scan.losses.count, scan.losses.ranges()
                message = dataclasses.replace(message, lost=lost, lost_ranges=ranges)
                scan.losses = Losses()
            self.messages.append(message)
            self._size += size
            scan.position = record.offset + 1
            if len(self.messages) >= self._max_records:
                self.is_full = True
                return False
        return True


def _record_bytes(record: Record) -> int:
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(len(name) + len(value or b"") for name, value in record.headers)
