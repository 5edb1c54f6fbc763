"""What goes into the archive comes out byte for byte, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.parquet.from_batches import CommittedBatch
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.records.batch import COMPRESSIONS, Batch, Record
from quackmq.records.codec import BatchWriter, decode
from tests.archive.support import NOON_MS, Archive, committed, opened, read_all, records_of
from tests.kit import effort
from tests.kit.batches import sealed

UNTIMED = settings(
    deadline=None,
    max_examples=effort.of(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

optional_bytes = st.none() | st.binary(max_size=40) | st.sampled_from([b"", b"\x00" * 70_000])
times = (
    st.sampled_from(
        [-1, 0, NOON_MS, 2**63 - 2, -(2**63) + 1, (2**63 - 1) // 1000, 2**63 // 1000 + 1]
    )
    | st.integers(-(2**63) + 1, 2**63 - 2)
    | st.integers(NOON_MS, NOON_MS + 10_000)
)
headers = st.lists(st.tuples(st.text(max_size=10), optional_bytes), max_size=5).map(tuple)
many_headers = st.integers(0, 300).map(lambda n: tuple((f"name {i}", b"v") for i in range(n)))
records = st.builds(Record, st.just(0), times, optional_bytes, optional_bytes, headers)
records |= st.builds(Record, st.just(0), times, st.none(), st.just(b"v"), many_headers)


@st.composite
def entries(draw: st.DrawFn) -> list[CommittedBatch]:
    """Batches of producers with and without a name, with holes in between."""
    found = []
    offset = draw(st.sampled_from([0, 5, 2**40]))
    for _ in range(draw(st.integers(1, 6))):
        producer = draw(st.sampled_from([{}, {"producer_id": 9, "producer_epoch": 1}]))
        if producer:
            producer["base_sequence"] = draw(st.sampled_from([-1, 0, 2**31 - 2]))
        entry = committed(
            draw(st.lists(records, min_size=1, max_size=8)),
            offset,
            compression=draw(st.sampled_from(COMPRESSIONS)),
            transactional=bool(producer) and draw(st.booleans()),
            append_time_ms=NOON_MS + offset % 1000,
            publisher=draw(st.sampled_from([None, "mill"])),
            **producer,
        )
        found.append(entry)
        offset = entry.batch.next_offset + draw(st.sampled_from([0, 0, 1, 7, 2_000_000]))
    return found


@UNTIMED
@given(
    entries=entries(),
    cuts=st.sets(st.integers(1, 5)),
    hole=st.sampled_from([0, 3]),
    max_bytes=st.sampled_from([1, 200, 100_000, 1 << 20]),
    group_rows=st.sampled_from([1, 3, 65_536]),
)
def test_any_records_come_back_byte_for_byte(
    entries: list[CommittedBatch], cuts: set[int], hole: int, max_bytes: int, group_rows: int
) -> None:
    archive = Archive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", group_rows)
        bounds = [0, *sorted(cut for cut in cuts if cut < len(entries)), len(entries)]
        for start, end in zip(bounds, bounds[1:], strict=False):
            part = entries[start:end]
            following = entries[end].batch.base_offset if end < len(entries) else None
            last = part[-1].batch.next_offset + (hole if following is None else 0)
            archive.add(part, last if following is None else min(last + hole, following))
        reader = ArchiveReader(archive.disk)
        assert read_all(reader, archive.manifest, max_bytes) == records_of(entries)
        for entry in entries:
            piece = reader.read(archive.manifest, entry.batch.base_offset, 1)
            first = opened(piece.batches[0])
            assert first.base_offset == entry.batch.base_offset
            assert producer_of(first) == producer_of(entry.batch)


def producer_of(batch: Batch) -> tuple[int, int, int, int]:
    return (batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.timestamp_type)


@pytest.fixture
def archive() -> Archive:
    return Archive()


def back(archive: Archive, max_bytes: int = 1 << 20) -> list[Record]:
    return read_all(ArchiveReader(archive.disk), archive.manifest, max_bytes)


def test_times_of_the_broker_stay_its_own(archive: Archive) -> None:
    writer = BatchWriter(append_time=True)
    for delta in range(3):
        writer.add(delta, NOON_MS, None, b"v")
    entry = CommittedBatch(Batch.parse(writer.finish(0)), NOON_MS)
    archive.add([entry, committed([Record(0, 5, None, b"")], 3)])
    piece = ArchiveReader(archive.disk).read(archive.manifest, 0, 1 << 20)
    found = [opened(data) for data in piece.batches]
    assert [(one.timestamp_type, one.base_timestamp) for one in found] == [(1, NOON_MS), (0, 5)]
    assert [record.timestamp_ms for one in found for record in decode(one)] == [NOON_MS] * 3 + [5]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_huge_values_come_back(archive: Archive, compression: str) -> None:
    sizes = [1, 12 * limits.MIB, 1, 3 * limits.MIB, 1]
    some = [Record(0, 1, b"k", bytes([size % 251]) * size) for size in sizes]
    entry = committed(some, 0, compression=compression)
    archive.add([entry])
    assert back(archive) == records_of([entry])
    assert back(archive, 1) == records_of([entry])


def test_a_record_that_only_compression_made_a_batch_comes_back_compressed(
    archive: Archive,
) -> None:
    some = [Record(0, 1, None, bytes(size)) for size in (5, 20 * limits.MIB, 5)]
    entry = committed(some, 3, compression="gzip", producer_id=4, producer_epoch=0, base_sequence=8)
    archive.add([entry])
    assert back(archive) == records_of([entry])
    piece = ArchiveReader(archive.disk).read(archive.manifest, 4, 1)
    assert opened(piece.batches[0]).compression == "zstd"
    assert producer_of(opened(piece.batches[0])) == (4, 0, 9, 0)


def test_a_producers_numbers_wrap_and_its_runs_are_batches(archive: Archive) -> None:
    def numbered(offset: int, sequence: int, count: int, **fields: Any) -> CommittedBatch:
        records = [Record(0, 1, None, b"v")] * count
        return committed(
            records, offset, producer_id=1, producer_epoch=0, base_sequence=sequence, **fields
        )

    # The second goes on where the first ends, the third lies behind a hole.
    archive.add(
        [numbered(0, 2**31 - 2, 3), numbered(3, 1, 2), numbered(6, 3, 1), numbered(7, 4, 2)]
    )
    piece = ArchiveReader(archive.disk).read(archive.manifest, 0, 1 << 20)
    found = [opened(data) for data in piece.batches]
    assert [(one.base_offset, one.base_sequence, one.record_count) for one in found] == [
        (0, 2**31 - 2, 5),
        (6, 3, 3),
    ]


def test_poison_is_kept_as_it_came_and_read_in_its_place(archive: Archive) -> None:
    poison = Batch.parse(sealed(b"\x01no records", base_offset=2))
    around = [committed([Record(0, 1, None, b"v")] * 2, offset) for offset in (0, 3)]
    archive.add([around[0], CommittedBatch(poison, NOON_MS), around[1]])
    piece = ArchiveReader(archive.disk).read(archive.manifest, 0, 1 << 20)
    assert piece.batches[1] == bytes(poison.view)
    assert [opened(data).base_offset for data in piece.batches] == [0, 2, 3]
    assert piece.next_offset == 5
    (one,) = archive.manifest.quarantined
    assert (one.first_offset, one.next_offset) == (2, 3)
    assert archive.manifest.records == 4
