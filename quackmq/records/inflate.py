"""Decompression with a bound on its output: a batch of 33 kB can inflate to 1 GiB.

Promised: `inflate` returns the whole uncompressed data, or raises CorruptBatch. It never produces
more than `max_bytes`, whatever size the compressed bytes claim. It never holds more than a small
multiple of that (zstd also keeps a window of up to 128 MiB).
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

import cramjam

from quackmq import limits
from quackmq.errors import CorruptBatch

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES: Final = 16
_BLOCK_LENGTH: Final = struct.Struct(">i")


def inflate(compression: str, data: memoryview, max_bytes: int) -> memoryview:
    """Decompress `data`; `compression` is one of `quackmq.records.batch.COMPRESSIONS`. Raises
    CorruptBatch."""
    try:
        output = _INFLATERS[compression](data, max_bytes)
    except (zlib.error, cramjam.DecompressionError) as error:
        raise CorruptBatch(
            f"cannot decompress the batch from {compression} to {max_bytes} bytes or less: {error}"
        ) from error
    if len(output) > max_bytes:
        raise _too_large_error(max_bytes)
    return output


def _keep_uncompressed(data: memoryview, max_bytes: int) -> memoryview:
    """Return the data of a batch without compression."""
    return data


def _gunzip(data: memoryview, max_bytes: int) -> memoryview:
    """Decompress one gzip member, as every producer writes it. Supporting more members would take
    quadratic time."""
    # 31 means the gzip format with the largest window.
    inflater = zlib.decompressobj(wbits=31)
    # One byte beyond the bound is enough to see that it is exceeded.
    output = inflater.decompress(data, max_bytes + 1)
    if len(output) > max_bytes:
        raise _too_large_error(max_bytes)
    if not inflater.eof or inflater.unused_data:
        raise CorruptBatch("the batch's gzip stream does not end where the batch ends")
    return memoryview(output)


def _unsnappy(data: memoryview, max_bytes: int) -> memoryview:
    """Decompress plain snappy, as librdkafka writes it, or blocks with a header, as Java does:

    +---------------+---------+------------+--------+-----------+--------+------
    | 82 SNAPPY 00  | version | compatible | length | a block   | length | ...
    | 8 bytes       | i32     | i32        | i32    | of snappy | i32    |
    +---------------+---------+------------+--------+-----------+--------+------
    """
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _unsnappy_block(data, 0, max_bytes)
    output = bytearray()
    position = _XERIAL_HEADER_BYTES
    while position < len(data):
        if position + _BLOCK_LENGTH.size > len(data):
            raise CorruptBatch("the batch's last snappy block is truncated")
        (length,) = _BLOCK_LENGTH.unpack_from(data, position)
        position += _BLOCK_LENGTH.size
        if not 0 < length <= len(data) - position:
            raise CorruptBatch(f"a snappy block says it has {length} bytes")
        output += _unsnappy_block(data[position : position + length], len(output), max_bytes)
        position += length
    return memoryview(output)


def _unsnappy_block(block: memoryview, inflated_bytes: int, max_bytes: int) -> memoryview:
    # The decoder allocates the length at the front and never returns more.
    if inflated_bytes + cramjam.snappy.decompress_raw_len(block) > max_bytes:
        raise _too_large_error(max_bytes)
    return memoryview(cramjam.snappy.decompress_raw(block))


def _unlz4(data: memoryview, max_bytes: int) -> memoryview:
    return _decompress_into_growing_buffer(cramjam.lz4.decompress_into, data, max_bytes)


def _unzstd(data: memoryview, max_bytes: int) -> memoryview:
    return _decompress_into_growing_buffer(cramjam.zstd.decompress_into, data, max_bytes)


def _decompress_into_growing_buffer(
    decompress_into: Callable[[Any, Any], int], data: memoryview, max_bytes: int
) -> memoryview:
    """Decompress into buffers of growing size. A frame's own size may be wrong or missing, so it is
    not used. Each buffer is four times as large: all failed attempts cost a third of the last one.
    """
    buffer_bytes = min(max(4 * len(data), limits.KIB), max_bytes)
    while True:
        output = _allocate(buffer_bytes)
        try:
            return memoryview(output)[: decompress_into(data, output)]
        except cramjam.DecompressionError:
            # A small buffer and bad bytes raise the same error; bad bytes fail again, and early.
            if buffer_bytes == max_bytes:
                raise
        buffer_bytes = min(4 * buffer_bytes, max_bytes)


def _allocate(size: int) -> bytearray | mmap.mmap:
    """Allocate a buffer. Large ones are mapped: pages that are never written cost nothing, so a few
    bad bytes cannot cost the clearing of 128 MiB."""
    if size <= limits.MIB:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _too_large_error(max_bytes: int) -> CorruptBatch:
    return CorruptBatch(f"the batch inflates to more than the {max_bytes} bytes allowed")


_INFLATERS: Final[dict[str, Callable[[memoryview, int], memoryview]]] = {
    "none": _keep_uncompressed,
    "gzip": _gunzip,
    "snappy": _unsnappy,
    "lz4": _unlz4,
    "zstd": _unzstd,
}
