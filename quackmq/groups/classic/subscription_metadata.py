"""Reads the topics from a consumer's subscription, the only part that a broker needs. Pure.

The members of a group exchange bytes that only they understand. Those of protocol type "consumer"
begin the same in all versions:

    0         2              6
    +---------+--------------+------------------------------+- - -
    | version | topics       | for each: length, name       | user data, owned partitions, ...
    | i16     | i32, count   | i16, UTF-8                   |
    +---------+--------------+------------------------------+- - -

Reading any bytes takes time and memory in proportion to their length, and within a bound.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from quackmq.groups import limits

_HEAD: Final = struct.Struct(">hi")
_LENGTH: Final = struct.Struct(">h")


def subscribed_topics(subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """Return the topics of all subscriptions; None if one of them is invalid, or if they name more
    than limits.GROUP_SUBSCRIBED_TOPICS."""
    names: set[bytes] = set()
    remaining = limits.GROUP_SUBSCRIBED_TOPICS
    try:
        for subscription in subscriptions:
            remaining -= _add_topics(subscription, names, remaining)
        return frozenset(name.decode() for name in names)
    except (ValueError, struct.error):
        return None


def _add_topics(subscription: bytes, names: set[bytes], limit: int) -> int:
    """Add the topics of one subscription to `names`; return their number. Raises ValueError or
    struct.error for invalid bytes, ValueError for more than `limit` topics."""
    version: int
    count: int
    version, count = _HEAD.unpack_from(subscription)
    if version < 0 or not 0 <= count <= limit:
        raise ValueError(f"invalid subscription: version {version}, {count} topics")
    position = _HEAD.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(subscription, position)
        position += _LENGTH.size
        name = subscription[position : position + length]
        if length < 0 or len(name) != length:
            raise ValueError("a name is longer than the subscription")
        names.add(name)
        position += length
    return count
