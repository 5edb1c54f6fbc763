"""What a consumer's subscription says, as far as a broker wants to know: the topics. Pure.

A group's members speak to each other in bytes that only they understand. Those of the protocol type
"consumer" begin alike in all versions:

    0         2              6
    +---------+--------------+------------------------------+- - -
    | version | topics       | for each: length, name       | user data, owned partitions, ...
    | i16     | i32, count   | i16, UTF-8                   |
    +---------+--------------+------------------------------+- - -

Whatever the bytes are, reading them takes time and memory in proportion to them and to a bound.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from quackmq.groups import limits

_HEAD: Final = struct.Struct(">hi")
_LENGTH: Final = struct.Struct(">h")


def subscribed_topics(subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """The topics of all subscriptions together; None if one of them makes no sense, or if they name
    more than limits.GROUP_SUBSCRIBED_TOPICS."""
    names: set[bytes] = set()
    left = limits.GROUP_SUBSCRIBED_TOPICS
    try:
        for subscription in subscriptions:
            left -= _collect(subscription, names, left)
        return frozenset(name.decode() for name in names)
    except (ValueError, struct.error):
        return None


def _collect(subscription: bytes, names: set[bytes], most: int) -> int:
    version: int
    count: int
    version, count = _HEAD.unpack_from(subscription)
    if version < 0 or not 0 <= count <= most:
        raise ValueError(f"no subscription: version {version}, {count} topics")
    position = _HEAD.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(subscription, position)
        position += _LENGTH.size
        name = subscription[position : position + length]
        if length < 0 or len(name) != length:
            raise ValueError("a name is longer than what there is")
        names.add(name)
        position += length
    return count
