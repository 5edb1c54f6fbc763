"""A flush cycle: all changes submitted during the previous cycle, committed by one journal frame.

A cycle is gathered on the loop, written in the flush lane, and committed on the loop. The order of
writes makes it durable: everything that a frame refers to is synced first, then the frame is
written and synced, and only then are callers answered.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from quackmq import limits
from quackmq.errors import InternalError
from quackmq.records.batch import CRC_POSITION, CRC_START, Buffer, spans
from quackmq.records.crc_join import join_checksums
from quackmq.stores.core.pending import PendingCommit
from quackmq.stores.local.commit.write_back import write_chunks
from quackmq.stores.local.files import format
from quackmq.stores.local.files.journal import Journal, JournalLocation
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.segmented_log import SegmentChunk, SegmentedLog

_CRC: Final = struct.Struct(">I")
#: For batches of this size and more, joining checksums costs less than reading the bytes again.
_LARGE_BATCH_BYTES: Final = 128 * limits.KIB


class PartitionWrite(NamedTuple):
    """The chunks of one partition in a cycle. If `inline`, the frame contains their bytes; else it
    refers to the segment."""

    log: SegmentedLog
    chunks: list[SegmentChunk]
    inline: bool


class Cycle:
    """One frame: planned on the loop, written in the flush lane, committed on the loop."""

    def __init__(
        self, pending_commit: PendingCommit, inline_bytes: int, frame_inline_bytes: int
    ) -> None:
        """Assign positions to the chunks, decide which of them the frame contains, and compute the
        exact size of the frame. Runs on the loop."""
        self.pending_commit = pending_commit
        self.writes: list[PartitionWrite] = []
        self.offset_count = 0
        #: Whether any batches are written to a segment, so that the frame only refers to them.
        self.has_references = False
        max_inline_bytes = inline_bytes
        if pending_commit.append_bytes > frame_inline_bytes:
            max_inline_bytes = _find_max_inline_bytes(
                pending_commit, inline_bytes, frame_inline_bytes
            )
        payload = len(pending_commit.trims) * format.TRIM_BYTES
        payload += sum(format.change_bytes(len(encoded)) for _, encoded in pending_commit.changes)
        for log, chunks in pending_commit.chunks:
            log.assign_positions(chunks)
            size = producer_batches = boundaries = 0
            for chunk in chunks:
                size += len(chunk.data)
                producer_batches += len(chunk.producer_batches)
                if chunk.boundaries is not None:
                    boundaries += len(chunk.boundaries)
                self.offset_count += chunk.next_offset - chunk.base_offset
            inline = size <= max_inline_bytes
            if not inline:
                self.has_references = True
            in_frame = size if inline else 0
            payload += format.append_bytes(len(chunks), producer_batches, in_frame, boundaries)
            self.writes.append(PartitionWrite(log, chunks, inline))
        self.frame_bytes = format.frame_bytes(payload) if payload else 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write, because all batches repeat those of earlier cycles."""
        return self.frame_bytes == 0

    @property
    def referenced_paths(self) -> dict[str, None]:
        """The segment files that the frame refers to."""
        return {
            chunk.segment.path: None
            for write in self.writes
            if not write.inline
            for chunk in write.chunks
        }

    # --- in the flush lane --------------------------------------------------------------------

    def write_segments(self, files: OpenFiles) -> None:
        """Write the batches that the frame only refers to; set the checksums and the descriptors of
        all chunks. Runs before `write_frame`."""
        for log, chunks, inline in self.writes:
            if not inline:
                write_chunks(files, chunks)
            for chunk in chunks:
                checksum = _extend_checksum(chunk, log.flushed_crc if chunk.continues_region else 0)
                log.flushed_crc = chunk.region_crc = checksum
                chunk.descriptor = log.descriptor(chunk)

    def write_frame(
        self,
        journal: Journal,
        location: JournalLocation,
        sync: format.Sync,
        run: int,
        synced_through: int,
        salt: int,
    ) -> None:
        """Encode the frame and write it at its reserved location. Raises InternalError, before
        anything is written, unless the frame has the size for which the location was reserved."""
        frame = format.encode_frame(
            sync, run, journal.next_number, synced_through, self._payload(), salt
        )
        if len(frame) != self.frame_bytes:
            raise InternalError(
                f"a journal frame has {len(frame)} bytes instead of the planned "
                f"{self.frame_bytes}; none of it was written. This is a bug: please report it"
            )
        journal.write(location, frame)

    def _payload(self) -> Iterator[Buffer]:
        """Yield the entries of the frame: batches, then changes, then trims. Recovery applies them
        in this order, as `Committer._commit` does."""
        for write in self.writes:
            for chunk in write.chunks:
                data = chunk.data if write.inline else None
                yield from format.encode_append(chunk.descriptor, data)
        for _, encoded in self.pending_commit.changes:
            yield from format.encode_change(encoded)
        for log, first_offset in self.pending_commit.trims:
            yield from format.encode_trim(log.key, first_offset)


def _find_max_inline_bytes(
    pending_commit: PendingCommit, max_inline_bytes: int, frame_inline_bytes: int
) -> int:
    """Return the size up to which the frame contains the bytes of a partition: at most
    `max_inline_bytes`, and so small that all of them fit into `frame_inline_bytes`. The smallest
    partitions come first, because each of the others needs a sync of its own file."""
    total = 0
    for size in sorted(
        sum(len(chunk.data) for chunk in chunks) for _, chunks in pending_commit.chunks
    ):
        total += size
        if size > max_inline_bytes or total > frame_inline_bytes:
            # Bytes of this size, and above it, do not fit any more.
            return min(max_inline_bytes, size - 1)
    return max_inline_bytes


def _extend_checksum(chunk: SegmentChunk, start: int) -> int:
    """Return the checksum of a region including this chunk, given the checksum before it. The
    checksum of a large batch was verified when it arrived, so it is joined instead of computed
    again from the bytes."""
    # Compares the average size of a batch.
    if len(chunk.data) < chunk.batches * _LARGE_BATCH_BYTES:
        return crc32c(chunk.data, start)
    checksum = start
    for position, size, _, _ in spans(chunk.data):
        head = chunk.data[position : position + CRC_START]
        (batch_checksum,) = _CRC.unpack_from(head, CRC_POSITION)
        checksum = join_checksums(crc32c(head, checksum), batch_checksum, size - CRC_START)
    return checksum
