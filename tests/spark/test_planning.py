"""Ranges made into tasks: every offset once, in order, in shares of about the same size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quackmq.spark import limits as spark_limits
from quackmq.spark.source.splits import File, Piece, Range, limit_batch, plan_pieces, plan_tasks


def range_of(first: int, end: int, partition: int = 0, record_bytes: float = 1.0) -> Range:
    return Range("ducks", "id", partition, first, end, record_bytes)


def file_of(first: int, end: int, size: int = 100) -> File:
    return File(f"{first}.parquet", f"somewhere/{first}.parquet", first, end, size, 10, 0)


def spans(found: list[Piece]) -> list[tuple[int, int, bool]]:
    return [(each.first, each.next, each.file is not None) for each in found]


def test_a_range_is_covered_by_files_and_by_the_broker_for_the_rest() -> None:
    files = {("ducks", 0): [file_of(10, 20), file_of(20, 30)]}
    assert spans(plan_pieces([range_of(0, 40)], files)) == [
        (0, 10, False),
        (10, 20, True),
        (20, 30, True),
        (30, 40, False),
    ]
    assert spans(plan_pieces([range_of(15, 25)], files)) == [(15, 20, True), (20, 25, True)]
    assert spans(plan_pieces([range_of(30, 40)], files)) == [(30, 40, False)]
    assert spans(plan_pieces([range_of(0, 5, partition=1)], files)) == [(0, 5, False)]


offsets = st.integers(0, 1_000)


@given(
    st.lists(st.tuples(offsets, st.integers(0, 300), st.floats(0, 5_000)), max_size=6),
    st.lists(st.integers(1, 100), max_size=6),
    st.integers(1, 100_000),
    st.integers(1, 50),
)
def test_every_offset_is_in_one_task_in_order(
    wanted: list[tuple[int, int, float]], file_lengths: list[int], split_bytes: int, at_least: int
) -> None:
    ranges = [
        range_of(first, first + count, partition, size)
        for partition, (first, count, size) in enumerate(wanted)
    ]
    files, at = [], 100
    for length in file_lengths:
        files.append(file_of(at, at + length, size=length * 37))
        at += length
    archived = {("ducks", partition): files for partition in range(len(ranges))}
    found = plan_pieces(ranges, archived)
    tasks = plan_tasks(found, split_bytes=split_bytes, at_least=at_least)
    assert all(tasks) and all(each.first < each.next for task in tasks for each in task)
    read = [
        (each.partition, offset)
        for task in tasks
        for each in task
        for offset in range(each.first, each.next)
    ]
    expected = [(each.partition, at) for each in ranges for at in range(each.first, each.next)]
    assert read == expected
    assert all(
        each.file is None or each.file.first <= each.first < each.next <= each.file.next
        for task in tasks
        for each in task
    )


def test_shares_are_balanced_by_bytes() -> None:
    small = [range_of(0, 1_000, partition, record_bytes=10) for partition in range(10)]
    large = range_of(0, 1_000, 10, record_bytes=1_000)
    tasks = plan_tasks(plan_pieces([*small, large], {}), split_bytes=100_000)
    sizes = [sum(each.size for each in task) for task in tasks]
    assert 11 <= len(tasks) <= 16
    assert max(sizes) <= 100_000
    assert min(sizes[:-1]) >= 20_000


def test_records_weigh_also_where_they_are_packed_into_nothing() -> None:
    archived = {("ducks", 0): [file_of(0, 10_000_000, size=1_000)]}
    wanted = plan_pieces([range_of(0, 10_000_000)], archived)
    assert len(plan_tasks(wanted, split_bytes=spark_limits.SPARK_SPLIT_BYTES)) >= 10


def test_a_small_batch_of_many_partitions_is_one_task() -> None:
    ranges = [range_of(0, 3, partition, record_bytes=100) for partition in range(100)]
    assert len(plan_tasks(plan_pieces(ranges, {}), split_bytes=spark_limits.SPARK_SPLIT_BYTES)) == 1


def test_there_are_as_many_tasks_as_asked_for_but_none_without_an_offset() -> None:
    wanted = plan_pieces([range_of(0, 5)], {})
    assert len(plan_tasks(wanted, split_bytes=10**9, at_least=3)) == 3
    assert len(plan_tasks(wanted, split_bytes=10**9, at_least=100)) == 5
    assert plan_tasks([], split_bytes=1) == []
    tasks = plan_tasks(
        plan_pieces([range_of(0, 5), range_of(0, 4, 1)], {}), split_bytes=10**9, max_records=3
    )
    assert [sum(each.next - each.first for each in task) for task in tasks] == [2, 3, 2, 2]
    many = plan_pieces([range_of(0, 10**6)], {})
    assert len(plan_tasks(many, split_bytes=1)) <= spark_limits.SPARK_SPLITS


partitions = st.dictionaries(
    st.tuples(st.just("ducks"), st.integers(0, 5)),
    st.tuples(offsets, st.integers(0, 10_000), st.floats(0.01, 500)),
    max_size=6,
)


@given(partitions, st.none() | st.integers(1, 5_000), st.none() | st.integers(1, 100_000))
def test_a_limited_batch_moves_on_and_keeps_within_its_limits(
    given_sizes: dict[tuple[str, int], tuple[int, int, float]],
    max_offsets: int | None,
    max_bytes: int | None,
) -> None:
    sizes = {
        key: range_of(first, first + count, key[1], size)
        for key, (first, count, size) in given_sizes.items()
    }
    ends = limit_batch(sizes, max_offsets=max_offsets, max_bytes=max_bytes)
    taken = {key: ends[key] - sizes[key].first for key in sizes}
    there = {key: sizes[key].next - sizes[key].first for key in sizes}
    assert all(0 <= taken[key] <= there[key] for key in sizes)
    assert sum(taken.values()) > 0 or sum(there.values()) == 0
    if max_offsets is not None:
        assert sum(taken.values()) <= max_offsets
    if max_offsets is None and max_bytes is None:
        assert taken == there
    if max_bytes is not None and sum(taken.values()) > len(sizes):
        read_bytes = sum(taken[key] * sizes[key].record_bytes for key in sizes)
        largest = max(each.record_bytes for each in sizes.values())
        assert read_bytes <= max_bytes + largest * len(sizes)


def test_partitions_that_are_far_behind_get_most_of_a_limited_batch() -> None:
    sizes = {("ducks", 0): range_of(0, 900), ("ducks", 1): range_of(0, 100, 1)}
    ends = limit_batch(sizes, max_offsets=100, max_bytes=None)
    assert ends == {("ducks", 0): 90, ("ducks", 1): 10}
