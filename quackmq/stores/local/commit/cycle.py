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
from quackmq.records.crc_join import joined
from quackmq.stores.local.commit.pending import PendingCommit
from quackmq.stores.local.commit.write_back import write_chunks
from quackmq.stores.local.files import format
from quackmq.stores.local.files.format import Descriptor
from quackmq.stores.local.files.journal import Journal, Place
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.tail import Chunk

_CRC: Final = struct.Struct(">I")
#: For batches of this size and more, joining checksums costs less than reading the bytes again.
_LARGE_BATCH_BYTES: Final = 128 * limits.KIB


class Share(NamedTuple):
    """One partition's part of a cycle. `inline`: the frame contains its bytes."""

    log: PartitionLog
    chunks: list[Chunk]
    inline: bool


class Cycle:
    def __init__(self, gathered: PendingCommit, inline_bytes: int, frame_inline_bytes: int) -> None:
        self.gathered = gathered
        self.shares: list[Share] = []
        self.offsets = 0
        #: Whether any batches are written to a segment, so that the frame only refers to them.
        self.has_references = False
        most = inline_bytes
        if gathered.append_bytes > frame_inline_bytes:
            most = _most_inline(gathered, inline_bytes, frame_inline_bytes)
        payload = len(gathered.trims) * format.TRIM_BYTES
        payload += sum(format.change_bytes(len(encoded)) for _, encoded in gathered.changes)
        for log, chunks in gathered.chunks:
            log.plan(chunks)
            size = producer_batches = steps = 0
            for chunk in chunks:
                size += len(chunk.data)
                producer_batches += len(chunk.producer_batches)
                if chunk.steps is not None:
                    steps += len(chunk.steps)
                self.offsets += chunk.next_offset - chunk.base_offset
            inline = size <= most
            if not inline:
                self.has_references = True
            in_frame = size if inline else 0
            payload += format.append_bytes(len(chunks), producer_batches, in_frame, steps)
            self.shares.append(Share(log, chunks, inline))
        self.frame_bytes = format.frame_bytes(payload) if payload else 0
        #: Set by `write`, for the commit.
        self.descriptors: list[list[Descriptor]] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write: it contains only repeats of an earlier cycle."""
        return self.frame_bytes == 0

    @property
    def referenced_paths(self) -> dict[str, None]:
        return {
            chunk.segment.path: None
            for share in self.shares
            if not share.inline
            for chunk in share.chunks
        }

    # --- in the flush lane --------------------------------------------------------------------

    def write_segments(self, files: OpenFiles) -> None:
        for log, chunks, inline in self.shares:
            if not inline:
                write_chunks(files, chunks)
            for chunk in chunks:
                checksum = _checksum(chunk, log.flushed_crc if chunk.continues else 0)
                log.flushed_crc = chunk.region_crc = checksum
            self.descriptors.append([log.descriptor(chunk) for chunk in chunks])

    def write_frame(
        self,
        journal: Journal,
        place: Place,
        sync: format.Sync,
        run: int,
        synced_through: int,
        salt: int,
    ) -> None:
        frame = format.encode_frame(
            sync, run, journal.number, synced_through, self._payload(), salt
        )
        if len(frame) != self.frame_bytes:
            raise InternalError(
                f"a journal frame has {len(frame)} bytes instead of the planned "
                f"{self.frame_bytes}; none of it was written. This is a bug: please report it"
            )
        journal.write(place, frame)

    def _payload(self) -> Iterator[Buffer]:
        for share, descriptors in zip(self.shares, self.descriptors, strict=True):
            for chunk, descriptor in zip(share.chunks, descriptors, strict=True):
                data = chunk.data if share.inline else None
                yield from format.encode_append(descriptor, data)
        for _, encoded in self.gathered.changes:
            yield from format.encode_change(encoded)
        for log, first_offset in self.gathered.trims:
            yield from format.encode_trim(log.key, first_offset)


def _most_inline(gathered: PendingCommit, most: int, room: int) -> int:
    """Return the size up to which the frame contains the bytes of a share, at most `most`. The
    smallest shares come first: each of the others needs a sync of its own file."""
    total = 0
    for size in sorted(sum(len(chunk.data) for chunk in chunks) for _, chunks in gathered.chunks):
        total += size
        if size > most or total > room:
            return min(most, size - 1)
    return most


def _checksum(chunk: Chunk, start: int) -> int:
    """Return the checksum of a region including this chunk. A large batch was read once, when its
    own checksum was verified, so that checksum is used instead of its bytes."""
    if len(chunk.data) < chunk.batches * _LARGE_BATCH_BYTES:
        return crc32c(chunk.data, start)
    checksum = start
    for position, size, _, _ in spans(chunk.data):
        head = chunk.data[position : position + CRC_START]
        (own,) = _CRC.unpack_from(head, CRC_POSITION)
        checksum = joined(crc32c(head, checksum), own, size - CRC_START)
    return checksum
