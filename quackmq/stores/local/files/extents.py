"""Extents: which bytes of a segment's file lie in packs, and where. Pure values, no I/O.

Callers use a path and a position in it (its *logical* position). An extent says that `length` bytes
from a logical position on lie in a pack, from byte `pack_position` of the pack on. Bytes that no
extent covers lie in the file of that path. If both contain a byte, the extent is right.

The extents of one path are stored as one immutable byte string, because a broker has tens of
thousands of them. They are sorted by position and never overlap. Each row is (little endian)

    position u64 | length u32 | pack u32 | pack position u64
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_ROW: Final = struct.Struct("<QIIQ")
EXTENT_BYTES: Final = _ROW.size
NO_EXTENTS: Final = b""


class Extent(NamedTuple):
    """Bytes of a path that lie in a pack."""

    position: int
    length: int
    pack: int
    pack_position: int

    @property
    def end(self) -> int:
        return self.position + self.length


class Piece(NamedTuple):
    """Contiguous bytes: in a pack, or in the path's own file if `pack` is None."""

    pack: int | None
    position: int
    length: int


def encode(extents: Iterable[Extent]) -> bytes:
    return b"".join(_ROW.pack(*extent) for extent in extents)


def decode(rows: bytes) -> list[Extent]:
    return [Extent._make(row) for row in _ROW.iter_unpack(rows)]


def count(rows: bytes) -> int:
    return len(rows) // EXTENT_BYTES


def bytes_in(rows: bytes) -> int:
    """Return how many bytes of the path lie in packs."""
    return sum(length for _, length, _, _ in _ROW.iter_unpack(rows))


def lay_over(rows: bytes, new: Extent) -> tuple[bytes, list[Extent]]:
    """Add an extent, which replaces everything that it covers. Return the new rows, and the parts
    of older extents that are now unused."""
    # Mostly a path grows at its end.
    if not rows or new.position >= _end(rows):
        return rows + _ROW.pack(*new), []
    remaining: list[Extent] = []
    replaced: list[Extent] = []
    for old in decode(rows):
        if old.end <= new.position or new.end <= old.position:
            remaining.append(old)
            continue
        head_length = new.position - old.position
        if head_length > 0:
            remaining.append(old._replace(length=head_length))
        rest_length = old.end - new.end
        if rest_length > 0:
            skipped = old.length - rest_length
            remaining.append(Extent(new.end, rest_length, old.pack, old.pack_position + skipped))
        start, end = max(old.position, new.position), min(old.end, new.end)
        replaced.append(
            Extent(start, end - start, old.pack, old.pack_position + start - old.position)
        )
    remaining.append(new)
    return encode(sorted(remaining)), replaced


def piece_at(rows: bytes, position: int, length: int) -> Piece:
    """Return where the first of `length` bytes lie, and how many of them are contiguous there."""
    for start, size, pack, pack_position in _ROW.iter_unpack(rows):
        if position < start:
            return Piece(None, position, min(length, start - position))
        if position < start + size:
            skipped = position - start
            return Piece(pack, pack_position + skipped, min(length, size - skipped))
    return Piece(None, position, length)


def pieces(rows: bytes, position: int, length: int) -> list[Piece]:
    """Return where `length` bytes lie, in the order of the bytes."""
    found: list[Piece] = []
    while length:
        piece = piece_at(rows, position, length)
        found.append(piece)
        position += piece.length
        length -= piece.length
    return found


def worth_joining(rows: bytes, position: int, length: int, most_bytes: int) -> list[Extent]:
    """Return the last extents, if they end at `position`, that should be joined with a new extent
    of `length` bytes there.

    Extents are joined with a new one that is at least half as large as they are. So a byte is
    rewritten only when its extent grows to at least one and a half times its size. Few extents are
    left, since each is then more than twice as large as the next one.
    """
    joined: list[Extent] = []
    total = length
    for extent in reversed(decode(rows)):
        if extent.end != position or extent.length > 2 * total:
            break
        if total + extent.length > most_bytes:
            break
        joined.append(extent)
        total += extent.length
        position = extent.position
    joined.reverse()
    return joined


def runs(extents: Sequence[Extent]) -> list[list[Extent]]:
    """Divide extents into runs that are contiguous."""
    found: list[list[Extent]] = []
    for extent in extents:
        if found and found[-1][-1].end == extent.position:
            found[-1].append(extent)
        else:
            found.append([extent])
    return found


def _end(rows: bytes) -> int:
    """Return where the last extent ends. There must be one."""
    position, length, _, _ = _ROW.unpack_from(rows, len(rows) - EXTENT_BYTES)
    end: int = position + length
    return end
