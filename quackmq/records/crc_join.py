"""Join two CRC32C checksums into the checksum of both pieces of data, without the data.

A checksum is linear. Appending n bytes multiplies the first piece's share of it by a fixed 32 x 32
matrix of bits to the power n. The powers of two are stored as tables, four of 256 entries each, so
that one multiplication is four look-ups.
"""

from __future__ import annotations

from typing import Final

_POLYNOMIAL: Final = 0x82F63B78
_Tables = tuple[list[int], list[int], list[int], list[int]]

#: The effect of 1, 2, 4, … zero bytes on a checksum; filled as far as needed.
_powers: Final[list[_Tables]] = []


def join_checksums(first: int, second: int, second_bytes: int) -> int:
    """Return the checksum of A followed by B, from the checksums of A and B and the length of B."""
    while len(_powers) < second_bytes.bit_length():
        _powers.append(_build_tables(len(_powers)))
    # Inlined: one call per step would take most of the time.
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


def _build_tables(power: int) -> _Tables:
    """Build the tables of the effect that 2^power zero bytes have on a checksum."""
    columns = [_append_zero_bytes(1 << bit, power) for bit in range(32)]
    parts = [[0] * 256 for _ in range(4)]
    for part in range(4):
        for value in range(1, 256):
            # A value's effect is that of its lowest bit, and that of the rest, which is in the
            # table already: it is a smaller number.
            lowest = (value & -value).bit_length() - 1
            parts[part][value] = parts[part][value & value - 1] ^ columns[8 * part + lowest]
    return parts[0], parts[1], parts[2], parts[3]


def _append_zero_bytes(value: int, power: int) -> int:
    """Return the effect of 2^power zero bytes on a checksum with one bit set."""
    if power:
        # Append half of the bytes twice. That needs only the tables of smaller powers, which exist.
        half = 1 << power - 1
        return join_checksums(join_checksums(value, 0, half), 0, half)
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value
