"""Joining two CRC32C checksums into that of the two pieces of data together, without the data.

A checksum is linear: behind n more bytes, the part of it that comes from the first piece is the
first checksum times a fixed 32 x 32 matrix of bits to the power n. The powers of two are kept as
tables, four of 256 entries each, so that one application is four look-ups.
"""

from __future__ import annotations

from functools import cache
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78
_Tables = tuple[list[int], list[int], list[int], list[int]]


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of A and B together, of those of A and of B and the length of B."""
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _apply(_tables(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


def _apply(tables: _Tables, value: int) -> int:
    return (
        tables[0][value & 0xFF]
        ^ tables[1][value >> 8 & 0xFF]
        ^ tables[2][value >> 16 & 0xFF]
        ^ tables[3][value >> 24]
    )


@cache
def _tables(power: int) -> _Tables:
    """What 2^power bytes of zeros do to a checksum."""
    columns = [_behind_bytes(1 << bit, power) for bit in range(32)]
    parts = [[0] * 256 for _ in range(4)]
    for part in range(4):
        for value in range(1, 256):
            lowest = (value & -value).bit_length() - 1
            parts[part][value] = parts[part][value & value - 1] ^ columns[8 * part + lowest]
    return parts[0], parts[1], parts[2], parts[3]


def _behind_bytes(value: int, power: int) -> int:
    if power:
        half = _tables(power - 1)
        return _apply(half, _apply(half, value))
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value
