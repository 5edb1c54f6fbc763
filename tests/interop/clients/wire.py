"""What clients leave encoded in their answers."""

from __future__ import annotations

import struct


def assigned_partitions(assignment: bytes) -> list[tuple[str, int]]:
    """Decode the assignment of a classic group's member: its topics and partitions.

    version: int16 │ count: int32 │ length: int16, topic │ count: int32, partition: int32 … │ …
    """
    position = 0

    def take(kind: str) -> int:
        nonlocal position
        (number,) = struct.unpack_from(f">{kind}", assignment, position)
        position += struct.calcsize(f">{kind}")
        return int(number)

    take("h")
    found: list[tuple[str, int]] = []
    for _ in range(take("i")):
        length = take("h")
        topic = assignment[position : position + length].decode()
        position += length
        found += [(topic, take("i")) for _ in range(take("i"))]
    return found
