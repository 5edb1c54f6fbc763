"""Records into batches and out of them, and what becomes of batches that lie about theirs."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import cramjam
import pytest
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.default_records import _DefaultRecordBatchPy as OtherBatch

from quackmq import limits
from quackmq.errors import CorruptBatch, InvalidRequest, RecordTooLarge
from quackmq.records import limits as records_limits
from quackmq.records.batch import COMPRESSIONS, NO_TIMESTAMP, TIMESTAMP_TYPE_FLAG, Batch, Record
from quackmq.records.codec import (
    BatchWriter,
    decode,
    encode,
    inflate_batch,
    open_batch,
    section_records,
    sections,
    single,
)
from tests.kit.batches import batch_of, record_bytes, resealed, sealed, varint
from tests.kit.tables import each

RECORDS = [
    Record(0, 1_700_000_000_000, b"key", b"first", (("name", b"value"), ("none", None))),
    Record(1, 1_700_000_000_007, None, b""),
    Record(2, 1_700_000_000_003, b"", None, (("", b""),)),
]
GREATEST_LENGTH = 2**63 - 1


# --- there and back ---------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_encoded_is_decoded_again(compression: str) -> None:
    batch = Batch.parse(encode(RECORDS, compression=compression, base_offset=100))
    assert batch.compression == compression
    assert decode(batch) == [record._replace(offset=100 + record.offset) for record in RECORDS]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_another_implementation_reads_what_is_encoded(compression: str) -> None:
    theirs = OtherBatch(encode(RECORDS, compression=compression))
    assert theirs.validate_crc()
    assert [
        Record(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
        for record in theirs
    ] == RECORDS


def test_snappy_is_read_plain_and_in_blocks() -> None:
    records = b"".join(record_bytes(offset_delta=i, value=bytes(40_000)) for i in range(3))
    blocks = snappy_encode(records)
    plain = bytes(cramjam.snappy.compress_raw(records))
    assert blocks.startswith(b"\x82SNAPPY\x00") and not plain.startswith(b"\x82SNAPPY\x00")
    for compressed in (blocks, plain):
        batch = batch_of(compressed, count=3, attributes=2)
        assert [record.value for record in decode(batch)] == [bytes(40_000)] * 3


def test_zstd_and_lz4_are_read_with_and_without_the_size_in_front() -> None:
    records = b"".join(record_bytes(offset_delta=i, value=bytes(50_000)) for i in range(3))
    for attributes, module in ((3, cramjam.lz4), (4, cramjam.zstd)):
        streamed = module.Compressor()
        streamed.compress(records)
        for compressed in (bytes(module.compress(records)), bytes(streamed.finish())):
            batch = batch_of(compressed, count=3, attributes=attributes)
            assert len(decode(batch)) == 3


def test_a_record_takes_the_time_of_the_broker_where_the_batch_says_so() -> None:
    writer = BatchWriter(append_time=True)
    assert writer.add(0, 50, None, b"a") and writer.add(1, 50, None, b"b")
    batch = Batch.parse(writer.finish())
    assert batch.timestamp_type == 1
    records = record_bytes() + record_bytes(offset_delta=1, timestamp_delta=9)
    other = batch_of(records, count=2, attributes=TIMESTAMP_TYPE_FLAG, max_timestamp=700)
    assert [record.timestamp_ms for record in decode(batch)] == [50, 50]
    assert [record.timestamp_ms for record in decode(other)] == [700, 700]


def test_a_control_batch_says_so_and_its_marker_is_read() -> None:
    marker = Record(0, 5, b"\x00\x00\x00\x01", b"\x00\x00\x00\x00\x00\x00")
    batch = Batch.parse(
        encode([marker], producer_id=4, producer_epoch=2, transactional=True, control=True)
    )
    assert batch.is_control and batch.is_transactional
    assert decode(batch) == [marker]


@each(
    "times",
    [
        [NO_TIMESTAMP],
        [NO_TIMESTAMP, 1_700_000_000_000],
        [NO_TIMESTAMP, NO_TIMESTAMP, -7, 3],
        [1_700_000_000_000, NO_TIMESTAMP],
        [0, -5],
        [2**62, -(2**62)],
    ],
)
def test_any_mix_of_timestamps_and_none_comes_back(times: list[int]) -> None:
    batch = Batch.parse(encode([Record(0, time, None, b"v") for time in times]))
    assert [record.timestamp_ms for record in decode(batch)] == times
    assert batch.base_timestamp == times[0]
    assert batch.max_timestamp == max(times)
    assert [record.timestamp for record in OtherBatch(bytes(batch.view))] == times


def test_a_batch_with_holes_keeps_them() -> None:
    writer = BatchWriter()
    for delta in (0, 3, 10):
        assert writer.add(delta, 1, None, b"v")
    batch = Batch.peek(writer.finish(base_offset=20))
    assert batch.next_offset == 31
    assert [record.offset for record in decode(batch)] == [20, 23, 30]


@each("size", [0, 1, 57, 58, 59, 63, 64, 100, 8_185, 8_192, 65_536, 65_537])
def test_a_single_value_is_written_as_any_other_batch(size: int) -> None:
    """Around the sizes at which a length takes one byte more, and where another way is taken."""
    fields: dict[str, Any] = {"producer_id": 6, "producer_epoch": 1, "base_sequence": 7}
    record = Record(0, 123, None, bytes(size))
    assert single(bytes(size), timestamp_ms=123) == encode([record])
    assert single(bytes(size), timestamp_ms=123, **fields) == encode([record], **fields)


def test_a_single_message_is_a_batch_of_one() -> None:
    data = single(
        b"value",
        timestamp_ms=123,
        key=b"key",
        headers=(("a", None),),
        producer_id=6,
        producer_epoch=1,
        base_sequence=7,
    )
    batch = Batch.parse(data)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (6, 1, 7)
    assert decode(batch) == [Record(0, 123, b"key", b"value", (("a", None),))]
    assert data == encode(decode(batch), producer_id=6, producer_epoch=1, base_sequence=7)


def test_large_batches_are_opened_in_parts_and_whole() -> None:
    records = [Record(i, i, b"%d" % i, b"v" * (i % 4_000)) for i in range(4_000)]
    records += [Record(4_000, 1, None, bytes(limits.PARSED_BYTES + 1), (("large", b"one"),))]
    records += [Record(4_001, 2, None, b"behind", (("small", None),))]
    batch = Batch.parse(encode(records, compression="zstd"))
    assert decode(batch) == records
    assert max(len(part) for part in open_batch(batch)) < 2_000


# --- what cannot be encoded -------------------------------------------------------------------


def test_no_records_make_no_batch() -> None:
    with pytest.raises(InvalidRequest, match="needs at least one record"):
        encode([])


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="brotli"):
        encode(RECORDS, compression="brotli")


def test_a_headers_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        single(b"v", timestamp_ms=1, headers=(("\udc80", b""),))


def test_a_timestamp_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        single(b"v", timestamp_ms=2**63)


def test_what_is_larger_than_a_batch_is_refused() -> None:
    most = limits.BATCH_BYTES - len(single(b"", timestamp_ms=1)) - 6
    assert len(single(bytes(most), timestamp_ms=1)) == limits.BATCH_BYTES
    with pytest.raises(RecordTooLarge):
        single(bytes(most + 1), timestamp_ms=1)
    half = bytes(limits.BATCH_BYTES // 2)
    with pytest.raises(RecordTooLarge):
        encode([Record(0, 1, None, half), Record(1, 1, None, half)])


def test_what_could_not_be_opened_again_is_refused() -> None:
    half = Record(0, 1, None, bytes(limits.DECODED_BATCH_BYTES // 2))
    with pytest.raises(RecordTooLarge):
        encode([half, half], compression="zstd")
    with pytest.raises(RecordTooLarge):
        encode([half._replace(value=bytes(limits.DECODED_BATCH_BYTES))], compression="zstd")


def test_more_headers_than_a_batch_may_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_limits, "HEADERS_PER_BATCH", 5)
    three = Record(0, 1, None, b"v", (("a", None),) * 3)
    with pytest.raises(RecordTooLarge):
        encode([three, three])
    with pytest.raises(RecordTooLarge):
        encode([three._replace(headers=three.headers * 2)])
    writer = BatchWriter()
    assert writer.add(0, *three[1:])
    assert not writer.add(1, *three[1:])
    assert decode(Batch.parse(writer.finish())) == [three]


def test_more_records_than_a_batch_may_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECORDS_PER_BATCH", 3)
    assert len(decode(Batch.parse(encode(RECORDS)))) == 3
    with pytest.raises(RecordTooLarge):
        encode([*RECORDS, *RECORDS])


# --- large batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_sections_of_a_batch_hold_its_records_in_order(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_limits, "DECODED_SECTION_RECORDS", 7)
    monkeypatch.setattr(records_limits, "DECODED_SECTION_BYTES", 500)
    sizes = [0, 1, 40, 63, 64, 200, 700] * 20
    records = [
        Record(10 + number, 1_000 - number, b"k" * (number % 3), bytes(size), (("h", b"v"),))
        for number, size in enumerate(sizes)
    ]
    batch = Batch.parse(encode(records, compression=compression, base_offset=10))
    data = inflate_batch(batch)
    found = list(sections(batch, data))
    assert len(found) > len(sizes) // 7
    assert [record for _, opened in found for record in opened] == decode(batch) == records
    next_offset = 10
    for section, opened in found:
        assert section.base_offset == next_offset
        assert section.record_count == len(opened) <= 7
        assert section.end - section.start <= 500 or len(opened) == 1
        assert section.max_timestamp_ms == max(record.timestamp_ms for record in opened)
        assert section_records(batch, data, section) == opened
        next_offset = section.next_offset
    assert next_offset == batch.next_offset


def test_the_last_section_covers_offsets_that_no_record_has() -> None:
    records = record_bytes() + record_bytes(offset_delta=4)
    batch = batch_of(records, count=2, last_offset_delta=9)
    ((section, opened),) = sections(batch, inflate_batch(batch))
    assert (section.base_offset, section.next_offset) == (0, 10)
    assert [record.offset for record in opened] == [0, 4]


# --- batches that lie -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "fields"),
    [
        pytest.param(b"", {}, id="no record"),
        pytest.param(record_bytes(), {"count": 2}, id="one record too few"),
        pytest.param(record_bytes() + record_bytes(offset_delta=1), {}, id="one too many"),
        pytest.param(record_bytes() + b"\x00", {}, id="a byte behind"),
        pytest.param(record_bytes() * 2, {"count": 2}, id="the same offset twice"),
        pytest.param(record_bytes(offset_delta=1), {}, id="an offset beyond the last"),
        pytest.param(record_bytes(offset_delta=-1), {}, id="an offset before the first"),
        pytest.param(record_bytes(offset_delta=2**40), {}, id="an offset far away"),
        pytest.param(record_bytes(offset_delta=2**63 - 1), {"base_offset": 9}, id="wraps"),
        pytest.param(record_bytes(), {"count": 2, "last_offset_delta": 0}, id="count over delta"),
    ],
)
def test_a_batch_whose_records_are_not_those_it_says_is_corrupt(
    records: bytes, fields: dict[str, int]
) -> None:
    with pytest.raises(CorruptBatch):
        decode(batch_of(records, **fields))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x00\x00\x00" + varint(5) + b"abc", id="key"),
        pytest.param(b"\x00\x00\x00" + varint(GREATEST_LENGTH), id="greatest key"),
        pytest.param(b"\x00\x00\x00" + varint(GREATEST_LENGTH - 80), id="nearly greatest key"),
        pytest.param(b"\x00\x00\x00\x01" + varint(GREATEST_LENGTH - 80), id="value"),
        pytest.param(b"\x00\x00\x00\x01\x01" + varint(-1), id="headers, negative"),
        pytest.param(b"\x00\x00\x00\x01\x01" + varint(2**40), id="headers, many"),
        pytest.param(b"\x00\x00\x00\x01\x01" + varint(1) + varint(-1), id="name, null"),
        pytest.param(b"\x00\x00\x00\x01\x01" + varint(1) + varint(9), id="name, cut off"),
        pytest.param(b"\x00\x00\x00\x01\x01" + varint(1) + varint(GREATEST_LENGTH), id="name"),
        pytest.param(b"\x00\x00\x00\x01\x01\x02\x00" + varint(2**62), id="header's value"),
        pytest.param(b"\x00\x00\x00\x01\x01\x00\x00\x00", id="bytes left over"),
        pytest.param(b"\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="an endless number"),
        pytest.param(b"\x00\x80", id="a number cut off"),
        pytest.param(b"\x00\x00\x00\x01\x01\x80", id="headers, cut off"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_record_with_a_length_that_lies_is_corrupt(body: bytes) -> None:
    for length in (len(body), len(body) + 1, len(body) - 1, 2**31, GREATEST_LENGTH, -1):
        with pytest.raises(CorruptBatch):
            decode(batch_of(varint(length) + body))
        with pytest.raises(CorruptBatch):
            decode(batch_of(record_bytes() + varint(length) + body, count=2))


def test_lengths_that_lie_are_seen_in_large_batches_too() -> None:
    large = record_bytes(value=bytes(limits.PARSED_BYTES))
    lies = [
        large[:-1],
        large + b"\x00",
        large + varint(3) + b"\x00",
        large + varint(-1),
        large + varint(2**62),
        record_bytes() + varint(limits.PARSED_BYTES + 9) + bytes(limits.PARSED_BYTES),
    ]
    for records in lies:
        for count in (1, 2):
            with pytest.raises(CorruptBatch):
                decode(batch_of(records, count=count))


def test_holes_in_one_part_leave_no_room_for_more_in_the_next() -> None:
    deltas = [0, *range(2, 2_002)]
    records = b"".join(record_bytes(offset_delta=delta) for delta in deltas)
    assert len(decode(batch_of(records, count=2_001, last_offset_delta=2_001))) == 2_001
    with pytest.raises(CorruptBatch, match="offset 2001"):
        decode(batch_of(records, count=2_001, last_offset_delta=2_000))


def test_offsets_that_leave_64_bits_are_corrupt() -> None:
    records = record_bytes() + record_bytes(offset_delta=1)
    with pytest.raises(CorruptBatch):
        decode(batch_of(records, count=2, base_offset=2**63 - 1))


def test_a_name_that_is_not_utf8_is_given_with_replacements() -> None:
    good = record_bytes(headers=[("größe".encode(), b"1")])
    latin = record_bytes(offset_delta=1, headers=[("größe".encode("latin-1"), b"2"), (b"b", None)])
    records = decode(batch_of(good + latin, count=2))
    assert records[0].headers == (("größe", b"1"),)
    assert records[1].headers == (("gr\ufffd\ufffde", b"2"), ("b", None))


def test_a_batch_with_more_headers_than_allowed_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_limits, "HEADERS_PER_BATCH", 5)
    five = record_bytes(headers=[(b"a", None)] * 5)
    six = record_bytes(headers=[(b"a", None)] * 6)
    assert len(decode(batch_of(five))[0].headers) == 5
    for records, count in (
        (six, 1),
        (five + record_bytes(offset_delta=1, headers=[(b"", b"")]), 2),
    ):
        with pytest.raises(CorruptBatch, match="headers"):
            decode(batch_of(records, count=count))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_batch_within_the_bound_is_opened_and_one_beyond_is_not(compression: str) -> None:
    batch = Batch.parse(encode([Record(0, 1, None, bytes(100_000))], compression=compression))
    inflated = len(record_bytes(value=bytes(100_000)))
    assert len(decode(batch, max_bytes=inflated)) == 1
    for max_bytes in (inflated - 1, 1_000, 1, 0):
        with pytest.raises(CorruptBatch):
            decode(batch, max_bytes=max_bytes)


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_compressed_bytes_that_are_none_are_corrupt(compression: str) -> None:
    attributes = COMPRESSIONS.index(compression)
    compressed = encode(RECORDS, compression=compression)[61:]
    noise = [b"", b"\x00", b"\xff" * 40, b"garbage", compressed + b"\x00", compressed + b"more"]
    for records in [*noise, *(compressed[:cut] for cut in range(len(compressed)))]:
        with pytest.raises(CorruptBatch):
            decode(batch_of(records, count=3, attributes=attributes))


@each(
    "blocks",
    [
        b"\x00",
        struct.pack(">i", 0),
        struct.pack(">i", -1) + b"abc",
        struct.pack(">i", 4) + b"abc",
        struct.pack(">i", 2**31 - 1) + b"abc",
        struct.pack(">i", 3) + b"abc",
    ],
)
def test_snappy_blocks_that_lie_are_corrupt(blocks: bytes) -> None:
    good = snappy_encode(record_bytes())
    assert len(decode(batch_of(good, attributes=2))) == 1
    with pytest.raises(CorruptBatch):
        decode(batch_of(good + blocks, attributes=2))


def test_a_batch_of_no_records_is_empty() -> None:
    """Kafka's compaction leaves such batches behind."""
    assert decode(batch_of(b"", count=0, last_offset_delta=4)) == []
    with pytest.raises(CorruptBatch):
        decode(batch_of(b"\x00", count=0, last_offset_delta=4))


def test_bytes_right_behind_a_batch_are_never_taken_for_its_own() -> None:
    """A parser that reads a number past the end would find one here."""
    whole = sealed(record_bytes(value=b"abc"))
    for cut in range(1, len(whole) - 61):
        torn = resealed(whole[:-cut])
        for behind in (b"\x00" * 64, b"\x01" * 64, b"\xff" * 64, whole):
            with pytest.raises(CorruptBatch):
                decode(Batch.peek(torn + behind))


def test_encoders_of_others_are_understood() -> None:
    records = b"".join(record_bytes(offset_delta=i, value=b"%d" % i) for i in range(100))
    encoders = (gzip_encode, snappy_encode, lz4_encode, zstd_encode)
    for attributes, encoder in enumerate(encoders, start=1):
        decoded = decode(Batch.parse(sealed(encoder(records), count=100, attributes=attributes)))
        assert [record.value for record in decoded] == [b"%d" % i for i in range(100)]
        assert all(before.offset + 1 == after.offset for before, after in pairwise(decoded))
