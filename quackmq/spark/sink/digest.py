"""A digest of the rows of a write, whatever their order and however they are spread over tasks.

A write that comes again under its `writeId` is a repeat if it has the same rows. Spark promises no
order of rows, and may split them into other tasks the second time. So each row is hashed by itself,
to 128 bits, and the hashes are added up: each task adds up its own, and the driver adds up those of
the tasks whose rows count.

    row -> | topic | key | value | headers | -> two lanes of 64 bits -> sums modulo 2**64

A row is its topic, key, value and headers. Its time and partition do not count: they may be set
anew by each run. A null is not an empty text. The hash finds differences by accident or mistake;
it does not withstand somebody who searches for two writes with the same digest.

Pure: columns in, numbers out. Whatever is done for each row is done by numpy for all rows at once.
The word that is made of a digest is stored by the broker: changing the hash makes repeats of stored
writes look like other writes, so a change needs another `_VERSION`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from quackmq.archive.parquet.to_batches import headers_of
from quackmq.spark.sink.encode import Rows
from quackmq.spark.sink.partitioner import Numbers

_VERSION: Final = "rows-1"
_MASK: Final = 2**64 - 1
#: Fields of more bytes are hashed one by one, by a function that is fast for those: a step over all
#: rows is made for every 8 bytes of the longest of the others.
_LONG_BYTES: Final = 512
#: Rows that are hashed at one go: their lanes stay in the processor's cache.
_ROWS: Final = 8_192
#: Headers of a row that has none, as they are encoded.
_NO_HEADERS: Final = b"\x00"
# Odd numbers without a pattern: the fractional parts of square roots, as in SHA-512.
_WORD: Final = np.uint64(0x6A09E667F3BCC909)
_FIRST: Final = np.uint64(0xBB67AE8584CAA73B)
_SECOND: Final = np.uint64(0x3C6EF372FE94F82B)
_LAST: Final = np.uint64(0xA54FF53A5F1D36F1)


class Digest(NamedTuple):
    """Of so many rows: the sums of the two halves of their hashes."""

    records: int = 0
    first: int = 0
    second: int = 0

    def word(self) -> str:
        """The digest as it is stored and compared."""
        return f"{_VERSION}:{self.records}:{self.first:016x}{self.second:016x}"


def merged(digests: Iterable[Digest]) -> Digest:
    """The digest of all the rows that these are digests of."""
    records = first = second = 0
    for each in digests:
        records += each.records
        first += each.first
        second += each.second
    return Digest(records, first & _MASK, second & _MASK)


def digest_of(topic: str, rows: Rows) -> Digest:
    """The digest of rows for a topic."""
    headers = None if rows.headers is None else headers_of(rows.headers)
    return merged(
        _digest(
            topic,
            None if rows.key is None else rows.key.slice(start, _ROWS),
            rows.value.slice(start, _ROWS),
            None if headers is None else headers.slice(start, _ROWS),
        )
        for start in range(0, len(rows.value), _ROWS)
    )


def _digest(topic: str, key: pa.Array | None, value: pa.Array, headers: pa.Array | None) -> Digest:
    lanes = _Lanes(topic, len(value))
    lanes.take(key)
    lanes.take(value)
    if headers is None:
        lanes.take_constant(_NO_HEADERS)
    else:
        lanes.take(headers)
    return Digest(len(value), *lanes.sums())


class _Lanes:
    """The hashes of all rows while they are made, each as two numbers of 64 bits."""

    def __init__(self, topic: str, count: int) -> None:
        first, second = _halves(topic.encode())
        self._first = np.full(count, first, np.uint64)
        self._second = np.full(count, second, np.uint64)

    def take(self, column: pa.Array | None) -> None:
        """Mix in a field of each row: its length, and its bytes."""
        if column is None:
            self._mix(slice(None), np.zeros(1, np.uint64))
            return
        begins, lengths, data = _bytes_of(column)
        # So that a null is nothing, and an empty text is something.
        marks = lengths.astype(np.uint64) + np.uint64(1)
        if column.null_count:
            absent = np.asarray(column.is_null())
            lengths[absent] = 0
            marks[absent] = 0
        self._mix(slice(None), marks)
        long = np.flatnonzero(lengths > _LONG_BYTES)
        if len(long):
            self._take_long(long, begins, lengths, data)
            lengths[long] = 0
        self._take_short(begins, lengths, data)

    def take_constant(self, field: bytes) -> None:
        """Mix the same field into all rows, as `take` would."""
        self._mix(slice(None), np.array([len(field) + 1], np.uint64))
        word = int.from_bytes(field, "little")
        self._mix(slice(None), np.array([word], np.uint64))

    def sums(self) -> tuple[int, int]:
        for lane in (self._first, self._second):
            lane ^= lane >> np.uint64(32)
            lane *= _LAST
            lane ^= lane >> np.uint64(29)
        return int(self._first.sum()), int(self._second.sum())

    def _take_long(self, rows: Numbers, begins: Numbers, lengths: Numbers, data: bytes) -> None:
        view = memoryview(data)
        halves = np.array(
            [
                _halves(view[begin : begin + length])
                for begin, length in zip(begins[rows].tolist(), lengths[rows].tolist(), strict=True)
            ],
            np.uint64,
        )
        self._mix(rows, halves[:, 0])
        self._mix(rows, halves[:, 1])

    def _take_short(self, begins: Numbers, lengths: Numbers, data: bytes) -> None:
        """Word by word, over the rows that have so many; then the bytes behind the last one."""
        words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
        counts = lengths >> 3
        most = int(counts.max(initial=0))
        everywhere = int(counts.min(initial=0))
        for step in range(everywhere):
            self._mix(slice(None), words[begins + 8 * step])
        for step in range(everywhere, most):
            rows = np.flatnonzero(counts > step)
            self._mix(rows, words[begins[rows] + 8 * step])
        left = lengths & 7
        rows = np.flatnonzero(left)
        if len(rows):
            bits = np.uint64(8) * left[rows].astype(np.uint64)
            masks = (np.uint64(1) << bits) - np.uint64(1)
            self._mix(rows, words[begins[rows] + (lengths[rows] & ~7)] & masks)

    def _mix(self, rows: slice | Numbers, words: Numbers) -> None:
        mixed = words * _WORD
        mixed ^= mixed >> np.uint64(32)
        first = (self._first[rows] ^ mixed) * _FIRST
        first ^= first >> np.uint64(29)
        second = (self._second[rows] + mixed) * _SECOND
        second ^= second >> np.uint64(31)
        self._first[rows], self._second[rows] = first, second


def _bytes_of(column: pa.Array) -> tuple[Numbers, Numbers, bytes]:
    """Where each value begins, how long it is, and the bytes, with enough behind them for a word to
    be read at each."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    begin, end = int(offsets[0]), int(offsets[-1])
    buffer = column.buffers()[2]
    content = b"" if buffer is None else memoryview(buffer)[begin:end]
    return offsets[:-1] - begin, np.diff(offsets), b"".join((content, bytes(8)))


def _halves(field: bytes | memoryview) -> tuple[int, int]:
    found = hashlib.blake2b(field, digest_size=16).digest()
    return int.from_bytes(found[:8], "little"), int.from_bytes(found[8:], "little")
