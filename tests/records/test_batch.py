"""The header of a record batch: every field, every refusal, and walks over runs of batches."""

from __future__ import annotations

import struct

import pytest
from aiokafka.record.default_records import _DefaultRecordBatchPy as OtherBatch
from aiokafka.record.memory_records import MemoryRecords

from quackmq import limits
from quackmq.errors import CorruptBatch, QuackError, RecordTooLarge, UnsupportedBatch
from quackmq.records.batch import (
    COMPRESSIONS,
    HEADER_BYTES,
    Batch,
    Record,
    Span,
    batches,
    spans,
    stamp,
    with_producer,
)
from quackmq.records.codec import decode, encode, single
from tests.kit.batches import resealed, sealed
from tests.kit.tables import each

RECORDS = [
    Record(0, 1_700_000_000_000, b"key", b"first", (("name", b"value"), ("none", None))),
    Record(1, 1_700_000_000_007, None, b""),
    Record(2, 1_700_000_000_003, b"", None),
]


def test_every_field_of_the_header_is_read() -> None:
    data = encode(
        RECORDS,
        base_offset=1_000_000_007,
        leader_epoch=5,
        producer_id=77,
        producer_epoch=3,
        base_sequence=41,
        transactional=True,
    )
    batch = Batch.parse(data)
    assert bytes(batch.view) == data
    assert batch.base_offset == 1_000_000_007
    assert batch.length == len(data) - 12
    assert batch.leader_epoch == 5
    assert batch.magic == 2
    assert batch.attributes == 0x10
    assert batch.last_offset_delta == 2
    assert batch.base_timestamp == 1_700_000_000_000
    assert batch.max_timestamp == 1_700_000_000_007
    assert batch.producer_id == 77
    assert batch.producer_epoch == 3
    assert batch.base_sequence == 41
    assert batch.record_count == 3
    assert batch.size == len(data)
    assert batch.next_offset == 1_000_000_010
    assert batch.compression == "none"
    assert batch.timestamp_type == 0
    assert batch.is_transactional
    assert not batch.is_control


def test_the_header_is_read_as_another_implementation_reads_it() -> None:
    data = encode(RECORDS, compression="lz4", producer_id=8, producer_epoch=1, base_sequence=9)
    ours, theirs = Batch.parse(data), OtherBatch(data)
    assert theirs.validate_crc()
    assert (ours.base_offset, ours.magic, ours.crc) == (
        theirs.base_offset,
        theirs.magic,
        theirs.crc,
    )
    assert (ours.attributes, ours.last_offset_delta) == (
        theirs.attributes,
        theirs.last_offset_delta,
    )
    assert (ours.base_timestamp, ours.max_timestamp) == (
        theirs.first_timestamp,
        theirs.max_timestamp,
    )
    assert (ours.producer_id, ours.producer_epoch, ours.base_sequence) == (
        theirs.producer_id,
        theirs.producer_epoch,
        theirs.base_sequence,
    )
    assert ours.next_offset == theirs.next_offset


def test_a_stamp_moves_a_batch_and_leaves_its_checksum_good() -> None:
    run = bytearray(encode(RECORDS) + encode(RECORDS))
    half = len(run) // 2
    stamp(run, half, 500, 9)
    first, second = Batch.parse(run), Batch.parse(memoryview(run)[half:])
    assert (first.base_offset, first.leader_epoch) == (0, -1)
    assert (second.base_offset, second.leader_epoch) == (500, 9)
    assert [record.offset for record in decode(second)] == [500, 501, 502]


def test_bytes_behind_a_batch_are_not_part_of_it() -> None:
    data = encode(RECORDS)
    assert bytes(Batch.parse(data + b"more").view) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_batch_lies_over_any_kind_of_bytes(kind: type) -> None:
    assert len(decode(Batch.parse(kind(encode(RECORDS))))) == 3


def test_a_batch_cut_short_anywhere_is_corrupt() -> None:
    data = encode(RECORDS)
    for size in range(len(data)):
        with pytest.raises(CorruptBatch):
            Batch.parse(data[:size])


def test_a_flipped_bit_anywhere_under_the_checksum_is_seen() -> None:
    data = encode(RECORDS)
    for position in range(16, len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises((CorruptBatch, UnsupportedBatch)):
                Batch.parse(flipped)


@each(
    ("position", "layout", "value", "error"),
    [
        (8, ">i", -1, CorruptBatch),
        (8, ">i", HEADER_BYTES - 13, CorruptBatch),
        (8, ">i", 2**31 - 1, CorruptBatch),
        (16, ">b", 0, UnsupportedBatch),
        (16, ">b", 1, UnsupportedBatch),
        (16, ">b", 3, CorruptBatch),
        (16, ">b", -1, CorruptBatch),
        (21, ">h", 5, UnsupportedBatch),
        (21, ">h", 7, UnsupportedBatch),
        (23, ">i", -1, CorruptBatch),
        (23, ">i", limits.RECORDS_PER_BATCH, CorruptBatch),
        (23, ">i", 1, CorruptBatch),
        (57, ">i", -1, CorruptBatch),
        (57, ">i", 2, CorruptBatch),
        (57, ">i", 2**31 - 1, CorruptBatch),
    ],
)
def test_a_header_that_cannot_be_is_refused_though_its_checksum_is_good(
    position: int, layout: str, value: int, error: type[QuackError]
) -> None:
    data = bytearray(resealed(encode(RECORDS)))
    struct.pack_into(layout, data, position, value)
    if position != 8:
        data = bytearray(resealed(data))
    with pytest.raises(error) as raised:
        Batch.parse(data)
    assert type(raised.value) is error


def test_a_batch_above_the_bound_is_too_large() -> None:
    data = sealed(bytes(limits.BATCH_BYTES - HEADER_BYTES + 1))
    with pytest.raises(RecordTooLarge):
        Batch.parse(data)
    assert Batch.parse(sealed(bytes(limits.BATCH_BYTES - HEADER_BYTES))).size == limits.BATCH_BYTES


def test_peek_believes_the_checksum() -> None:
    data = bytearray(encode(RECORDS))
    data[-1] ^= 1
    assert Batch.peek(data).record_count == 3
    with pytest.raises(CorruptBatch, match="checksum"):
        Batch.parse(data)


def test_spans_and_batches_walk_a_run_and_leave_out_what_is_cut_off() -> None:
    one = encode(RECORDS, base_offset=10)
    two = single(b"x", timestamp_ms=5)
    three = encode(RECORDS, base_offset=14)
    run = one + two + three
    assert list(spans(run)) == [
        Span(0, len(one), 10, 13),
        Span(len(one), len(two), 0, 1),
        Span(len(one) + len(two), len(three), 14, 17),
    ]
    assert list(spans(run, len(one)))[0] == Span(len(one), len(two), 0, 1)
    for cut in range(1, len(three) + 1):
        assert [span.size for span in spans(run[:-cut])] == [len(one), len(two)]
    assert [bytes(batch.view) for batch in batches(run)] == [one, two, three]
    assert list(spans(b"")) == []


def test_a_walk_stops_at_a_length_that_leads_nowhere() -> None:
    run = bytearray(encode(RECORDS) * 2)
    struct.pack_into(">i", run, 8, -12)
    with pytest.raises(CorruptBatch):
        list(spans(run))


def test_a_run_of_batches_is_one_that_another_implementation_reads() -> None:
    run = b"".join(
        encode(RECORDS, base_offset=3 * i, compression=c)
        for i, c in enumerate("none gzip snappy lz4 zstd".split())
    )
    reader = MemoryRecords(run)
    values = []
    while (batch := reader.next_batch()) is not None:
        assert batch.validate_crc()
        values += [record.value for record in batch]
    assert values == [b"first", b"", None] * len(COMPRESSIONS)


def test_a_copy_with_another_producer_is_a_valid_batch_with_the_same_records() -> None:
    batch = Batch.parse(encode(RECORDS, base_offset=7, producer_id=1, base_sequence=2))
    copy = Batch.parse(with_producer(batch, 0x10, 77, 3, 41).view)
    assert (copy.attributes, copy.producer_id, copy.producer_epoch) == (0x10, 77, 3)
    assert (copy.base_sequence, copy.base_offset) == (41, 7)
    assert decode(copy) == decode(batch)
    assert batch.producer_id == 1, "the original is unchanged"
