"""Filters make ranges smaller, never too small."""

from __future__ import annotations

import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from quackmq.spark.source.filters import Bounds, derive_bounds
from tests.kit.tables import each

TIME = datetime.datetime(2026, 11, 16, 9, 0, 0, 1_500, tzinfo=datetime.UTC)
TIME_MS = 1_794_819_600_001


@each(
    ("filters", "expected"),
    [
        ([], Bounds()),
        ([GreaterThan(("offset",), 5)], Bounds(first=6)),
        ([GreaterThanOrEqual(("offset",), 5), LessThan(("offset",), 9)], Bounds(first=5, next=9)),
        ([LessThanOrEqual(("offset",), 9)], Bounds(next=10)),
        ([EqualTo(("offset",), 7)], Bounds(first=7, next=8)),
        ([In(("offset",), (3, 9, 5))], Bounds(first=3, next=10)),
        ([GreaterThan(("offset",), 5), GreaterThan(("offset",), 3)], Bounds(first=6)),
        (
            [In(("partition",), (1, 2)), EqualTo(("partition",), 2)],
            Bounds(partitions=frozenset({2})),
        ),
        ([EqualNullSafe(("topic",), "ducks")], Bounds(topics=frozenset({"ducks"}))),
        ([GreaterThan(("timestamp",), TIME)], Bounds(least_ms=TIME_MS)),
        ([LessThan(("timestamp",), TIME)], Bounds(greatest_ms=TIME_MS)),
        # What is not understood changes nothing.
        ([Not(EqualTo(("offset",), 5)), IsNotNull(("offset",))], Bounds()),
        ([EqualTo(("value",), b"x"), EqualTo(("headers", "key"), "x")], Bounds()),
        ([GreaterThan(("offset",), None), In(("offset",), ())], Bounds()),
        ([LessThan(("partition",), 3)], Bounds()),
    ],
)
def test_bounds(filters: list[Filter], expected: Bounds) -> None:
    assert derive_bounds(filters) == expected


def test_what_may_hold_a_time_is_not_left_out() -> None:
    bounds = Bounds(least_ms=10, greatest_ms=20)
    assert bounds.may_match(20, 30) and bounds.may_match(0, 10) and bounds.may_match(0, 99)
    assert not bounds.may_match(21, 30) and not bounds.may_match(0, 9)
    unknown: Any = None
    assert bounds.may_match(unknown, unknown) and Bounds().may_match(0, 0)
