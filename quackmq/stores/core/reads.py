"""Reads a partition: from the tail if it reaches back far enough, else from the medium.

A committed read ends at the stable offset, and lists the aborted transactions in its range. If
nothing is open and nothing was aborted, it takes two comparisons more than any other read.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from quackmq.errors import OffsetOutOfRange, UnknownTopic
from quackmq.model.topic import AbortedTransaction
from quackmq.records.batch import spans
from quackmq.stores.core.medium import Medium
from quackmq.stores.core.partition_log import PartitionLog

Pieces = tuple[memoryview, ...]
_BASE_OFFSET: Final = struct.Struct(">q")


class LogReader:
    """Reads the batches of any partition. Not thread-safe: call from the event loop."""

    def __init__(self, medium: Medium[Any]) -> None:
        self._medium = medium

    async def read(
        self, log: PartitionLog[Any], offset: int, max_bytes: int, first_max_bytes: int
    ) -> Pieces:
        """Return whole batches from the one with `offset` on, at most `max_bytes`; the first batch
        may be larger, up to `first_max_bytes`. Return none at the end of the log.

        Raises OffsetOutOfRange, DamagedData, StorageError if the medium cannot return the bytes,
        UnknownTopic if the topic is deleted meanwhile."""
        while True:
            check_offset(log, offset)
            if offset == log.high_watermark:
                return ()
            if log.tail.reaches(offset):
                return log.tail.read(offset, max_bytes, first_max_bytes)
            pieces = await self._medium.read(log, offset, max_bytes, first_max_bytes)
            if not pieces and log.is_deleted:
                raise UnknownTopic(f"topic {log.key.topic_id} was deleted")
            # Else the offset was trimmed meanwhile.
            if pieces or log.first_offset <= offset:
                return pieces

    async def read_committed(
        self, log: PartitionLog[Any], offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[Pieces, tuple[AbortedTransaction, ...]]:
        """Read as `read` does, up to the stable offset at the time of the call: undecided batches
        may be appended during the read. Return the batches and the aborted transactions among
        them."""
        end_offset = log.stable_offset
        # The offset is in range, but nothing from there on is decided.
        if end_offset <= offset <= log.high_watermark:
            return (), ()
        pieces = await self.read(log, offset, max_bytes, first_max_bytes)
        if log.high_watermark > end_offset:
            pieces = _before(pieces, end_offset)
        if not pieces or log.last_aborted_offset < offset:
            return pieces, ()
        aborted = await self._medium.find_aborted(log, offset, _last_offset(pieces))
        if offset < log.first_offset:
            # The offset was trimmed during the read. Aborted transactions may have been removed
            # with it, so it is unknown which of these records were aborted.
            raise OffsetOutOfRange(
                f"offset {offset} was trimmed: the first offset is {log.first_offset}"
            )
        return pieces, aborted


def check_offset(log: PartitionLog[Any], offset: int) -> None:
    """Raise OffsetOutOfRange if an offset is not in the log."""
    if not log.first_offset <= offset <= log.high_watermark:
        raise OffsetOutOfRange(
            f"offset {offset} is not between {log.first_offset} and {log.high_watermark}"
        )


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
