"""The planner of merges: few files are left, and no record is rewritten often."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import ArchiveFile, Manifest, add, empty, file_name, replace, trim
from quackmq.archive.merging.planner import Merge, MergeSettings, plan
from quackmq.errors import InvalidSetting
from tests.archive.support import KEY, TOPIC
from tests.kit import effort

#: No test asserts a time: a busy machine is no bug.
UNTIMED = settings(deadline=None, max_examples=effort.of(60))
SMALL = MergeSettings(target_bytes=64_000)


def file_of(
    first: int, end: int, version: int, size: int, records: int | None = None
) -> ArchiveFile:
    records = end - first if records is None else records
    bounds = (first, end - 1, first, end - 1) if records else (None, None, None, None)
    return ArchiveFile(file_name(first, version), first, end, records, size, 50, 5, *bounds)


def listed_of(*sizes: int, records: int = 10) -> Manifest:
    """Files of so many bytes, each of as many records."""
    listed = empty(KEY, TOPIC, 0)
    for size in sizes:
        first = listed.next_offset
        listed = add(listed, file_of(first, first + records, listed.version + 1, size))
    return listed


def merged(listed: Manifest, merge: Merge, size: int | None = None) -> Manifest:
    """As if somebody had carried it out."""
    first, end = merge.first_offset, merge.next_offset
    records = min(end - first, sum(file.records for file in merge.files))
    new = file_of(first, end, listed.version + 1, size or merge.size, records)
    return replace(listed, merge.names, [new], merge.version)


def indices(listed: Manifest, merges: list[Merge]) -> list[list[int]]:
    return [[listed.files.index(file) for file in merge.files] for merge in merges]


# --- which files ---------------------------------------------------------------------------------


def test_small_neighbours_become_one_when_together_they_are_four_times_each() -> None:
    assert plan(listed_of(1_000, 1_000, 1_000), SMALL) == []
    listed = listed_of(1_000, 1_000, 1_000, 1_000)
    (merge,) = plan(listed, SMALL)
    assert merge.files == listed.files
    assert (merge.first_offset, merge.next_offset, merge.size) == (0, 40, 4_000)
    assert (merge.key, merge.version) == (KEY, listed.version)


def test_as_many_as_fit_become_one_at_once() -> None:
    listed = listed_of(*[1_000] * 100)
    assert indices(listed, plan(listed, SMALL)) == [list(range(64)), list(range(64, 100))]
    few = dataclasses.replace(SMALL, most_files=10)
    assert [len(merge.files) for merge in plan(listed, few)] == [10] * 10


def test_large_files_are_left_alone_and_part_their_neighbours() -> None:
    listed = listed_of(1_000, 1_000, 32_000, 1_000, 1_000, 40_000, 100_000)
    assert plan(listed, SMALL) == []
    listed = listed_of(*[1_000] * 4, 32_000, *[1_000] * 4)
    assert indices(listed, plan(listed, SMALL)) == [[0, 1, 2, 3], [5, 6, 7, 8]]


def test_two_that_make_a_large_one_are_enough() -> None:
    listed = listed_of(16_000, 16_000)
    assert indices(listed, plan(listed, SMALL)) == [[0, 1]]
    assert plan(listed_of(15_000, 15_000), SMALL) == []


def test_a_large_one_is_not_rewritten_for_a_few_records() -> None:
    listed = add(listed_of(20_000, records=1_000), file_of(1_000, 1_010, 2, 500))
    assert plan(listed, SMALL) == []


def test_files_without_a_record_become_one_with_each_other() -> None:
    listed = empty(KEY, TOPIC, 0)
    for first in range(0, 30, 10):
        listed = add(listed, file_of(first, first + 10, listed.version + 1, 900, records=0))
    (merge,) = plan(listed, SMALL)
    assert len(merge.files) == 3


def test_what_is_excluded_stays_as_it_is() -> None:
    listed = listed_of(*[1_000] * 9)
    damaged = listed.files[4].name
    assert indices(listed, plan(listed, SMALL, {damaged})) == [[0, 1, 2, 3], [5, 6, 7, 8]]


def test_footers_that_would_not_fit_into_one_are_not_merged() -> None:
    listed = listed_of(*[10 * limits.MIB] * 8)
    tail_bytes = archive_limits.ARCHIVE_TAIL_BYTES // 10
    heavy = tuple(dataclasses.replace(file, tail_bytes=tail_bytes) for file in listed.files)
    assert plan(listed) != []
    assert plan(dataclasses.replace(listed, files=heavy)) == []


# --- days ----------------------------------------------------------------------------------------

DAY_MS = 24 * 3_600_000


def appended(listed: Manifest, *times: tuple[int, int] | None) -> Manifest:
    """The same files, appended between these times; None for one without a record."""
    files = [
        dataclasses.replace(file, least_append_ms=time[0], greatest_append_ms=time[1])
        if time is not None
        else file_of(file.first_offset, file.next_offset, number + 1, file.size, records=0)
        for number, (file, time) in enumerate(zip(listed.files, times, strict=True))
    ]
    return dataclasses.replace(listed, files=tuple(files))


def test_s5_by_day_no_merge_goes_on_into_another_day() -> None:
    listed = listed_of(*[1_000] * 9)
    first, second = (5, 6), (DAY_MS, DAY_MS + 1)
    days = appended(listed, *[first] * 4, (7, DAY_MS + 3), *[second] * 4)
    assert indices(days, plan(days, SMALL)) == [list(range(9))]
    by_day = dataclasses.replace(SMALL, by_day=True)
    # What was archived across midnight is of the day that it began in.
    assert indices(days, plan(days, by_day)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


def test_by_day_a_file_without_a_record_is_of_any_day() -> None:
    listed = appended(listed_of(*[1_000] * 6), (5, 6), None, (7, 8), (9, 9), (9, 9), (DAY_MS,) * 2)
    by_day = dataclasses.replace(SMALL, by_day=True)
    assert indices(listed, plan(listed, by_day)) == [[0, 1, 2, 3, 4]]


# --- the edge ------------------------------------------------------------------------------------


def test_an_edge_is_rewritten_when_more_than_a_share_of_it_is_gone() -> None:
    listed = listed_of(60_000, 60_000, records=100)
    assert plan(trim(listed, 50), SMALL) == []
    cut = trim(listed, 51)
    (merge,) = plan(cut, SMALL)
    assert (merge.files, merge.first_offset, merge.next_offset) == (cut.files[:1], 51, 100)
    assert plan(cut, SMALL, {cut.files[0].name}) == []
    assert plan(merged(cut, merge, size=30_000), SMALL) == []
    assert plan(cut, dataclasses.replace(SMALL, edge_share=0.9)) == []


def test_an_edge_is_merged_with_its_neighbours_without_what_is_gone() -> None:
    listed = trim(listed_of(*[1_000] * 5), 8)
    (merge,) = plan(listed, SMALL)
    assert (merge.files, merge.first_offset) == (listed.files, 8)


# --- how often, how many -------------------------------------------------------------------------


@UNTIMED
@given(
    st.lists(st.tuples(st.integers(1, 5_000), st.integers(100, 70_000)), min_size=1, max_size=120),
    st.data(),
)
def test_no_record_is_rewritten_more_often_than_its_file_can_double(
    arrivals: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever compression makes of the merged files."""
    listed = empty(KEY, TOPIC, 0)
    rewrites: dict[str, int] = {}
    for records, size in arrivals:
        first = listed.next_offset
        listed = add(listed, file_of(first, first + records, listed.version + 1, size))
        rewrites[listed.files[-1].name] = 0
        while merges := plan(listed, SMALL):
            for merge in merges:
                size = max(100, int(merge.size * data.draw(st.sampled_from([0.3, 0.7, 1.0, 1.1]))))
                # All merges of a plan are carried out, each while the others are.
                listed = merged(listed, merge, size)
                made = listed.files[listed.file_at(merge.first_offset)]
                rewrites[made.name] = 1 + max(rewrites[name] for name in merge.names)
                assert made.records >= 2 * max(file.records for file in merge.files)
    for file in listed.files:
        assert rewrites[file.name] <= log2(file.records)
    assert manifests.broken_rule(listed) is None


def test_files_that_come_one_by_one_are_left_few_and_written_seldom() -> None:
    """64 files of an hour each a target: three rewrites, and at most three of each size."""
    listed = empty(KEY, TOPIC, 0)
    written = arrived = 0
    for _ in range(1_000):
        first = listed.next_offset
        listed = add(listed, file_of(first, first + 100, listed.version + 1, 1_000))
        arrived += 1_000
        while merges := plan(listed, SMALL):
            listed = merged(listed, merges[0])
            written += merges[0].size
    large = [file for file in listed.files if file.size >= SMALL.target_bytes // 2]
    assert len(listed.files) - len(large) <= 9
    assert len(large) <= 1_000_000 // (SMALL.target_bytes // 2)
    assert written <= 3 * arrived


@UNTIMED
@given(st.lists(st.integers(1, 200), min_size=1, max_size=300), st.integers(0, 20_000))
def test_a_plan_has_no_file_twice_and_only_neighbours(sizes: list[int], before: int) -> None:
    listed = empty(KEY, TOPIC, 0)
    for size in sizes:
        first = listed.next_offset
        listed = add(listed, file_of(first, first + size, listed.version + 1, size * 100))
    listed = trim(listed, min(before, listed.next_offset - 1))
    seen: list[ArchiveFile] = []
    for merge in plan(listed, SMALL):
        assert all(left.next_offset == right.first_offset for left, right in pairwise(merge.files))
        seen += merge.files
        listed_later = merged(listed, merge)
        assert manifests.broken_rule(listed_later) is None
    assert len({file.name for file in seen}) == len(seen)
    assert seen == sorted(seen, key=lambda file: file.first_offset)


@pytest.mark.parametrize(
    "wrong",
    [{"target_bytes": 0}, {"growth": 1}, {"most_files": 1}, {"edge_share": 0}, {"edge_share": 1.0}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        MergeSettings(**wrong)
