"""Batches made ahead of who reads on: the same records, within the same bounds, and less work."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from quackmq.archive.parquet import reader as reader_module
from quackmq.archive.parquet.from_batches import CommittedBatch
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.to_batches import encode
from quackmq.archive.prefetch_buffer import PrefetchBuffer
from quackmq.model.topic import PartitionKey
from quackmq.records.codec import decode
from tests.archive.support import KEY, Archive, opened, plain, read_all, records_of
from tests.stores.local.test_inspection import undecodable

OTHER = PartitionKey(uuid.UUID(int=8), 0)


def test_what_waits_is_taken_once_and_only_where_it_begins() -> None:
    ahead = PrefetchBuffer(10_000)
    ahead.put(KEY, 5, [b"five", b"six"])
    assert ahead.first_size(KEY, 5) == 4
    assert ahead.pop(KEY, 4) is None
    assert ahead.pop(OTHER, 5) is None
    assert ahead.pop(KEY, 5) == (b"five", b"six")
    assert ahead.pop(KEY, 5) is None


def test_that_somebody_has_read_up_to_an_offset_is_known_without_any_batches() -> None:
    ahead = PrefetchBuffer(10_000)
    ahead.put(KEY, 5, [])
    assert ahead.first_size(KEY, 5) == 0
    assert ahead.pop(KEY, 5) == ()


def test_those_that_waited_longest_go_first() -> None:
    ahead = PrefetchBuffer(3_000)
    for offset in range(5):
        ahead.put(KEY, offset, [bytes(500)])
    assert [ahead.pop(KEY, offset) is None for offset in range(5)] == [True] * 3 + [False] * 2


def test_one_that_is_larger_than_all_that_may_wait_does_not_stay() -> None:
    ahead = PrefetchBuffer(1_000)
    ahead.put(KEY, 0, [bytes(2_000)])
    assert ahead.pop(KEY, 0) is None
    ahead.put(KEY, 1, [b"small"])
    assert ahead.pop(KEY, 1) == (b"small",)


def test_more_is_wanted_behind_what_waits_until_it_is_enough_or_there_is_no_room() -> None:
    first, second, third = (bytes(plain(begin, 10, size=50).batch.view) for begin in (0, 10, 20))
    ahead = PrefetchBuffer(10_000)
    assert ahead.run_end(KEY, 0, 5_000) is None, "nobody reads there"
    ahead.put(KEY, 0, [first, second])
    assert ahead.run_end(KEY, 0, 5_000) == 20
    assert ahead.run_end(KEY, 0, len(first)) is None, "it is enough"
    assert ahead.run_end(KEY, 0, 9_500) is None, "there is no room"
    ahead.put(KEY, 20, [])
    assert ahead.run_end(KEY, 0, 5_000) is None, "somebody is about to read it"
    ahead.put(KEY, 20, [third])
    assert ahead.run_end(KEY, 0, 5_000) == 30
    ahead.put(KEY, 20, [])
    assert ahead.pop(KEY, 20) == (third,), "what waits goes on waiting"


@pytest.mark.parametrize("max_bytes", [1, 300, 5_000, 1 << 20])
def test_who_reads_on_gets_every_record_within_the_bounds(max_bytes: int) -> None:
    archive = Archive()
    entries = [plain(first, 20, size=50) for first in range(0, 200, 20)]
    archive.add(entries[:6])
    archive.add(entries[6:])
    reader = ArchiveReader(archive.disk)
    for _ in range(2):
        assert read_all(reader, archive.manifest, max_bytes) == records_of(entries)


def test_whoever_reads_here_and_there_gets_what_lies_there() -> None:
    """Readers of all kinds on one partition, with bounds of all kinds."""
    archive = Archive()
    entries = [plain(first, 100, size=50) for first in range(0, 1_000, 100)]
    archive.add(entries)
    everything = records_of(entries)
    reader = ArchiveReader(archive.disk)
    chance = random.Random(7)
    offsets = [0, 0, 0, 500]
    for _ in range(300):
        index = chance.randrange(len(offsets))
        if offsets[index] >= 1_000 or chance.random() < 0.1:
            offsets[index] = chance.randrange(1_000)
        max_bytes = chance.choice((1, 400, 3_000, 20_000, 1 << 20))
        piece = reader.read(archive.manifest, offsets[index], max_bytes)
        found = [record for data in piece.batches for record in decode(opened(data))]
        assert found == everything[offsets[index] : piece.next_offset]
        assert len(piece.batches) == 1 or sum(map(len, piece.batches)) <= max_bytes
        offsets[index] = piece.next_offset


def test_what_is_made_ahead_ends_before_a_quarantined_batch() -> None:
    archive = Archive()
    poison = undecodable()
    archive.add([CommittedBatch(poison, 0), plain(poison.next_offset, 500)])
    reader = ArchiveReader(archive.disk)
    offset, found = 0, []
    while offset < archive.manifest.next_offset:
        piece = reader.read(archive.manifest, offset, 2_000)
        found += [opened(data).base_offset for data in piece.batches]
        offset = piece.next_offset
    assert found == sorted(set(found)) and found[0] == poison.base_offset


def test_who_reads_on_costs_less_than_who_reads_here_and_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def counted(*arguments: Any, **more: Any) -> object:
        nonlocal calls
        calls += 1
        return encode(*arguments, **more)

    monkeypatch.setattr(reader_module, "encode", counted)
    archive = Archive()
    archive.add([plain(first, 100, size=50) for first in range(0, 5_000, 100)])
    reader = ArchiveReader(archive.disk)
    offset = reads = 0
    while offset < 5_000:
        offset = reader.read(archive.manifest, offset, 5_000).next_offset
        reads += 1
    assert calls < reads / 5
