"""Times and sizes found by binary search: the same answers as by walking over everything, in a
number of steps that does not grow with the log."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.disk.real import RealDisk
from quackmq.model.topic import OffsetTime, PartitionKey
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.files import format
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.segment_sums import Maxima, SealedSegments
from quackmq.stores.local.segmented_log import SegmentedLog
from tests.kit.support import START_MS, Clock, batch_of
from tests.stores.calls import append, new_partition, read_all
from tests.stores.conftest import SMALL


@given(st.lists(st.integers(-3, 9), max_size=70), st.integers(-4, 10))
def test_the_first_number_that_is_large_enough_is_found_from_every_place(
    numbers: list[int], least: int
) -> None:
    maxima = Maxima()
    for number in numbers:
        maxima.append(number)
    assert len(maxima) == len(numbers)
    for start in range(len(numbers) + 2):
        places = [place for place in range(start, len(numbers)) if numbers[place] >= least]
        assert maxima.first_at_least(least, start) == (places[0] if places else None)


def log_of(store: LocalStore, key: PartitionKey) -> SegmentedLog:
    return store._medium._logs[key]


def size_by_walking(log: SegmentedLog) -> int:
    return sum(each.size for each in log.segments)


def bytes_by_walking(log: SegmentedLog, first: int, next: int) -> int:
    total = 0
    for each in log.segments:
        low, high = max(first, each.base_offset), min(next, log.offset_after(each))
        if each.size and low < high:
            total += each.size * (high - low) // (log.offset_after(each) - each.base_offset)
    return total


@pytest.mark.parametrize("seed", range(4))
async def test_times_and_sizes_are_those_of_the_batches_whatever_was_trimmed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "FEW_SEGMENTS", 3)
    by = random.Random(seed)
    clock = Clock()
    store = await LocalStore.open_on(RealDisk(tmp_path), options=SMALL, now_ms=clock)
    key = await new_partition(store)
    kept: list[tuple[int, int, int]] = []  # next offset, timestamp, append time
    for round_ in range(60):
        for _ in range(by.randrange(6)):
            timestamp_ms = START_MS + by.randrange(50)
            batch = batch_of(*[b"x" * 50] * by.randrange(1, 3), timestamp_ms=timestamp_ms)
            answer = await append(store, key, batch)
            kept.append((answer.next_offset, timestamp_ms, clock()))
            if by.random() < 0.3:
                clock.advance(by.randrange(3 * limits.REGION_MS))
        first, end, *_ = await store.offsets(key)
        if by.random() < 0.4:
            first = await store.trim(key, by.randint(first, end))
        log = log_of(store, key)
        assert log.size == size_by_walking(log)
        for _ in range(5):
            low, high = sorted((by.randint(0, end + 1), by.randint(0, end + 1)))
            assert log.bytes_between(low, high) == bytes_by_walking(log, low, high)
        there = [each for each in kept if each[0] > first]
        time_ms = START_MS + by.randrange(-1, 52)
        ends = [each[0] for each in kept]
        begins = dict(zip(ends, [0, *ends], strict=False))
        found = await store.offset_for_time(key, time_ms)
        expected = next((each for each in there if each[1] >= time_ms), None)
        if expected is None:
            assert found is None
        else:
            assert found == OffsetTime(max(begins[expected[0]], first), expected[1])
        time_ms = by.randint(START_MS - 1, clock() + 1)
        found = await store.offset_for_time(key, time_ms, "append")
        exact = next((each for each in there if each[2] >= time_ms), None)
        early = next((each for each in there if each[2] > time_ms - limits.REGION_MS), None)
        if exact is not None:
            assert found is not None and early is not None
            assert max(begins[early[0]], first) <= found.offset <= max(begins[exact[0]], first)
        elif found is not None:
            assert early is not None and found.offset >= max(begins[early[0]], first)
        if round_ % 20 == 19:
            await store.close()
            store = await LocalStore.open_on(RealDisk(tmp_path), options=SMALL, now_ms=clock)
    assert len(log_of(store, key).segments) < 200
    assert len(await read_all(store, key)) == end - first
    await store.close()


async def test_a_lookup_by_time_takes_as_many_steps_in_a_log_ten_times_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    region_at = format.region_at

    def counting(*arguments: Any) -> Any:
        steps.append(1)
        return region_at(*arguments)

    clock = Clock()
    # Segments of 50 regions, one for each batch.
    batch = batch_of(b"x" * 100)
    options = LocalOptions(segment_bytes=50 * batch.size, region_bytes=1, tail_bytes=1, sync="os")
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options, now_ms=clock)
    key = await new_partition(store)
    counted: list[int] = []
    end = 0
    for batches in (200, 2_000):
        while end < batches:
            end = (await append(store, key, batch_of(b"x" * 100, timestamp_ms=end))).next_offset
            clock.advance(1)
        await store.offset_for_time(key, end - 150)  # once, to load what is kept in memory
        with monkeypatch.context() as patch:
            steps.clear()
            patch.setattr("quackmq.stores.local.files.segment.region_at", counting)
            assert await store.offset_for_time(key, end - 150) == OffsetTime(end - 150, end - 150)
            appended = await store.offset_for_time(key, START_MS + end - 150, "append")
            assert appended is not None and appended.offset == end - 150
            counted.append(len(steps))
    assert len(log_of(store, key).segments) > 2 * stores_limits.FEW_SEGMENTS
    assert counted[1] <= counted[0] + 8
    await store.close()


def test_a_segment_is_taken_in_when_the_next_one_has_begun() -> None:
    key = PartitionKey(uuid.UUID(int=1), 0)
    segments = [Segment(key, base_offset) for base_offset in (0, 10, 20)]
    for each in segments[:2]:
        each.size, each.max_timestamp_ms = 100, 5
    sealed = SealedSegments()
    assert sealed.add_sealed(segments) == 1  # the second may still grow: the third has nothing yet
    segments[1].size, segments[1].max_timestamp_ms = 150, 7
    segments[2].size = 1
    assert sealed.add_sealed(segments) == 2
    assert sealed.sum_bytes(2, 0, 2) == 250
    assert sealed.find_since(2, 0, 6) == 1
    assert not sealed.is_stale(segments)
    assert sealed.add_sealed(segments[1:]) == 1
    assert sealed.sum_bytes(1, 0, 1) == 150
    assert sealed.find_since(1, 0, 6) == 0
    assert sealed.is_stale(segments[2:])
