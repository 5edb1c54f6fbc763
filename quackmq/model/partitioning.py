"""The partition of a key: one function for every protocol, client and job. Pure.

Messages with the same key must reach the same partition, whichever program publishes them. So every
part of QuackMQ that chooses a partition calls this module. A topic's policy `partitioner` says how
to choose:

    murmur2   the hash of the Java client, kafka-python, aiokafka, kafkajs and Spark's connector;
              the default of new topics
    crc32     the hash of librdkafka's own default, `consistent_random`
    legacy    the rule before topics had this setting: CRC32, but murmur2 in Spark's sink; topics of
              that time keep it, so that an upgrade moves no key

Spark's sink hashes whole columns; its form of `murmur2` is `quackmq.spark.sink.partitioner`, and a
test compares the two.

Not promised: that a key stays in its partition when the topic gets more partitions.
"""

from __future__ import annotations

import sys
import zlib
from enum import StrEnum
from typing import Final

MURMUR2_SEED: Final = 0x9747B28C
MURMUR2_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
#: The Java client clears the sign of the hash before it divides.
_WITHOUT_SIGN: Final = 0x7FFFFFFF


class Partitioner(StrEnum):
    """How a topic's keys choose their partition."""

    MURMUR2 = "murmur2"
    CRC32 = "crc32"
    LEGACY = "legacy"


def choose_partition(partitioner: Partitioner, key: bytes | None, partitions: int) -> int | None:
    """Return the partition of a key, or None if the publisher may choose any partition.

    A record without a key may go anywhere. With `crc32`, so may a record with an empty key, as in
    librdkafka."""
    if key is None:
        return None
    if partitioner is Partitioner.MURMUR2:
        return partition_for_hash(murmur2(key), partitions)
    if not key and partitioner is Partitioner.CRC32:
        return None
    return zlib.crc32(key) % partitions


def partition_for_hash(hashed: int, partitions: int) -> int:
    """Return the partition for a murmur2 hash."""
    return (hashed & _WITHOUT_SIGN) % partitions


def murmur2(key: bytes) -> int:
    """Return the 32-bit hash of a key, as the Java client computes it."""
    return finish_murmur2(add_murmur2_words(begin_murmur2(key), key, 0, len(key)), key)


def begin_murmur2(key: bytes) -> int:
    """Return the hash before the first word of a key."""
    return MURMUR2_SEED ^ len(key) & _MASK


def add_murmur2_words(hashed: int, key: bytes, start: int, end: int) -> int:
    """Mix the whole words of four bytes in `key[start:end]` into a hash; `start` is a multiple of
    four. A long key can be hashed in several steps."""
    view = memoryview(key)[start : start + (end - start) // 4 * 4]
    words = view.cast("I") if sys.byteorder == "little" else _little_endian(view)
    for word in words:
        word = word * MURMUR2_MULTIPLIER & _MASK
        hashed = (hashed * MURMUR2_MULTIPLIER ^ (word ^ word >> 24) * MURMUR2_MULTIPLIER) & _MASK
    return hashed


def finish_murmur2(hashed: int, key: bytes) -> int:
    """Mix in the one to three bytes behind the last whole word, and finish the hash."""
    tail = key[len(key) // 4 * 4 :]
    if tail:
        hashed = (hashed ^ int.from_bytes(tail, "little")) * MURMUR2_MULTIPLIER & _MASK
    hashed = (hashed ^ hashed >> 13) * MURMUR2_MULTIPLIER & _MASK
    return hashed ^ hashed >> 15


def _little_endian(view: memoryview) -> list[int]:
    """Return the words of four bytes, on a machine with the other byte order."""
    starts = range(0, len(view), 4)
    return [int.from_bytes(view[start : start + 4], "little") for start in starts]
