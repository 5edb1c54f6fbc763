"""Compute a digest of a write's rows that does not depend on their order or their tasks.

A write that comes again under its `writeId` is a repeat if it has the same rows. Spark promises no
order of rows, and may split them into other tasks the second time. So each row is hashed by itself,
to 128 bits, and the hashes are added up. Each task adds up the hashes of its rows. The driver adds
up the sums of the tasks whose rows are committed.

    row -> | topic | key | value | headers | -> two lanes of 64 bits -> sums modulo 2**64

The hash covers a row's topic, key, value and headers. It does not cover the time and the partition,
because each run may set them anew. A null and an empty text have different hashes. The hash finds
differences by accident or mistake. It is not collision-resistant: an attacker can find two writes
with the same digest.

The functions are pure: columns in, numbers out. Numpy does each step for all rows at once. The
broker stores the text form of a digest (`Digest.text`). After a change of the hash, a repeat of a
stored write would look like another write. So a change needs a new `_VERSION`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from quackmq.records.column_encoding import encode_headers
from quackmq.spark.sink.encode import Rows
from quackmq.spark.sink.partitioner import Numbers

_VERSION: Final = "rows-1"
_MASK: Final = 2**64 - 1
#: Fields longer than this are hashed one by one with BLAKE2b, which is fast for long input. Shorter
#: fields take one numpy step over all rows for every 8 bytes of the longest field.
_LONG_BYTES: Final = 512
#: How many rows are hashed at once: their lanes fit in the processor's cache.
_ROWS_AT_ONCE: Final = 8_192
#: The encoded headers of a row that has none.
_NO_HEADERS: Final = b"\x00"
# Odd numbers without a pattern: fractional parts of square roots, as in SHA-512.
_WORD_FACTOR: Final = np.uint64(0x6A09E667F3BCC909)
_FIRST_FACTOR: Final = np.uint64(0xBB67AE8584CAA73B)
_SECOND_FACTOR: Final = np.uint64(0x3C6EF372FE94F82B)
_FINAL_FACTOR: Final = np.uint64(0xA54FF53A5F1D36F1)


class Digest(NamedTuple):
    """The number of rows, and the sums of the two halves of their hashes."""

    records: int = 0
    first: int = 0
    second: int = 0

    def text(self) -> str:
        """Return the text form, which the broker stores and the driver compares."""
        return f"{_VERSION}:{self.records}:{self.first:016x}{self.second:016x}"


def merge_digests(digests: Iterable[Digest]) -> Digest:
    """Return the digest of all rows of these digests together."""
    records = first = second = 0
    for digest in digests:
        records += digest.records
        first += digest.first
        second += digest.second
    return Digest(records, first & _MASK, second & _MASK)


def compute_digest(topic: str, rows: Rows) -> Digest:
    """Return the digest of rows that are written to a topic."""
    headers = None if rows.headers is None else encode_headers(rows.headers)
    return merge_digests(
        _digest_rows(
            topic,
            None if rows.key is None else rows.key.slice(start, _ROWS_AT_ONCE),
            rows.value.slice(start, _ROWS_AT_ONCE),
            None if headers is None else headers.slice(start, _ROWS_AT_ONCE),
        )
        for start in range(0, len(rows.value), _ROWS_AT_ONCE)
    )


def _digest_rows(
    topic: str, key: pa.Array | None, value: pa.Array, headers: pa.Array | None
) -> Digest:
    """Return the digest of at most `_ROWS_AT_ONCE` rows; `headers` are encoded. A missing column of
    headers has the digest of a column of rows without headers."""
    lanes = _Lanes(topic, len(value))
    lanes.mix_column(key)
    lanes.mix_column(value)
    # The same digest as a column of rows without headers. A missing key counts as null.
    if headers is None:
        lanes.mix_constant(_NO_HEADERS)
    else:
        lanes.mix_column(headers)
    return Digest(len(value), *lanes.sums())


class _Lanes:
    """Build the hashes of all rows; each hash is two numbers of 64 bits."""

    def __init__(self, topic: str, count: int) -> None:
        first, second = _hash_halves(topic.encode())
        self._first = np.full(count, first, np.uint64)
        self._second = np.full(count, second, np.uint64)

    def mix_column(self, column: pa.Array | None) -> None:
        """Mix in one field of each row: its length, then its bytes."""
        if column is None:
            self._mix(slice(None), np.zeros(1, np.uint64))
            return
        begins, lengths, data = _read_buffers(column)
        # Mark a null with 0 and an empty text with 1, so that their hashes differ.
        length_marks = lengths.astype(np.uint64) + np.uint64(1)
        if column.null_count:
            is_null = np.asarray(column.is_null())
            lengths[is_null] = 0
            length_marks[is_null] = 0
        self._mix(slice(None), length_marks)
        long_rows = np.flatnonzero(lengths > _LONG_BYTES)
        if len(long_rows):
            self._mix_long_fields(long_rows, begins, lengths, data)
            # The next step must not mix them in again.
            lengths[long_rows] = 0
        self._mix_short_fields(begins, lengths, data)

    def mix_constant(self, field: bytes) -> None:
        """Mix the same field, of 1 to 8 bytes, into all rows. The result is that of `mix_column`
        for a column with this field in each row."""
        self._mix(slice(None), np.array([len(field) + 1], np.uint64))
        word = int.from_bytes(field, "little")
        self._mix(slice(None), np.array([word], np.uint64))

    def sums(self) -> tuple[int, int]:
        """Finish the hashes; return the sum of each lane, modulo 2**64. Call it once: it changes
        the lanes."""
        for lane in (self._first, self._second):
            lane ^= lane >> np.uint64(32)
            lane *= _FINAL_FACTOR
            lane ^= lane >> np.uint64(29)
        return int(self._first.sum()), int(self._second.sum())

    def _mix_long_fields(
        self, rows: Numbers, begins: Numbers, lengths: Numbers, data: bytes
    ) -> None:
        """Mix in the fields of these rows, each reduced to 16 bytes by BLAKE2b."""
        view = memoryview(data)
        halves = np.array(
            [
                _hash_halves(view[begin : begin + length])
                for begin, length in zip(begins[rows].tolist(), lengths[rows].tolist(), strict=True)
            ],
            np.uint64,
        )
        self._mix(rows, halves[:, 0])
        self._mix(rows, halves[:, 1])

    def _mix_short_fields(self, begins: Numbers, lengths: Numbers, data: bytes) -> None:
        """Mix in the words of 8 bytes, each step for all rows that have that many words; then the
        last 1 to 7 bytes of each row."""
        # A view of the 8 bytes from each position on. It copies nothing.
        words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        word_counts = lengths >> 3
        max_words = int(word_counts.max(initial=0))
        common_words = int(word_counts.min(initial=0))
        for step in range(common_words):
            self._mix(slice(None), words[begins + 8 * step])
        for step in range(common_words, max_words):
            rows = np.flatnonzero(word_counts > step)
            self._mix(rows, words[begins[rows] + 8 * step])
        tail_bytes = lengths & 7
        rows = np.flatnonzero(tail_bytes)
        if len(rows):
            bits = np.uint64(8) * tail_bytes[rows].astype(np.uint64)
            masks = (np.uint64(1) << bits) - np.uint64(1)
            self._mix(rows, words[begins[rows] + (lengths[rows] & ~7)] & masks)

    def _mix(self, rows: slice | Numbers, words: Numbers) -> None:
        """Mix one word into the hash of each of these rows; numbers wrap at 2**64. The lanes mix
        by different steps, so that rows that collide in one lane rarely collide in the other."""
        mixed = words * _WORD_FACTOR
        mixed ^= mixed >> np.uint64(32)
        first = (self._first[rows] ^ mixed) * _FIRST_FACTOR
        first ^= first >> np.uint64(29)
        second = (self._second[rows] + mixed) * _SECOND_FACTOR
        second ^= second >> np.uint64(31)
        self._first[rows], self._second[rows] = first, second


def _read_buffers(column: pa.Array) -> tuple[Numbers, Numbers, bytes]:
    """Return where each value begins, each value's length, and the bytes. The bytes are padded, so
    that a word can be read at every position."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    begin, end = int(offsets[0]), int(offsets[-1])
    buffer = column.buffers()[2]
    content = b"" if buffer is None else memoryview(buffer)[begin:end]
    return offsets[:-1] - begin, np.diff(offsets), b"".join((content, bytes(8)))


def _hash_halves(field: bytes | memoryview) -> tuple[int, int]:
    digest = hashlib.blake2b(field, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
