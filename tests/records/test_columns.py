"""Record batches as Arrow columns: the types that readers rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from quackmq import limits
from quackmq.errors import CorruptBatch, InvalidRequest
from quackmq.records.batch import NO_TIMESTAMP, TIMESTAMP_TYPE_FLAG, Batch, Record
from quackmq.records.codec import encode
from quackmq.records.columns import SCHEMA, constant, to_arrow
from tests.kit.batches import batch_of, record_bytes

NOON_MS = 1_700_000_000_000


def batch(*records: Record, **fields: Any) -> Batch:
    return Batch.parse(encode(records, **fields))


def column(rows: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = rows.column(name).to_pylist()
    return values


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, pa.int64()),
        (2**63 - 1, pa.int64()),
        (-(2**63), pa.int64()),
        (-7, pa.int32()),
        (b"", pa.binary()),
        (b"\x00\x01\xff", pa.binary()),
    ],
)
def test_a_constant_is_the_scalar_that_arrow_makes_of_the_value(
    value: int | bytes, kind: pa.DataType
) -> None:
    made = constant(value, kind)
    assert made.equals(pa.scalar(value, kind)) and made.type == kind
    made.validate(full=True)


# --- to columns -------------------------------------------------------------------------------


def test_the_columns_have_the_types_of_sparks_source() -> None:
    assert [(field.name, str(field.type)) for field in SCHEMA] == [
        ("offset", "int64"),
        ("timestamp", "timestamp[us, tz=UTC]"),
        ("timestampType", "int32"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "list<item: struct<key: string, value: binary>>"),
        ("producer_id", "int64"),
        ("producer_epoch", "int16"),
        ("sequence", "int32"),
    ]


def test_every_record_is_a_row() -> None:
    rows = to_arrow(
        [
            batch(
                Record(0, NOON_MS, b"k", b"v", (("a", b"1"), ("b", None))),
                Record(0, NO_TIMESTAMP, None, b""),
                base_offset=10,
                producer_id=4,
                producer_epoch=2,
                base_sequence=8,
            ),
            batch(Record(0, NOON_MS + 1, b"", None), base_offset=20, compression="gzip"),
        ]
    )
    assert rows.schema == SCHEMA
    assert column(rows, "offset") == [10, 11, 20]
    milliseconds = rows.column("timestamp").cast(pa.int64()).to_pylist()
    assert milliseconds == [NOON_MS * 1000, -1000, NOON_MS * 1000 + 1000]
    assert column(rows, "timestampType") == [0, 0, 0]
    assert column(rows, "key") == [b"k", None, b""]
    assert column(rows, "value") == [b"v", b"", None]
    assert column(rows, "headers") == [
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        None,
        None,
    ]
    assert column(rows, "producer_id") == [4, 4, None]
    assert column(rows, "producer_epoch") == [2, 2, None]
    assert column(rows, "sequence") == [8, 9, None]


def test_sequence_numbers_wrap() -> None:
    one = Record(0, 1, None, b"v")
    rows = to_arrow([batch(one, one, one, producer_id=1, base_sequence=2**31 - 2)])
    assert column(rows, "sequence") == [2**31 - 2, 2**31 - 1, 0]


def test_a_producer_without_sequence_numbers_has_none() -> None:
    rows = to_arrow([batch(Record(0, 1, None, b"v"), producer_id=1, producer_epoch=0)])
    assert (column(rows, "producer_id"), column(rows, "sequence")) == ([1], [None])


def test_control_batches_are_left_out() -> None:
    marker = batch(Record(0, 1, b"\x00\x00\x00\x01", b""), control=True, base_offset=1)
    rows = to_arrow([batch(Record(0, 1, None, b"a")), marker])
    assert column(rows, "value") == [b"a"]


def test_no_batches_are_no_rows() -> None:
    rows = to_arrow([])
    assert (rows.num_rows, rows.schema) == (0, SCHEMA)


def test_the_times_of_the_broker_say_so() -> None:
    records = record_bytes() + record_bytes(offset_delta=1)
    rows = to_arrow([batch_of(records, count=2, attributes=TIMESTAMP_TYPE_FLAG, max_timestamp=9)])
    assert column(rows, "timestampType") == [1, 1]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [9000, 9000]


def test_a_time_beyond_microseconds_becomes_the_last_that_they_can_tell() -> None:
    nanoseconds = NOON_MS * 1_000_000
    rows = to_arrow([batch(*(Record(0, t, None, b"") for t in (nanoseconds, 5, -nanoseconds)))])
    last = (2**63 - 1) // 1000 * 1000
    assert rows.column("timestamp").cast(pa.int64()).to_pylist() == [last, 5000, -last]


def test_large_and_small_batches_mix_in_order() -> None:
    sizes = [1, 1, 9_000, 3, 20_000, 1]
    run: list[Batch] = []
    for size in sizes:
        start = run[-1].next_offset if run else 0
        records = [Record(0, i, None, b"%d" % (start + i)) for i in range(size)]
        run.append(batch(*records, base_offset=start, producer_id=size, base_sequence=start))
    rows = to_arrow(iter(run))
    everything = range(sum(sizes))
    assert column(rows, "offset") == column(rows, "sequence") == list(everything)
    assert column(rows, "value") == [b"%d" % i for i in everything]
    assert column(rows, "producer_id") == [size for size in sizes for _ in range(size)]


def test_headers_among_many_records_without_stay_with_theirs() -> None:
    plain = Record(0, 1, None, b"v")
    records = [plain] * 10_000 + [plain._replace(headers=(("a", b"b"),))] + [plain] * 10_000
    rows = to_arrow([batch(*records)])
    assert rows.column("headers").null_count == 20_000
    assert rows.column("headers")[10_000].as_py() == [{"key": "a", "value": b"b"}]


def test_a_corrupt_batch_among_sound_ones_is_named() -> None:
    with pytest.raises(CorruptBatch):
        to_arrow([batch(Record(0, 1, None, b"a")), batch_of(b"\x00")])
    with pytest.raises(CorruptBatch):
        to_arrow([batch(Record(0, 1, None, b"a"))], max_bytes=3)


def test_more_than_arrow_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARROW_BYTES", 20 * limits.MIB)
    one = batch(Record(0, 1, None, bytes(limits.MIB)))
    assert to_arrow([one] * 19).num_rows == 19
    opened = 0

    def without_end() -> Iterator[Batch]:
        nonlocal opened
        while True:
            opened += 1
            yield one

    with pytest.raises(InvalidRequest, match="fewer"):
        to_arrow(without_end())
    assert opened < 30
