"""Properties of the batch codec: round trips, and nothing but named errors for any bytes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as OtherBuilder
from aiokafka.record.default_records import _DefaultRecordBatchPy as OtherBatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq.errors import CorruptBatch, RecordTooLarge, UnsupportedBatch
from quackmq.records import codec
from quackmq.records.batch import COMPRESSIONS, HEADER_BYTES, Batch, Record, batches, spans
from quackmq.records.codec import decode, encode, single
from quackmq.records.columns import to_arrow
from tests.kit import effort
from tests.kit.batches import batch_of, resealed, sealed

#: No test asserts a time: a busy machine is no bug.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMED = (CorruptBatch, UnsupportedBatch, RecordTooLarge)

optional_bytes = st.none() | st.binary(max_size=40)
times = (
    st.integers(-(2**62), 2**62) | st.just(-1) | st.integers(1_700_000_000_000, 1_800_000_000_000)
)
headers = st.lists(st.tuples(st.text(max_size=10), optional_bytes), max_size=4).map(tuple)
records = st.builds(Record, st.just(0), times, optional_bytes, optional_bytes, headers)
record_lists = st.lists(records, min_size=1, max_size=12)
compressions = st.sampled_from(COMPRESSIONS)
offsets = st.integers(0, 2**62)
#: A position from the front or the back, and what is done there.
edits = st.lists(
    st.tuples(
        st.integers(-60, 100),
        st.sampled_from(["set", "insert", "delete"]),
        st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]) | st.integers(0, 255),
    ),
    min_size=1,
    max_size=6,
)
#: Bytes as a parser of numbers hates them.
numbers = st.lists(
    st.sampled_from(
        [
            b"\x00",
            b"\x01",
            b"\x02",
            b"\x0e",
            b"\x80",
            b"\xff",
            b"\xff\xff\xff\xff\x0f",
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"\xfe\xfe\xff\xff\xff\xff\xff\xff\xff\x01",
            b"abc",
        ]
    )
    | st.binary(max_size=3),
    max_size=30,
).map(b"".join)


@UNTIMED
@given(
    records=record_lists,
    compression=compressions,
    base_offset=offsets,
    leader_epoch=st.integers(-1, 2**31 - 1),
    producer_id=st.integers(-1, 2**63 - 1),
    producer_epoch=st.integers(-1, 2**15 - 1),
    base_sequence=st.integers(-1, 2**31 - 1),
    transactional=st.booleans(),
    control=st.booleans(),
)
def test_records_come_back_and_the_header_says_what_was_asked(
    records: list[Record], compression: str, base_offset: int, **fields: Any
) -> None:
    data = encode(records, compression=compression, base_offset=base_offset, **fields)
    batch = Batch.parse(data)
    assert decode(batch) == [
        record._replace(offset=base_offset + delta) for delta, record in enumerate(records)
    ]
    assert (batch.base_offset, batch.leader_epoch) == (base_offset, fields["leader_epoch"])
    assert batch.producer_id == fields["producer_id"]
    assert batch.producer_epoch == fields["producer_epoch"]
    assert batch.base_sequence == fields["base_sequence"]
    assert batch.is_transactional == fields["transactional"]
    assert batch.is_control == fields["control"]
    assert batch.compression == compression
    assert batch.base_timestamp == records[0].timestamp_ms
    assert batch.max_timestamp == max(record.timestamp_ms for record in records)


@UNTIMED
@given(records=record_lists, compression=compressions)
def test_another_implementation_reads_what_we_write(
    records: list[Record], compression: str
) -> None:
    theirs = OtherBatch(encode(records, compression=compression))
    assert theirs.validate_crc()
    assert [
        Record(0, record.timestamp, record.key, record.value, tuple(record.headers))
        for record in theirs
    ] == records


@UNTIMED
@given(
    records=st.lists(
        records.map(lambda record: record._replace(timestamp_ms=abs(record.timestamp_ms))),
        min_size=1,
        max_size=12,
    ),
    compression=compressions,
)
def test_we_read_what_another_implementation_writes(
    records: list[Record], compression: str
) -> None:
    builder = OtherBuilder(2, COMPRESSIONS.index(compression), 0, -1, -1, -1, 1 << 20)
    for delta, record in enumerate(records):
        builder.append(
            delta, record.timestamp_ms, record.key, record.value, headers=list(record.headers)
        )
    decoded = decode(Batch.parse(bytes(builder.build())))
    assert [record._replace(offset=0) for record in decoded] == records


@UNTIMED
@given(record=records)
def test_a_single_message_comes_back(record: Record) -> None:
    data = single(
        record.value, timestamp_ms=record.timestamp_ms, key=record.key, headers=record.headers
    )
    assert decode(Batch.parse(data)) == [record]


@UNTIMED
@given(
    lists=st.lists(record_lists, min_size=1, max_size=4),
    compression=compressions,
    gap=st.integers(0, 3),
)
def test_arrow_keeps_records_and_offsets(
    lists: list[list[Record]], compression: str, gap: int
) -> None:
    run = []
    next_offset = 7
    for records in lists:
        # Microseconds do not reach as far as milliseconds.
        within = [r._replace(timestamp_ms=r.timestamp_ms % 2**50 - 1) for r in records]
        data = encode(within, base_offset=next_offset, compression=compression)
        run.append(Batch.parse(data))
        next_offset = run[-1].next_offset + gap
    rows = to_arrow(run)
    times = rows.column("timestamp").cast(pa.int64()).to_pylist()
    assert [
        Record(
            row["offset"],
            time_us // 1000,
            row["key"],
            row["value"],
            tuple((pair["key"], pair["value"]) for pair in row["headers"] or ()),
        )
        for row, time_us in zip(rows.drop_columns("timestamp").to_pylist(), times, strict=True)
    ] == [record for batch in run for record in decode(batch)]


@settings(UNTIMED, max_examples=effort.of(300))
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_named_error(data: bytes) -> None:
    for attempt in (data, bytes(16) + b"\x02" + data):
        try:
            decode(Batch.parse(attempt))
        except NAMED:
            pass


@settings(UNTIMED, max_examples=effort.of(300))
@given(
    data=st.binary(max_size=200) | numbers, attributes=st.integers(0, 63), count=st.integers(0, 9)
)
def test_any_content_under_a_good_checksum_is_records_or_corrupt(
    data: bytes, attributes: int, count: int
) -> None:
    try:
        batch = Batch.peek(sealed(data, attributes=attributes, count=count, last_offset_delta=8))
    except UnsupportedBatch:
        assert attributes & 7 > 4
        return
    try:
        found = decode(batch)
    except CorruptBatch:
        return
    assert len(found) == count


@settings(UNTIMED, max_examples=effort.of(300))
@given(records=record_lists, compression=compressions, edits=edits)
def test_a_damaged_batch_with_a_good_checksum_is_records_or_a_named_error(
    records: list[Record], compression: str, edits: list[tuple[int, str, int]]
) -> None:
    data = resealed(damaged(encode(records, compression=compression), edits))
    try:
        batch = Batch.parse(data)
        found = decode(batch, max_bytes=1 << 20)
    except NAMED:
        return
    assert [record.offset for record in found] == list(range(batch.base_offset, batch.next_offset))


@settings(UNTIMED, max_examples=effort.of(300))
@given(records=record_lists, edits=edits, noise=numbers)
def test_the_careful_parser_and_the_fast_one_agree(
    records: list[Record], edits: list[tuple[int, str, int]], noise: bytes
) -> None:
    sound = encode(records)
    for content in (damaged(sound[HEADER_BYTES:], edits), noise, sound[HEADER_BYTES:] + noise):
        batch = batch_of(content, count=len(records), base_timestamp=5)
        try:
            fast = decode(batch)
        except CorruptBatch:
            fast = None
        careful = carefully(batch)
        assert careful == fast


@UNTIMED
@given(data=st.binary(max_size=300) | st.lists(record_lists.map(encode), max_size=3).map(b"".join))
def test_a_walk_over_any_bytes_ends(data: bytes) -> None:
    try:
        found = list(spans(data))
        assert sum(span.size for span in found) <= len(data)
        assert len(list(batches(data))) == len(found)
    except NAMED:
        pass


def carefully(batch: Batch) -> list[Record] | None:
    """What the parser in Python alone makes of a batch, checks of offsets included."""
    content = batch.view[HEADER_BYTES:]
    try:
        part = codec._parse_carefully([*batch[1:]], content, 0, len(content))
        codec._check_offsets(part, batch.base_offset, batch.next_offset)
    except CorruptBatch:
        return None
    return [
        Record(one.offset, one.timestamp, one.key, one.value, tuple(one.headers)) for one in part
    ]


def damaged(data: bytes, edits: list[tuple[int, str, int]]) -> bytes:
    """Never shorter than a header."""
    mutable = bytearray(data)
    for position, kind, byte in edits:
        where = position % len(mutable) if mutable else 0
        if kind == "insert" or not mutable:
            mutable.insert(where, byte)
        elif kind == "set":
            mutable[where] = byte
        elif len(mutable) > HEADER_BYTES:
            del mutable[where]
    return bytes(mutable)
