"""Batches opened into columns all at once: the same rows as one by one, or the same refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import CorruptBatch, InvalidRequest
from quackmq.records.batch import COMPRESSIONS, HEADER_BYTES, TIMESTAMP_TYPE_FLAG, Batch, Record
from quackmq.records.codec import encode
from quackmq.records.columns import SCHEMA, to_arrow
from quackmq.spark.source import decode as opening
from quackmq.spark.source.decode import open_batches
from tests.kit.batches import batch_of, record_bytes, resealed
from tests.kit.tables import each

NOON_MS = 1_700_000_000_000
ATTRIBUTES_AT = 22

contents = st.one_of(st.none(), st.binary(max_size=20), st.binary(min_size=60, max_size=70))
header_lists = st.lists(st.tuples(st.text(max_size=3), contents), max_size=2).map(tuple)
times_ms = st.one_of(
    st.just(-1), st.integers(NOON_MS - 10**6, NOON_MS + 10**6), st.integers(0, 2**62)
)
nothing = st.just(0)
usual_times_ms = st.integers(NOON_MS - 10**6, NOON_MS + 10**6)
usual_records = st.lists(
    st.builds(Record, nothing, usual_times_ms, contents, contents, st.just(())),
    min_size=1,
    max_size=20,
)
records = st.lists(
    st.builds(Record, nothing, times_ms, contents, contents, header_lists),
    min_size=1,
    max_size=6,
)


@st.composite
def batches(draw: st.DrawFn, of: st.SearchStrategy[list[Record]]) -> Batch:
    data = bytearray(
        encode(
            draw(of),
            compression=draw(st.sampled_from(COMPRESSIONS)),
            base_offset=draw(st.sampled_from([0, 7, 2**40])),
            producer_id=draw(st.sampled_from([-1, 9])),
            producer_epoch=draw(st.sampled_from([-1, 0, 3])),
            base_sequence=draw(st.sampled_from([-1, 0, 2**31 - 5])),
            transactional=draw(st.booleans()),
        )
    )
    data[ATTRIBUTES_AT] |= draw(st.sampled_from([0, TIMESTAMP_TYPE_FLAG]))
    return Batch.parse(resealed(data))


def found(of: Sequence[Batch], by: Any) -> pa.RecordBatch | type[Exception]:
    try:
        rows: pa.RecordBatch = by(of)
    except CorruptBatch:
        return CorruptBatch
    rows.validate(full=True)
    return rows


@given(st.lists(st.one_of(batches(usual_records), batches(records)), max_size=3))
def test_the_rows_are_those_of_records_opened_one_by_one(some: list[Batch]) -> None:
    assert open_batches(some) == to_arrow(some)
    assert open_batches(some).schema == SCHEMA


@given(st.lists(batches(usual_records), min_size=1, max_size=3))
def test_usual_batches_are_opened_without_an_object_for_each_record(some: list[Batch]) -> None:
    """Else nothing would be gained, and nobody would see it."""
    expected = to_arrow(some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "to_arrow", None)
        assert open_batches(some) == expected


@given(batches(usual_records), st.data())
def test_damaged_records_are_judged_as_records_opened_one_by_one_are(
    batch: Batch, data: st.DataObject
) -> None:
    """Whatever a byte becomes: no other rows, no other error."""
    mended = bytearray(batch.view)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEADER_BYTES, len(mended) - 1))
        mended[at] = data.draw(st.integers(0, 255))
    damaged = [Batch.parse(resealed(mended))]
    assert found(damaged, open_batches) == found(damaged, to_arrow)


@each(
    ("content", "count"),
    [
        (b"", 1),
        (b"\0", 1),
        (b"\xff" * 20, 1),
        (b"\x80" * 40 + b"\0", 3),
        (record_bytes() + b"\0", 1),
        (record_bytes(), 2),
        (record_bytes(offset_delta=0) + record_bytes(offset_delta=0), 2),
        (record_bytes()[:-1] + b"\2", 1),
        (b"\x03" + record_bytes()[1:], 1),
    ],
)
def test_what_are_no_records_is_refused(content: bytes, count: int) -> None:
    with pytest.raises(CorruptBatch):
        open_batches([batch_of(content, count=count)])


@pytest.mark.parametrize(
    "content",
    [
        record_bytes(offset_delta=0) + record_bytes(offset_delta=5),  # a hole
        record_bytes(value=b"x" * 9_000) + record_bytes(offset_delta=1),  # a length of three bytes
        record_bytes(timestamp_delta=2**40) + record_bytes(offset_delta=1),
        record_bytes(key=b"k", headers=[(b"h", b"")]) + record_bytes(offset_delta=1),
    ],
    ids=["hole", "long", "late", "headers"],
)
def test_what_is_unusual_is_opened_one_by_one(content: bytes) -> None:
    batch = batch_of(content, count=2, last_offset_delta=5)
    assert open_batches([batch]) == to_arrow([batch])
    usual = Batch.parse(encode([Record(0, NOON_MS, None, b"v")] * 3))
    assert open_batches([usual, batch, usual]) == to_arrow([usual, batch, usual])


def test_no_more_is_inflated_than_was_said_and_no_more_parsed_at_one_go() -> None:
    value = b"x" * 1_000
    batch = Batch.parse(encode([Record(0, 0, None, value)] * 1_000, compression="zstd"))
    with pytest.raises(CorruptBatch):
        open_batches([batch], max_bytes=100_000)
    many = [batch] * (limits.PARSED_BYTES // 1_000_000 + 2)
    assert open_batches(many) == to_arrow(many)
    large = Batch.parse(encode([Record(0, 0, None, value)] * 5_000, compression="zstd"))
    assert open_batches([large]) == to_arrow([large])


def test_more_than_arrow_takes_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, though each group of them would do."""
    batch = Batch.parse(encode([Record(0, 0, None, b"x" * 1_000)] * 600, compression="zstd"))
    monkeypatch.setattr(limits, "ARROW_BYTES", 1_500_000)
    assert open_batches([batch] * 2) == to_arrow([batch] * 2)
    for by in (open_batches, to_arrow):
        with pytest.raises(InvalidRequest, match="hold more than 1500000 bytes"):
            by([batch] * 3)


def test_offsets_that_no_column_holds_are_not_wrapped_around() -> None:
    data = encode([Record(0, NOON_MS, None, b"v")] * 3, base_offset=2**63 - 2)
    with pytest.raises(CorruptBatch):
        open_batches([Batch.parse(data)])


def test_control_batches_are_left_out() -> None:
    marker = Batch.parse(encode([Record(0, 0, b"\0\0\0\1", b"\0" * 6)], control=True))
    batch = Batch.parse(encode([Record(0, 0, None, b"v")]))
    assert open_batches([marker]) == to_arrow(())
    assert open_batches([marker, batch, marker]) == to_arrow([batch])
