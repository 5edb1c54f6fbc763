"""Derive ranges of offsets, partitions and times from the filters of a query, to skip the rest.

Spark still applies all filters; here ranges only become smaller. A lower bound on timestamps
determines where to start: at the first record that has this time or a later one. An upper bound
cannot determine the end, because producers set timestamps freely. But archived files without a
matching timestamp are skipped. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a query; None means no bound. `first` and `next` are offsets, [first, next)."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first: int | None = None
    next: int | None = None
    least_ms: int | None = None
    greatest_ms: int | None = None

    def has(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (
            self.partitions is None or partition in self.partitions
        )

    def may_match(self, least_ms: int | None, greatest_ms: int | None) -> bool:
        """Return whether records with timestamps in this range may match the query. None means that
        their timestamps are unknown: they may match."""
        if least_ms is None or greatest_ms is None:
            return True
        return not (
            (self.least_ms is not None and greatest_ms < self.least_ms)
            or (self.greatest_ms is not None and least_ms > self.greatest_ms)
        )


def derive_bounds(filters: Iterable[Filter]) -> Bounds:
    """Return the bounds that all filters together set. A filter that sets no bound is ignored:
    Spark applies it to the rows."""
    bounds = Bounds()
    for condition in filters:
        attribute = getattr(condition, "attribute", None)
        # A longer path names a field inside a column.
        narrow = _NARROW_BY_COLUMN.get(attribute[0]) if attribute and len(attribute) == 1 else None
        if narrow is not None and type(condition) in _USABLE_FILTERS:
            bounds = narrow(bounds, condition)
    return bounds


_EQUAL: Final = (EqualTo, EqualNullSafe)
_USABLE_FILTERS: Final = (*_EQUAL, In, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


def _accepted_values(condition: Any) -> frozenset[Any] | None:
    """Return the values that the filter accepts; None for a filter by range."""
    if isinstance(condition, In):
        return frozenset(value for value in condition.value if value is not None)
    return (
        frozenset({condition.value})
        if isinstance(condition, _EQUAL) and condition.value is not None
        else None
    )


def _narrow_topics(bounds: Bounds, condition: Any) -> Bounds:
    values = _accepted_values(condition)
    return bounds if values is None else replace(bounds, topics=_intersect(bounds.topics, values))


def _narrow_partitions(bounds: Bounds, condition: Any) -> Bounds:
    """Keep only the partitions that the filter accepts."""
    values = _accepted_values(condition)
    return (
        bounds
        if values is None
        else replace(bounds, partitions=_intersect(bounds.partitions, values))
    )


def _narrow_offsets(bounds: Bounds, condition: Any) -> Bounds:
    """Move `first` up and `next` down to the offsets that the filter accepts."""
    least, most = _accepted_range(condition, lambda value: value if type(value) is int else None)
    return replace(
        bounds,
        first=_maximum(bounds.first, least),
        # `next` is excluded, and `most` is not.
        next=_minimum(bounds.next, None if most is None else most + 1),
    )


def _narrow_timestamps(bounds: Bounds, condition: Any) -> Bounds:
    """Narrow the times to those that the filter accepts, in whole milliseconds."""
    least, most = _accepted_range(condition, _to_milliseconds, is_whole=False)
    return replace(
        bounds,
        least_ms=_maximum(bounds.least_ms, least),
        greatest_ms=_minimum(bounds.greatest_ms, most),
    )


_NARROW_BY_COLUMN: Final[Mapping[str, Callable[[Bounds, Any], Bounds]]] = {
    "topic": _narrow_topics,
    "partition": _narrow_partitions,
    "offset": _narrow_offsets,
    "timestamp": _narrow_timestamps,
}


def _accepted_range(
    condition: Any, to_number: Callable[[Any], int | None], is_whole: bool = True
) -> tuple[int | None, int | None]:
    """Return the smallest and the largest accepted value, both inclusive; None means no bound. With
    `is_whole` false, values were rounded down, so that a strict bound includes its own value."""
    values = _accepted_values(condition)
    if values is not None:
        numbers = [to_number(value) for value in values]
        if not numbers or any(value is None for value in numbers):
            return None, None
        return min(n for n in numbers if n is not None), max(n for n in numbers if n is not None)
    value = to_number(condition.value)
    if value is None:
        return None, None
    if isinstance(condition, GreaterThan):
        return value + (1 if is_whole else 0), None
    if isinstance(condition, GreaterThanOrEqual):
        return value, None
    if isinstance(condition, LessThan):
        return None, value - (1 if is_whole else 0)
    return None, value


def _to_milliseconds(value: Any) -> int | None:
    """Return whole milliseconds, rounded down."""
    if not isinstance(value, datetime.datetime):
        return None
    elapsed = value.astimezone(datetime.UTC) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return elapsed // datetime.timedelta(milliseconds=1)


def _intersect(values: frozenset[Any] | None, other_values: frozenset[Any]) -> frozenset[Any]:
    return other_values if values is None else values & other_values


def _maximum(first: int | None, second: int | None) -> int | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _minimum(first: int | None, second: int | None) -> int | None:
    return min((value for value in (first, second) if value is not None), default=None)
