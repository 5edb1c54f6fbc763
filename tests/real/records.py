"""Records that can be recognised: who published them, the how-manieth they are, whether whole.

A value is `NAME NUMBER SIZE|` and then filler up to SIZE bytes, made from the number: whatever is
found in a log later is either exactly what somebody published, or an error by itself.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

#: Kept below the size of a batch, which librdkafka bounds at 1,000,000 bytes.
LARGEST_BYTES: Final = 700_000
_FILLER: Final = random.Random(0).randbytes(2 * LARGEST_BYTES)


class Identity(NamedTuple):
    """The `number`th record, counted from 0, that a publisher gave to a partition."""

    publisher: str
    number: int


class NotOurs(Exception):
    """Bytes that nobody published."""


def value_of(identity: Identity, size: int) -> bytes:
    head = b"%s %d %d|" % (identity.publisher.encode(), identity.number, size)
    start = identity.number % LARGEST_BYTES
    return head + _FILLER[start : start + size - len(head)]


def identify(value: bytes | None) -> Identity:
    """Whose record it is. NotOurs unless every byte of it is as it was published."""
    try:
        head = bytes((value or b"").partition(b"|")[0]).decode("ascii")
        publisher, number, size = head.split(" ")
        identity = Identity(publisher, int(number))
        if value == value_of(identity, int(size)):
            return identity
    except ValueError:
        pass
    raise NotOurs(f"nobody published {value!r:.80}")


def any_size(source: random.Random) -> int:
    """Mostly small; some larger than what the journal holds inline; few near a batch's bound."""
    kind = source.random()
    if kind < 0.95:
        return source.randint(40, 1_000)
    if kind < 0.995:
        return source.randint(1_000, 40_000)
    return source.randint(100_000, LARGEST_BYTES)
