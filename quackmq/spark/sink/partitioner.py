"""Choose the partition of each row: the one that every other producer of the topic chooses.

This is `quackmq.model.partitioning` for whole columns: numpy hashes all keys at once. Both modules
give the same partition for the same key. `legacy` topics are the exception: there the sink uses
murmur2, as its earlier versions did, so that no key moves to another partition.

Rows without a key are spread in runs, one partition after the other, so that few rows make few
batches. The functions are pure: columns in, columns out.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quackmq.model.partitioning import (
    MURMUR2_MULTIPLIER,
    MURMUR2_SEED,
    Partitioner,
    add_murmur2_words,
)
from quackmq.spark import limits

Numbers = np.ndarray[Any, np.dtype[Any]]

_MULTIPLIER: Final = np.uint32(MURMUR2_MULTIPLIER)
#: If fewer keys than this have bytes left, they are hashed one by one. A numpy step costs the same
#: for one key as for this many.
_FEW_KEYS: Final = 16


def choose_partitions(
    keys: pa.Array | None, count: int, partition_count: int, first: int, partitioner: Partitioner
) -> Numbers:
    """Return the partition of each of `count` rows. Rows without a partitioning key are spread over
    all partitions, starting at `first`."""
    # The length of a run: at most one run for each partition, and no very short runs.
    spread = max(limits.SPARK_SPREAD_ROWS, -(-count // partition_count))
    if keys is None or keys.null_count == count:
        return (first + np.arange(count) // spread) % partition_count
    has_no_key = np.asarray(keys.is_null())
    if partitioner is Partitioner.CRC32:
        chosen = _hash_crc32(keys) % partition_count
        # librdkafka treats an empty key like a missing one.
        has_no_key = has_no_key | (np.asarray(pc.binary_length(keys).fill_null(0)) == 0)
    else:
        # Clear the sign bit, as the Java client does.
        chosen = (murmur2(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64) % partition_count
    if has_no_key.any():
        chosen[has_no_key] = (first + np.arange(int(has_no_key.sum())) // spread) % partition_count
    return chosen


def _hash_crc32(keys: pa.Array) -> Numbers:
    hashes = (zlib.crc32(key or b"") for key in keys.to_pylist())
    return np.fromiter(hashes, np.int64, len(keys))


def murmur2(keys: pa.Array) -> Numbers:
    """Return the 32-bit hash of each value of a binary column. A null has the hash of an empty
    value."""
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
    begins, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    data = _pad(keys.buffers()[2], int(offsets[-1]))
    # A view of the 4 bytes from each position on. It copies nothing.
    words = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
    hashes = lengths.astype(np.uint32) ^ np.uint32(MURMUR2_SEED)
    word_counts = lengths >> 2
    for step in range(int(word_counts.max(initial=0))):
        rows = np.flatnonzero(word_counts > step)
        if len(rows) < _FEW_KEYS:
            for row in rows.tolist():
                begin, end = int(begins[row]), int(begins[row] + lengths[row])
                key = data[begin:end]
                hashes[row] = add_murmur2_words(int(hashes[row]), key, 4 * step, len(key))
            break
        if len(rows) == len(hashes):
            hashes = _mix_words(hashes, words[begins + 4 * step])
        else:
            hashes[rows] = _mix_words(hashes[rows], words[begins[rows] + 4 * step])
    return _finish_hashes(hashes, words, begins, lengths)


def _pad(buffer: pa.Buffer | None, size: int) -> bytes:
    """Return the first `size` bytes and 4 zero bytes: a word can be read at every position."""
    return b"".join((b"" if buffer is None else memoryview(buffer)[:size], bytes(4)))


def _mix_words(hashes: Numbers, words: Numbers) -> Numbers:
    """Return the hashes after the next word of each key: one step of murmur2 for many keys."""
    words = words * _MULTIPLIER
    words ^= words >> np.uint32(24)
    words *= _MULTIPLIER
    mixed: Numbers = hashes * _MULTIPLIER ^ words
    return mixed


def _finish_hashes(hashes: Numbers, words: Numbers, begins: Numbers, lengths: Numbers) -> Numbers:
    """Mix in the one to three bytes after the last whole word of each key; finish the hashes."""
    tail_bytes = lengths & 3
    rows = np.flatnonzero(tail_bytes)
    if len(rows):
        masks = (np.uint32(1) << (np.uint32(8) * tail_bytes[rows].astype(np.uint32))) - np.uint32(1)
        tails = words[begins[rows] + (lengths[rows] & ~3)] & masks
        hashes[rows] = (hashes[rows] ^ tails) * _MULTIPLIER
    hashes ^= hashes >> np.uint32(13)
    hashes *= _MULTIPLIER
    hashes ^= hashes >> np.uint32(15)
    return hashes
