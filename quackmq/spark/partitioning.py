"""Which partition a row goes to: where Kafka's own clients would put it.

A key's bytes are hashed as the Java client does it (murmur2), so that a key that Spark writes and
one that a Kafka producer writes meet in one partition. Rows without a key are spread: in runs, one
partition after the other, so that few rows make few batches.

Pure: columns in, columns out. What is done for each row is done by numpy, for all rows at once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from quackmq import limits

Numbers = np.ndarray[Any, np.dtype[Any]]

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
#: Fewer keys than this that are longer than all others are hashed one by one: a step over all of
#: them costs the same for one key as for these.
_FEW_KEYS: Final = 16


def partitions_of(keys: pa.Array | None, count: int, partitions: int, first: int) -> Numbers:
    """The partition of each of `count` rows. `first` is where rows without a key begin."""
    spread = max(limits.SPARK_SPREAD_ROWS, -(-count // partitions))
    if keys is None or keys.null_count == count:
        return (first + np.arange(count) // spread) % partitions
    hashed = (murmur2(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64) % partitions
    if keys.null_count:
        absent = np.asarray(keys.is_null())
        hashed[absent] = (first + np.arange(int(absent.sum())) // spread) % partitions
    return hashed


def murmur2(keys: pa.Array) -> Numbers:
    """The hash of every value of a column of bytes, as 32 bits; of a null, that of no bytes."""
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
    begins, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    data = _padded(keys.buffers()[2], int(offsets[-1]))
    words = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
    hashes = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    counts = lengths >> 2
    for word in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > word)
        if len(rows) < _FEW_KEYS:
            for row in rows.tolist():
                begin, end = int(begins[row]), int(begins[row] + lengths[row])
                hashes[row] = _rest(data[begin:end], word, int(hashes[row]))
            break
        if len(rows) == len(hashes):
            hashes = _mixed(hashes, words[begins + 4 * word])
        else:
            hashes[rows] = _mixed(hashes[rows], words[begins[rows] + 4 * word])
    return _finished(hashes, words, begins, lengths)


def _padded(buffer: pa.Buffer | None, size: int) -> bytes:
    """The bytes, and so many more that a word can be read at each of them."""
    return b"".join((b"" if buffer is None else memoryview(buffer)[:size], bytes(4)))


def _mixed(hashes: Numbers, words: Numbers) -> Numbers:
    words = words * np.uint32(_MULTIPLIER)
    words ^= words >> np.uint32(24)
    words *= np.uint32(_MULTIPLIER)
    mixed: Numbers = hashes * np.uint32(_MULTIPLIER) ^ words
    return mixed


def _rest(key: bytes, first_word: int, value: int) -> int:
    """The words of one key from one of them on, mixed into what those before it have made."""
    for position in range(4 * first_word, len(key) // 4 * 4, 4):
        word = int.from_bytes(key[position : position + 4], "little") * _MULTIPLIER & _MASK
        word = (word ^ word >> 24) * _MULTIPLIER & _MASK
        value = value * _MULTIPLIER & _MASK ^ word
    return value


def _finished(hashes: Numbers, words: Numbers, begins: Numbers, lengths: Numbers) -> Numbers:
    """With the one to three bytes behind the last whole word of each key."""
    left = lengths & 3
    rows = np.flatnonzero(left)
    if len(rows):
        masks = (np.uint32(1) << (np.uint32(8) * left[rows].astype(np.uint32))) - np.uint32(1)
        tails = words[begins[rows] + (lengths[rows] & ~3)] & masks
        hashes[rows] = (hashes[rows] ^ tails) * np.uint32(_MULTIPLIER)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(_MULTIPLIER)
    hashes ^= hashes >> np.uint32(15)
    return hashes
