"""Joining two CRC32C checksums into that of the two pieces of data together, without the data.

A checksum is linear: behind n more bytes, the part of it that comes from the first piece is the
first checksum times a fixed 32 x 32 matrix of bits to the power n. The powers of two are kept as
tables, four of 256 entries each, so that one application is four look-ups.
"""

from __future__ import annotations

from typing import Final

_POLYNOMIAL: Final = 0x82F63B78
_Tables = tuple[list[int], list[int], list[int], list[int]]

#: What 1, 2, 4, … bytes of zeros do to a checksum, as far as anybody asked.
_powers: Final[list[_Tables]] = []


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of A and B together, of those of A and of B and the length of B."""
    while len(_powers) < second_bytes.bit_length():
        _powers.append(_tables(len(_powers)))
    # One look at a time: a call a step would take most of the time.
    for lowest, low, high, highest in _powers:
        if not second_bytes:
            break
        if second_bytes & 1:
            first = (
                lowest[first & 0xFF]
                ^ low[first >> 8 & 0xFF]
                ^ high[first >> 16 & 0xFF]
                ^ highest[first >> 24]
            )
        second_bytes >>= 1
    return first ^ second


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
        half = 1 << power - 1
        return joined(joined(value, 0, half), 0, half)
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value
