"""Small batches that inflate to much, and a program that opens them with little memory.

`python -m tests.kit.batch_bombs` limits its own address space to what it has and 1 GiB, opens each
bomb and prints a line for it: name, size, the memory that it took at the peak, and what came of it.
"""

from __future__ import annotations

import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam

from quackmq import limits
from quackmq.records.batch import Batch
from quackmq.records.codec import decode
from tests.kit.batches import sealed, varint

GIB = 1 << 30
ZSTD_BLOCK = 128 * limits.KIB


def zstd_frame(size: int, start: bytes = b"", *, window_log: int = 17) -> bytes:
    """`start`, then zeros: a block of 4 bytes stands for 128 KiB of them. No size in front."""
    blocks, rest = divmod(size - len(start), ZSTD_BLOCK)
    header = struct.pack("<IBB", 0xFD2FB528, 0, (window_log - 10) << 3)
    return (
        header
        + struct.pack("<I", len(start) << 3)[:3]
        + start
        + (struct.pack("<I", ZSTD_BLOCK << 3 | 2)[:3] + b"\0") * blocks
        + struct.pack("<I", rest << 3 | 2 | 1)[:3]
        + b"\0"
    )


def gzip_bomb() -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    mebibyte = deflater.compress(bytes(limits.MIB)) + deflater.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + mebibyte * 1024 + b"\x03\x00" + bytes(8)


def lz4_bomb(times: int = 256) -> bytes:
    compressor = cramjam.lz4.Compressor(level=9, content_checksum=False, block_linked=False)
    compressor.compress(bytes(4 * limits.MIB))
    frame = bytes(compressor.finish())
    header_bytes, end_mark_bytes = 7, 4
    blocks = frame[header_bytes:-end_mark_bytes]
    return frame[:header_bytes] + blocks * times + frame[-end_mark_bytes:]


def snappy_bomb(says: int | None = None) -> bytes:
    """One zero, then copies of it: three bytes for 64. In 15 MiB no more than 320 fit."""
    copies = 5 * limits.MIB
    size = 1 + 64 * copies
    return unsigned(size if says is None else says) + b"\x00\x00" + b"\xfe\x01\x00" * copies


def snappy_blocks_bomb() -> bytes:
    size = 64 * limits.MIB
    block = bytes(cramjam.snappy.compress_raw(bytes(size)))
    return (
        b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + (struct.pack(">i", len(block)) + block) * 3
    )


def headers(count: int) -> bytes:
    """The beginning of a record of nothing but empty headers, which are two zeros each."""
    start = b"\x00\x00\x00\x01\x01" + varint(count)
    return varint(len(start) + 2 * count) + start


def records_of_headers(number: int) -> bytes:
    """Records of 2,000 empty headers each: no one of them is large."""
    records = bytearray()
    for delta in range(number):
        body = b"\x00\x00" + varint(delta) + b"\x01\x01" + varint(2_000) + bytes(4_000)
        records += varint(len(body)) + body
    return bytes(records)


def unsigned(number: int) -> bytes:
    output = bytearray()
    while number > 0x7F:
        output.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(output) + bytes([number])


def empty_promise() -> bytes:
    """A frame that says 1 GiB in front and holds five bytes."""
    frame = struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 7 << 3, GIB)
    return frame + struct.pack("<I", 5 << 3 | 1)[:3] + b"hello"


#: By name: compression bits, number of records, and what makes the bytes behind the header.
BOMBS: dict[str, tuple[int, int, Callable[[], bytes]]] = {
    "zstd, 33 kB for 1 GiB": (4, 1, lambda: zstd_frame(GIB)),
    "zstd, greatest window": (4, 1, lambda: zstd_frame(GIB, window_log=27)),
    "zstd, window of 2 GiB": (4, 1, lambda: zstd_frame(GIB, window_log=31)),
    "zstd, many frames": (4, 1, lambda: zstd_frame(limits.MIB) * 1024),
    "zstd, says 1 GiB": (4, 1, empty_promise),
    "gzip": (1, 1, gzip_bomb),
    "lz4": (3, 1, lz4_bomb),
    "lz4, many frames": (3, 1, lambda: lz4_bomb(1) * 256),
    "snappy": (2, 1, snappy_bomb),
    "snappy, says less": (2, 1, lambda: snappy_bomb(says=1_000)),
    "snappy, says 4 GiB": (2, 1, lambda: unsigned(2**32 - 1) + b"\x00\x00"),
    "snappy, blocks": (2, 1, snappy_blocks_bomb),
    "headers": (0, 1, lambda: headers(7 * limits.MIB) + bytes(14 * limits.MIB)),
    "headers, zstd": (
        4,
        1,
        lambda: zstd_frame(
            120 * limits.MIB + len(headers(60 * limits.MIB)), headers(60 * limits.MIB)
        ),
    ),
    "headers of many records": (0, 3_500, lambda: records_of_headers(3_500)),
    "headers of many records, zstd": (
        4,
        10_000,
        lambda: bytes(cramjam.zstd.compress(records_of_headers(10_000))),
    ),
}


def main() -> None:
    made = {
        name: sealed(make(), attributes=attributes, count=count)
        for name, (attributes, count, make) in BOMBS.items()
    }
    address_space = pages("statm", 0)
    resource.setrlimit(resource.RLIMIT_AS, (address_space + GIB, address_space + GIB))
    for name, data in made.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = pages("statm", 1)
        try:
            decode(Batch.parse(data))
            came = "records|"
        except BaseException as error:
            came = f"{type(error).__name__}|{error}"
        print(name, len(data), peak_bytes() - before, came, sep="|", flush=True)


def pages(file: str, field: int) -> int:
    return int(Path("/proc/self", file).read_text().split()[field]) * resource.getpagesize()


def peak_bytes() -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) * limits.KIB


if __name__ == "__main__":
    main()
